"""How many optimizer steps go with how many collected frames.

Source: sheeprl's replay ratio (``utils/utils.py``, class ``Ratio``); its cases are in
tests/runs/actors/test_pacing.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True, slots=True)
class Pace:
    """The replay ratio: optimizer steps (updates) for each collected frame, those of the prefill not counted.

    What throttles, logs and plans asks it. If due updates are done after each batch, it is held within one
    update between the ends of any two batches; within a batch it is not.
    """

    ratio: float  # updates for each frame; above zero
    # the most updates at one time; what is owed beyond it is done later. None: no limit
    burst: int | None = None
    prefill: int = 0  # frames that are collected before the first update
    from_frames: int = 0  # done before a resumed run changed the ratio
    from_updates: int = 0

    def due(self, frames: int, updates: int) -> int:
        """How many updates are allowed and not done, at most ``burst``; those of a pretraining are done."""
        # A fraction, because 0.29 * 100 is a little less than 29 in floating point.
        allowed = math.floor(Fraction(str(self.ratio)) * max(0, self._counted(frames)))
        owed = max(0, allowed - (updates - self.from_updates))
        if self.burst is None:
            return owed
        return min(owed, self.burst)

    def measured(self, frames: int, updates: int) -> float:
        """The ratio that was held so far; not a number before the prefill is over."""
        counted = self._counted(frames)
        if counted > 0:
            return (updates - self.from_updates) / counted
        return math.nan

    def _counted(self, frames: int) -> int:
        # The prefill is over, or what is left of it is still to come.
        return frames - max(self.from_frames, self.prefill)
