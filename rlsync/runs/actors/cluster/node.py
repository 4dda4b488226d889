"""One node of a cluster as the learner sees it: where it is, its agent, and the calls that are open there."""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import psutil
import ray
from ray.exceptions import RayError, RayTaskError

from rlsync import RlsyncError
from rlsync.runs.actors.ring.format import RingCounters
from rlsync.seams import first_line, processes

#: An agent answers a call for a rollout after at most so many seconds: this is its sign of life.
ANSWER_WITHIN_S = 2.0

_GONE_WITHIN_S = 5.0  #: how long killed processes may take to be gone
_ENDED_WITHIN_S = 2.0  #: how long Ray may take to end an agent that does not answer it


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine of the cluster: Ray's id of it, its IP address, its name, and the resources that it has."""

    node_id: str
    address: str
    host: str
    resources: dict[str, float] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        return f"{self.host} ({self.address}, node {self.node_id[:8]})"


def living_machines() -> list[Machine]:
    machines = []
    for node in ray.nodes():
        if node["Alive"]:
            machine = Machine(
                node_id=node["NodeID"],
                address=node["NodeManagerAddress"],
                host=node["NodeManagerHostname"],
                resources=dict(node["Resources"]),
            )
            machines.append(machine)
    return machines


@dataclass(eq=False)
class Node:
    """An agent with ``credits`` open calls."""

    machine: Machine
    seat: int
    agent: Any
    credits: int
    start_timeout_s: float

    def __post_init__(self) -> None:
        timeout_s = self.start_timeout_s
        self.pid: int | None = None
        self.arrived = 0
        self.counters: RingCounters | None = None
        self._start_until_s = time.monotonic() + timeout_s + ANSWER_WITHIN_S
        self._calls: deque[Future[Any]] = deque()
        self._answered_at_s = time.monotonic()
        self._next_call = 0
        self._starting: Future[int] = self.agent.start.remote(timeout_s).future()

    @property
    def acting(self) -> bool:
        """Whether its workers were ready once."""
        return self.pid is not None

    @property
    def too_late(self) -> bool:
        """Whether its workers should have been ready by now."""
        return not self.acting and time.monotonic() > self._start_until_s

    @property
    def head(self) -> Future[Any]:
        """What answers next: the start, or the oldest call for a rollout.

        A future, not a reference: Ray pulls each rollout as soon as it is made, and a look costs no call of it.
        """
        if self.acting:
            return self._calls[0]
        return self._starting

    @property
    def silent_s(self) -> float:
        return time.monotonic() - self._answered_at_s

    @property
    def lost(self) -> int:
        """Rollouts that its workers had completed, as far as is known, and that have not arrived."""
        if self.counters is None:
            return 0
        return max(0, self.counters.written - self.arrived)

    def note_life(self) -> None:
        self._answered_at_s = time.monotonic()

    def note_ready(self, pid: int) -> None:
        self.pid = pid
        self._refill()

    def note_taken(self) -> None:
        self._calls.popleft()
        self._refill()

    def _refill(self) -> None:
        while len(self._calls) < self.credits:
            call = self.agent.take.remote(self._next_call, ANSWER_WITHIN_S)
            self._calls.append(call.future())
            self._next_call += 1

    def kill(self, *, on_this_machine: bool = False) -> None:
        """End the agent; workers see that, and on this machine they are ended at once, stopped ones too."""
        # First: the children of an agent that Ray has ended are not found any more.
        if on_this_machine and self.pid is not None:
            family = family_of(self.pid)
        else:
            family = []
        ray.kill(self.agent, no_restart=True)
        kill_family(family)


def family_of(pid: int) -> list[int]:
    """An agent of this machine and what it started, down to the last child; nothing if it is no agent."""
    with suppress(psutil.Error):
        agent = psutil.Process(pid)
        if processes.process_state(pid) == "dead":
            command = ""
        else:
            command = " ".join(agent.cmdline())
        # one that dies has none; a number may be given again
        if not command or "NodeAgent" in command:
            return [pid, *(child.pid for child in agent.children(recursive=True))]
    return []


def kill_family(family: list[int]) -> None:
    """SIGKILL all of an agent's family, and wait. The agent last, for Ray prints advice on other deaths."""
    gone = {None, "dead"}
    for killed, within_s in ((family[1:], _ENDED_WITHIN_S), (family, _GONE_WITHIN_S)):
        for member in killed:
            with suppress(ProcessLookupError):
                os.kill(member, signal.SIGKILL)
        until_s = time.monotonic() + within_s
        while (
            not gone.issuperset(map(processes.process_state, family)) and time.monotonic() < until_s
        ):
            time.sleep(0.01)


def why(error: RayError) -> str:
    if isinstance(error, RayTaskError):
        if isinstance(error.cause, RlsyncError):
            return error.cause.what
        error = error.cause
    return f"{type(error).__name__}: {first_line(error)}"
