"""The settings of the process that evaluates while a run goes on."""

from __future__ import annotations

from dataclasses import dataclass

from rlsync.recipes.bounds import above_zero, not_below_zero


@dataclass
class EvaluationConfig:
    """A separate process of low priority that evaluates one version after the other.

    ``every_frames`` is the least number of training frames between two evaluations; 0 turns evaluation off.
    Each evaluation plays ``episodes`` episodes, up to eight at once. Every ``video_every`` evaluations, and
    whenever a version is the best so far, the first episode is filmed; None films none.
    """

    every_frames: int = not_below_zero(0)
    episodes: int = above_zero(8)
    video_every: int | None = above_zero(None)
