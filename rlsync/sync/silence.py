"""Which workers give no sign of life, while somebody looks."""

from __future__ import annotations

import time
from collections.abc import Mapping

#: Silence counts for at most this part of the timeout between two looks: a learner that was suspended
#: together with its workers, and then looks at them once, has not seen them silent all that time.
_COUNTED_BETWEEN_LOOKS = 0.25


class Silence:
    """Counts for how long workers were seen to give no sign of life.

    Args:
        timeout_s: how long a worker may be silent, seconds.

    Example:
        >>> silence = Silence(timeout_s=60.0)
        >>> silence.look({0: 0.1, 1: 3600.0})  # seen for the first time
        []
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._looked_at: float | None = None
        self._silent_s: dict[int, float] = {}

    def look(self, ages_s: Mapping[int, float]) -> list[int]:
        """The workers that were silent for longer than the timeout.

        Args:
            ages_s: by worker, seconds since it last gave a sign of life. What was counted for workers that
                are not among them is forgotten.
        """
        now = time.monotonic()
        since_s = 0.0 if self._looked_at is None else now - self._looked_at
        counted_s = min(since_s, self.timeout_s * _COUNTED_BETWEEN_LOOKS)
        self._looked_at = now
        before = self._silent_s
        self._silent_s = {
            worker: min(before[worker] + counted_s if worker in before else 0.0, age_s)
            for worker, age_s in ages_s.items()
        }
        return [worker for worker, silent_s in self._silent_s.items() if silent_s > self.timeout_s]

    def clear(self) -> None:
        """Forget all that was counted."""
        self._looked_at = None
        self._silent_s = {}
