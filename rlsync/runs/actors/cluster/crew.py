"""Agents that outlive a learner that was killed, and how the next one finds them."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError
from ray.util import list_named_actors

from rlsync import ConfigError
from rlsync.runs.actors.cluster.job import AgentState
from rlsync.runs.actors.cluster.node import Machine, living_machines, why
from rlsync.runs.actors.supervision import LEAVE_TIMEOUT_S

_log = logging.getLogger(__name__)

_NAMESPACE = "rlsync"
_NAME = "agent of {} "

_LOOK_S = 0.2

_ANSWER_S = 30.0  #: how long an agent that lives may take to answer


@dataclass(frozen=True, slots=True)
class Crew:
    """The agents of one run, in all of its lives; a ConfigError if ``keep_s`` is below 0."""

    name: str  # by which a learner finds what an earlier one left; no two runs of a cluster have the same
    # Seconds for which agents wait for the next learner when theirs was killed. 0: they end with it, and a
    # learner ends those that it finds.
    keep_s: float = 0.0

    def __post_init__(self) -> None:
        if self.keep_s < 0:
            raise ConfigError(f"agents cannot wait {self.keep_s:g} s", str(self), "give keep_s=0 or more")

    def options(self) -> dict[str, Any]:
        if not self.keep_s:
            return {}
        name = _NAME.format(self.name) + uuid.uuid4().hex[:12]
        return {"name": name, "namespace": _NAMESPACE, "lifetime": "detached"}

    def left(self, alone_within_s: float = 60.0) -> list[LeftAgent]:
        """The agents of a learner that is gone; ConfigError if it lives longer than ``alone_within_s``."""
        until_s = time.monotonic() + alone_within_s
        agents = list(self._living())
        while True:
            left = [LeftAgent(agent, state) for agent in agents if (state := _state_of(agent)) is not None]
            with_learner = [agent for agent in left if not agent.state.alone]
            if not with_learner:
                return left
            if time.monotonic() >= until_s:
                pids = ", ".join(str(agent.state.pid) for agent in with_learner)
                what = f"the agents of this run belong to a learner that lives (their processes: {pids})"
                cure = "end that learner, or resume from a copy of its checkpoint"
                raise ConfigError(what, f"crew {self.name}", cure)
            time.sleep(_LOOK_S)
            agents = [agent.agent for agent in left]

    def _living(self) -> Iterator[Any]:
        for named in list_named_actors(all_namespaces=True):
            if named["namespace"] == _NAMESPACE and named["name"].startswith(_NAME.format(self.name)):
                with suppress(ValueError):  # it has ended meanwhile
                    yield ray.get_actor(named["name"], _NAMESPACE)


class LeftAgent(NamedTuple):
    """An agent without a learner: the actor's handle, and what it said of itself."""

    agent: Any
    state: AgentState


def taken_over(
    left: Sequence[LeftAgent], likeness: Mapping[str, str], mailbox: Any, keep_s: float
) -> Iterator[tuple[Machine, Any, AgentState]]:
    """Let agents of this ``likeness`` follow, and yield place, handle and state of each; end all others."""
    machines = {machine.node_id: machine for machine in living_machines()}
    for agent, was in left:
        machine = machines.get(was.node_id)
        names = sorted(likeness.keys() | was.likeness.keys())
        unlike = ", ".join(name for name in names if likeness.get(name) != was.likeness.get(name))
        if not keep_s:
            refusal = "agents are not to be kept"
        elif machine is None or not was.ready:
            refusal = "its workers are not ready"
        elif unlike:
            refusal = f"it has another {unlike}"
        else:
            try:
                state: AgentState = ray.get(agent.follow.remote(mailbox, keep_s), timeout=_ANSWER_S)
            except RayError as error:
                refusal = why(error)
            else:
                _log.info("the agent of %s follows this learner", machine)
                yield machine, agent, state
                continue
        _log.warning("an agent of an earlier learner (pid %d) is ended: %s", was.pid, refusal)
        ray.wait([agent.end.remote(LEAVE_TIMEOUT_S)], timeout=_ANSWER_S)
        _kill(agent)


def _state_of(agent: Any) -> AgentState | None:
    """What an agent says of itself; ``None`` if it is dead. One that does not answer is killed."""
    try:
        state = ray.get(agent.state.remote(), timeout=_ANSWER_S)
    except RayError as error:
        _log.warning("an agent of an earlier learner is ended: %s", why(error))
        _kill(agent)
        return None
    assert isinstance(state, AgentState)
    return state


def _kill(agent: Any) -> None:
    with suppress(RayError):  # it is dead
        ray.kill(agent, no_restart=True)
