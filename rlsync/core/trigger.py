"""Triggers: when to publish.

A trigger is a frozen value. It looks at two counter readings, the one at the last publish and the one
now, and says whether a publish is due. It keeps no state, so a resumed run that restores the reading
of the last publish fires at the same counts as a run without a break.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from rlsync.core.errors import ConfigError
from rlsync.core.user_input import check_choice, check_count

Unit = Literal["batches", "frames", "optim_steps", "seconds"]
UNITS: tuple[str, ...] = get_args(Unit)


@dataclass(frozen=True, slots=True)
class Counters:
    """One reading of the learner's counters."""

    batches: int = 0  #: consumed from the collector
    frames: int = 0  #: environment frames collected
    optim_steps: int = 0  #: optimizer steps done
    seconds: float = 0.0  #: of training, summed over resumed runs

    @classmethod
    def from_dict(cls, state: dict[str, Any]) -> Counters:
        """The inverse of :func:`dataclasses.asdict`; unknown names are ignored, absent ones are zero."""
        return cls(**{f.name: state[f.name] for f in fields(cls) if f.name in state})


class Trigger:
    """Base of all triggers; combine with ``|`` (either is due) and ``&`` (both are due)."""

    __slots__ = ()

    def due(self, last: Counters, now: Counters) -> bool:
        """Whether a publish is due.

        Args:
            last: the learner's counters at the last publish.
            now: the learner's counters now.
        """
        raise NotImplementedError

    def units(self) -> frozenset[str]:
        """The counters this trigger reads; they decide at which trainer stages it is asked."""
        raise NotImplementedError

    def __or__(self, other: Trigger) -> Trigger:
        return Combined(self, _checked(other), "|")

    def __and__(self, other: Trigger) -> Trigger:
        return Combined(self, _checked(other), "&")


def _checked(other: object) -> Trigger:
    if not isinstance(other, Trigger):
        cure = "combine triggers with triggers: Every(10, 'seconds') | StepsAhead(50)"
        raise ConfigError(
            f"cannot combine a trigger with {type(other).__name__}", repr(other), cure
        )
    return other


@dataclass(frozen=True, slots=True)
class Every(Trigger):
    """Due whenever ``floor(count / n)`` has grown since the last publish.

    The schedule is phase-locked: it does not drift when the counter jumps. With ``n=3`` and optimizer
    counts 1, 2, 5, 6, 8, 9 it is due at 5, 6 and 9 (TorchRL's UpdateWeights fires at 5 and 8).

    Args:
        n: a positive number of units; whole unless the unit is ``"seconds"``.
        unit: ``"batches"``, ``"frames"``, ``"optim_steps"`` or ``"seconds"``.

    Raises:
        ConfigError: ``n`` or ``unit`` is not one of these.

    Example:
        >>> Every(3, "optim_steps").due(Counters(optim_steps=2), Counters(optim_steps=5))
        True
    """

    n: float
    unit: Unit = "batches"

    def __post_init__(self) -> None:
        where = f"Every({self.n!r}, {self.unit!r})"
        check_choice("unit", self.unit, UNITS, where)
        whole = isinstance(self.n, int) and not isinstance(self.n, bool)
        real = isinstance(self.n, float) and math.isfinite(self.n) and self.unit == "seconds"
        if not (whole or real) or self.n <= 0:
            if self.unit == "seconds":
                kind = "positive number"
            else:
                kind = "positive whole number"
            problem = f"an interval is a {kind}, got {self.n!r}"
            raise ConfigError(problem, where, f"for example Every(1, {self.unit!r})")

    def due(self, last: Counters, now: Counters) -> bool:
        before: float = getattr(last, self.unit)
        after: float = getattr(now, self.unit)
        return after // self.n > before // self.n

    def units(self) -> frozenset[str]:
        return frozenset({self.unit})

    def __str__(self) -> str:
        return f"every {self.n} {self.unit}"


@dataclass(frozen=True, slots=True)
class StepsAhead(Trigger):
    """Due when the learner is more than ``n`` optimizer steps ahead of the version that it last published.

    It counts from the last publish, whatever caused that publish; :class:`Every` counts from the start of
    the run. ``Every(10, "seconds") | StepsAhead(50)`` publishes every ten seconds, and earlier when the
    learner has done more than fifty optimizer steps since the last publish.

    It reads neither policy lag nor staleness: those are counted in versions, and a publish raises both.

    Args:
        n: optimizer steps, a whole number not below zero.

    Raises:
        ConfigError: ``n`` is not such a number.

    Example:
        >>> StepsAhead(2).due(Counters(optim_steps=4), Counters(optim_steps=7))
        True
    """

    n: int

    def __post_init__(self) -> None:
        where = f"StepsAhead({self.n!r})"
        cure = "for example StepsAhead(50)"
        check_count("a number of steps ahead", self.n, 0, where, cure)

    def due(self, last: Counters, now: Counters) -> bool:
        return now.optim_steps - last.optim_steps > self.n

    def units(self) -> frozenset[str]:
        return frozenset({"optim_steps"})

    def __str__(self) -> str:
        return f"more than {self.n} optim_steps ahead"


@dataclass(frozen=True, slots=True)
class Combined(Trigger):
    """``left | right``: due when either is. ``left & right``: when both are, each since the last publish."""

    left: Trigger
    right: Trigger
    sign: Literal["|", "&"]

    def due(self, last: Counters, now: Counters) -> bool:
        if self.sign == "|":
            return self.left.due(last, now) or self.right.due(last, now)
        return self.left.due(last, now) and self.right.due(last, now)

    def units(self) -> frozenset[str]:
        return self.left.units() | self.right.units()

    def __str__(self) -> str:
        return f"({self.left} {self.sign} {self.right})"
