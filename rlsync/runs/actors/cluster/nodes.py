"""The nodes of a cluster as the learner sees them: who joins, who is lost, and who is started again."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError

from rlsync import AdoptionTimeout, ConfigError, WorkerLost
from rlsync.runs.actors.cluster.node import Machine, Node, living_machines, why
from rlsync.runs.actors.cluster.session import check_reachable
from rlsync.runs.actors.supervision import Pauses, Restarts
from rlsync.seams import processes

_log = logging.getLogger(__name__)

_ASK_RAY_EVERY_S = 1.0  #: how often the learner asks Ray which nodes there are

#: How long the GCS may be gone. After a minute Ray ends its processes, this one too.
_GCS_BACK_WITHIN_S = 15.0

_END_TIMEOUT_S = 5.0  #: how long an agent may take to end itself beyond what its workers may take


@dataclass(frozen=True, slots=True)
class Placement:
    """Which nodes get an agent; a ConfigError if a number is out of range."""

    beside_learner: bool = True  # whether the learner's own node gets one, too
    # what an agent takes of Ray's resources, by name; a node that has less gets none
    resources: Mapping[str, float] = field(default_factory=dict)
    min_nodes: int = 1  # there must be so many before the first batch
    # rollouts of a node that may be on their way, or wait for the learner, at once
    credits: int = 2
    # of an agent that was lost, on its node, while the node lives
    restarts: Restarts = field(default_factory=Restarts)
    node_timeout_s: float = 30.0  # an agent that gives no answer for so long is killed
    start_timeout_s: float = 300.0  # how long a node may take until its workers are ready

    def __post_init__(self) -> None:
        least = min(self.min_nodes, self.credits)
        if least < 1 or min(self.node_timeout_s, self.start_timeout_s) <= 0:
            raise ConfigError(
                "a number is too small", str(self), "give at least one node, credit and second"
            )

    def takes(self, resources: Mapping[str, float]) -> bool:
        return all(resources.get(name, 0.0) >= amount for name, amount in self.resources.items())


@dataclass(slots=True)
class NodeCounts:
    joined: int = 0  # agents that began to act
    lost: int = 0  # agents that were lost, for whatever reason
    restarted: int = 0  # agents that were started again on a node
    rollouts_lost: int = 0  # known to have been completed on nodes that were lost, and not arrived
    rollouts_written: int = 0  # known to have been completed on them
    worker_wait_s: float = 0.0  # their workers had waited so long for a free slot


@dataclass(eq=False)
class Nodes:
    """Keeps an agent on every node: one that is lost is started again after a pause, if not too often."""

    start: Callable[[Machine, int], Node]
    placement: Placement
    joined: Callable[[Node], object]

    def __post_init__(self) -> None:
        self._silence = processes.Silence(self.placement.node_timeout_s)
        self._here = ray.get_runtime_context().get_node_id()
        self._gcs = ray.get_runtime_context().gcs_address
        self._gcs_seen_at_s = time.monotonic()
        self._by_id: dict[str, Node] = {}
        self._pauses = Pauses[str](self.placement.restarts)
        self._given_up: set[str] = set()
        self._causes: dict[str, str] = {}  # by machine, why the last agents were lost
        self._asked_ray_at_s = self._looked_at_s = 0.0
        self.tally = NodeCounts()

    def __iter__(self) -> Iterator[Node]:
        return iter(list(self._by_id.values()))

    @property
    def acting(self) -> list[Node]:
        return [node for node in self if node.acting]

    @property
    def seats(self) -> int:
        """How many seats there are: one more than the highest that is taken."""
        return 1 + max((node.seat for node in self), default=-1)

    def await_start(self) -> None:
        """Wait until all nodes, and enough, are ready. AdoptionTimeout; WorkerLost: one was lost before."""
        deadline = time.monotonic() + self.placement.start_timeout_s + self.placement.node_timeout_s
        while True:
            self._find_new()
            waiting = [node for node in self if not node.acting]
            enough = len(self._by_id) >= self.placement.min_nodes
            if enough and not waiting:
                return
            if time.monotonic() >= deadline or any(node.too_late for node in waiting):
                raise self._not_started(waiting)
            heads = {node.head: node for node in waiting}
            if heads:
                answered, _ = wait(heads, processes.LOOK_EVERY_S, FIRST_COMPLETED)
                for head in answered:
                    self.read(heads[head])
            if self._causes:
                raise self._none_left("starting the workers of a node")
            if not waiting:
                time.sleep(processes.LOOK_EVERY_S)

    def read(self, node: Node) -> Any:
        """The rollout at a node's head, which has answered; ``None``: it has just got ready, or is lost."""
        node.note_life()
        try:
            brought = node.head.result()
        except RayError as error:
            self._lose(node, why(error))
            return None
        if node.acting:
            node.note_taken()
            return brought
        node.note_ready(brought)
        self.tally.joined += 1
        self.joined(node)
        _log.info("the workers of %s are ready", node.machine)
        return None

    def look(self) -> bool:
        """Start and end agents as needed; whether one was. WorkerLost: no node is left."""
        before = self.tally.lost + self.tally.restarted + len(self._by_id)
        if (
            time.monotonic() - self._looked_at_s >= processes.LOOK_EVERY_S
        ):  # not before each of many rollouts
            self._looked_at_s = time.monotonic()
            self._end_silent()
        if time.monotonic() - self._asked_ray_at_s >= _ASK_RAY_EVERY_S:
            self._find_new()
        if not self._by_id and not self._pauses.due:
            raise self._none_left("collecting rollouts")
        return before != self.tally.lost + self.tally.restarted + len(self._by_id)

    def silent(self, timeout_s: float) -> AdoptionTimeout:
        nodes = ", ".join(
            f"{node.machine} (last heard of {node.silent_s:.1f} s ago)" for node in self
        )
        problem = f"no rollout came for {timeout_s:g} s from {nodes or 'any node'}"
        cure = "look at these nodes' workers; if a rollout takes that long, give a longer silent_timeout_s"
        return AdoptionTimeout(problem, "collecting rollouts", cure)

    def end(self, timeout_s: float) -> None:
        """End all agents and their workers, which may take ``timeout_s`` to leave."""
        if ray.is_initialized():  # else Ray has ended the agents
            ended = [node.agent.end.remote(timeout_s) for node in self.acting]
            if ended:
                ray.wait(ended, num_returns=len(ended), timeout=timeout_s + _END_TIMEOUT_S)
            for node in self:
                with suppress(RayError):  # it is dead
                    node.kill(on_this_machine=node.machine.node_id == self._here)
        self._by_id = {}

    def _find_new(self) -> None:
        self._asked_ray_at_s = now = time.monotonic()
        try:
            check_reachable(self._gcs)
        # Ray's own calls would block for a minute, and then end this process
        except ConfigError as error:
            if now - self._gcs_seen_at_s < _GCS_BACK_WITHIN_S:
                return
            cure = "start the cluster again, then resume the run"
            raise WorkerLost(
                f"Ray's GCS is gone: {error.what}", "collecting rollouts", cure
            ) from error
        self._gcs_seen_at_s = now
        living = {machine.node_id: machine for machine in living_machines()}
        due = self._pauses.due
        for gone in due.keys() - living.keys():
            del due[gone]  # its node went, too
        for node_id, machine in living.items():
            if node_id in self._by_id or node_id in self._given_up or due.get(node_id, now) > now:
                continue
            left_out = node_id == self._here and not self.placement.beside_learner
            if left_out or not self.placement.takes(machine.resources):
                continue
            self.tally.restarted += due.pop(node_id, None) is not None
            seats = {node.seat for node in self}
            seat = min(set(range(len(seats) + 1)) - seats)
            self._by_id[node_id] = self.start(machine, seat)

    def _end_silent(self) -> None:
        for node in self:
            if node.too_late:
                self._lose(node, f"not ready within {self.placement.start_timeout_s:g} s")
        acting = {node.seat: node for node in self.acting}
        silent_s: dict[int, float] = {}
        for seat, node in acting.items():
            if node.head.done():
                node.note_life()
            silent_s[seat] = node.silent_s
        for seat in self._silence.look(silent_s):
            cause = f"its agent (pid {acting[seat].pid}) gave no answer for {self._silence.timeout_s:g} s"
            self._lose(acting[seat], cause)

    def _lose(self, node: Node, cause: str) -> None:
        with suppress(RayError):  # it is dead
            node.kill()
        node_id = node.machine.node_id
        del self._by_id[node_id]
        self.tally.lost += 1
        self.tally.rollouts_lost += node.lost
        if node.counters is not None:
            self.tally.rollouts_written += node.counters.written
            self.tally.worker_wait_s += node.counters.worker_wait_s
        self._causes[str(node.machine)] = cause
        pause_s = self._pauses.note_end(node_id)
        if pause_s is None:
            self._given_up.add(node_id)
            then = "it is not started again"
        else:
            then = f"if the node lives, its agent is started again in {pause_s:g} s"
        _log.warning("%s is lost with %d rollouts: %s; %s", node.machine, node.lost, cause, then)

    def _none_left(self, where: str) -> WorkerLost:
        causes = "; ".join(f"{machine}: {cause}" for machine, cause in self._causes.items())
        cure = "look at the workers' own errors in Ray's logs of these nodes; then resume the run"
        if self._by_id:
            return WorkerLost(causes, where, cure)
        return WorkerLost(f"no node is left: {causes}", where, cure)

    def _not_started(self, waiting: list[Node]) -> AdoptionTimeout:
        late = ", ".join(str(node.machine) for node in waiting) or "none that is there"
        wanted = max(self.placement.min_nodes, len(self._by_id))
        within_s = self.placement.start_timeout_s
        problem = f"{len(self.acting)} of {wanted} nodes are ready after {within_s:g} s; not ready: {late}"
        cure = "look whether these nodes have the resources (ray status) and the same packages, or give a "
        cure += "longer start_timeout_s"
        return AdoptionTimeout(problem, "starting the workers of a cluster", cure)
