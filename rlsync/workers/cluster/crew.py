"""Agents that outlive a learner that was killed, and how the next one finds them."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util import list_named_actors

from rlsync.core.errors import ConfigError
from rlsync.core.ledger import NOTHING, Stamp
from rlsync.workers.cluster.card import Card
from rlsync.workers.cluster.node import Place, living_places, why
from rlsync.workers.supervision import LEAVE_TIMEOUT_S

_log = logging.getLogger(__name__)

_NAMESPACE = "rlsync"

_LOOK_S = 0.2

#: How long an agent that lives may take to answer.
_ANSWER_S = 30.0


@dataclass(frozen=True, slots=True)
class Crew:
    """The agents of one run, in all of its lives.

    Args:
        name: by which a learner finds what an earlier one left; no two runs of a cluster have the same.
        keep_s: how long agents wait for the next learner when theirs was killed, seconds. They end with it
            if this is 0, and a learner then ends those that it finds.

    Raises:
        ConfigError: ``keep_s`` is below 0.

    Example:
        >>> Crew("a1b2c3", keep_s=600.0).options()["lifetime"]
        'detached'
        >>> Crew("a1b2c3").options()
        {}
    """

    name: str
    keep_s: float = 0.0

    def __post_init__(self) -> None:
        if self.keep_s < 0:
            raise ConfigError(f"agents cannot wait {self.keep_s:g} s", str(self), "give keep_s=0 or more")

    def options(self) -> dict[str, Any]:
        """What Ray is told when it starts an agent."""
        if not self.keep_s:
            return {}
        name = f"{self._prefix}{uuid.uuid4().hex[:12]}"
        return {"name": name, "namespace": _NAMESPACE, "lifetime": "detached"}

    def left(self, alone_within_s: float = 60.0) -> list[Left]:
        """The agents that an earlier learner left, once they know that it is gone.

        Args:
            alone_within_s: how long Ray and the agents may take to notice that, seconds.

        Raises:
            ConfigError: they belong to a learner that lives.
        """
        until_s = time.monotonic() + alone_within_s
        found = [Left(agent, card) for agent in self._living() if (card := _asked(agent)) is not None]
        while with_learner := [left for left in found if not left.card.alone]:
            if time.monotonic() >= until_s:
                pids = ", ".join(str(left.card.pid) for left in with_learner)
                raise ConfigError(
                    f"the agents of this run belong to a learner that lives (their processes: {pids})",
                    f"crew {self.name}",
                    "end that learner, or resume from a copy of its checkpoint",
                )
            time.sleep(_LOOK_S)
            again = [(left.agent, _asked(left.agent)) for left in found]
            found = [Left(agent, card) for agent, card in again if card is not None]
        return found

    @property
    def _prefix(self) -> str:
        return f"agent of {self.name} "

    def _living(self) -> Iterator[Any]:
        for named in list_named_actors(all_namespaces=True):
            if named["namespace"] == _NAMESPACE and named["name"].startswith(self._prefix):
                with suppress(ValueError):  # it has ended meanwhile
                    yield ray.get_actor(named["name"], _NAMESPACE)


@dataclass(frozen=True, slots=True)
class Left:
    """An agent without a learner.

    Args:
        agent: the actor's handle.
        card: what it said of itself.
    """

    agent: Any
    card: Card

    def follows(self, mailbox: Any, keep_s: float) -> Card | str:
        """Let it follow this learner.

        Args:
            mailbox, keep_s: see :meth:`NodeAgent.follow`.

        Returns:
            What it is like now, or why it does not follow.
        """
        try:
            card = ray.get(self.agent.follow.remote(mailbox, keep_s), timeout=_ANSWER_S)
        except (RayError, GetTimeoutError) as error:
            return why(error)
        assert isinstance(card, Card)
        return card

    def unlike(self, likeness: Mapping[str, str]) -> str:
        """In what it differs from the agents of this learner; empty if in nothing."""
        names = sorted(likeness.keys() | self.card.likeness.keys())
        return ", ".join(name for name in names if likeness.get(name) != self.card.likeness.get(name))

    def end(self) -> None:
        """End it and its workers."""
        ray.wait([self.agent.end.remote(LEAVE_TIMEOUT_S)], timeout=_ANSWER_S)
        _kill(self.agent)


def newest_stamp(left: Sequence[Left]) -> Stamp:
    """The newest version that agents have heard of."""
    return max((it.card.stamp for it in left), default=NOTHING)


def taken_over(
    left: Sequence[Left], likeness: Mapping[str, str], mailbox: Any, keep_s: float
) -> Iterator[tuple[Place, Left, Card]]:
    """Let agents follow this learner, and end those that cannot.

    Args:
        left: agents without a learner.
        likeness: of the agents that this learner would start.
        mailbox: where it is heard of.
        keep_s: how long they wait for the learner after this one; at 0 all are ended.

    Returns:
        Where each is that follows, and what it is like now.
    """
    places = {place.node_id: place for place in living_places()}
    for it in left:
        place = places.get(it.card.node_id)
        unlike = it.unlike(likeness)
        if not keep_s:
            told: Card | str = "agents are not to be kept"
        elif place is None or not it.card.ready:
            told = "its workers are not ready"
        elif unlike:
            told = f"it has another {unlike}"
        else:
            told = it.follows(mailbox, keep_s)
        if isinstance(told, str):
            _log.warning("an agent of an earlier learner (pid %d) is ended: %s", it.card.pid, told)
            it.end()
        elif place is not None:
            _log.info("the agent of %s follows this learner", place)
            yield place, it, told


def _asked(agent: Any) -> Card | None:
    """What an agent says of itself; ``None`` if it is dead. One that does not answer is killed."""
    try:
        card = ray.get(agent.card.remote(), timeout=_ANSWER_S)
    except (RayError, GetTimeoutError) as error:
        _log.warning("an agent of an earlier learner is ended: %s", why(error))
        _kill(agent)
        return None
    assert isinstance(card, Card)
    return card


def _kill(agent: Any) -> None:
    with suppress(RayError):  # it is dead
        ray.kill(agent, no_restart=True)
