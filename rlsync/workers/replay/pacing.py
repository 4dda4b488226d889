"""How many optimizer steps go with how many collected frames.

Source: sheeprl's replay ratio (``utils/utils.py``, class ``Ratio``); its cases are in
tests/workers/test_pacing.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from rlsync.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Pace:
    """The replay ratio: optimizer steps (updates) for each collected frame, those of the prefill not counted.

    This is the one definition. What throttles, what is logged and what is planned all ask it. If the updates
    that are due are done after each batch, the ratio is held within one update between the ends of any two
    batches; within a batch it is not. A ConfigError if a number cannot be.
    """

    ratio: float  # updates for each frame; above zero
    # the most updates at one time; what is owed beyond it is done later. None: no limit
    burst: int | None = None
    prefill: int = 0  # frames that are collected before the first update

    def __post_init__(self) -> None:
        if not (math.isfinite(self.ratio) and self.ratio > 0):
            raise _refused("ratio", self.ratio, "give updates for each frame, a number above zero")
        if self.burst is not None and self.burst < 1:
            raise _refused("burst", self.burst, "give the most updates at one time, or None")
        if self.prefill < 0:
            raise _refused("prefill", self.prefill, "give a number of frames, 0 for none")

    def allowed(self, frames: int) -> int:
        """How many updates so many frames, those of the prefill too, allow from the beginning of the run."""
        # A fraction, because 0.29 * 100 is a little less than 29 in floating point.
        return math.floor(Fraction(str(self.ratio)) * max(0, frames - self.prefill))

    def due(self, frames: int, updates: int) -> int:
        """How many updates are allowed and not done, at most ``burst``; those of a pretraining are done."""
        owed = max(0, self.allowed(frames) - updates)
        return owed if self.burst is None else min(owed, self.burst)

    def measured(self, frames: int, updates: int) -> float:
        """The ratio that was held so far; not a number before the prefill is over."""
        counted = frames - self.prefill
        return updates / counted if counted > 0 else math.nan


@dataclass(frozen=True, slots=True)
class PaceFrom:
    """A pace that began in the middle of a run, when a resumed run changed the ratio."""

    pace: Pace  # from then on; its prefill is that of the whole run
    frames: int = 0  # done before it began
    updates: int = 0  # done before it began

    def due(self, frames: int, updates: int) -> int:
        return self.pace.due(self._since(frames), updates - self.updates)

    def measured(self, frames: int, updates: int) -> float:
        return self.pace.measured(self._since(frames), updates - self.updates)

    def _since(self, frames: int) -> int:
        # The prefill stays in front: it is over, or what is left of it is still to come.
        return frames - max(self.frames, self.pace.prefill) + self.pace.prefill


def _refused(name: str, value: object, cure: str) -> ConfigError:
    return ConfigError(f"a pace cannot have {name} {value!r}", f"Pace({name}={value!r})", cure)
