"""The settings that recipes with a replay buffer share: its size, the pace, the evaluations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

from rlsync.core.errors import ConfigError, RlsyncError
from rlsync.recipes.bounds import above_zero, bound_errors, caught, kept, not_below_zero
from rlsync.recipes.settings import Config, EvaluationConfig, RecipeConfig
from rlsync.workers.replay.pacing import Pace

#: Why a resumed run cannot change a field.
BUFFER = "the checkpoint has a replay buffer of that kind"
BUFFER_KEPT = "the checkpoint has the replay buffer, or has none"


@dataclass
class PaceConfig:
    """How many optimizer steps go with how many frames; see :class:`rlsync.workers.replay.pacing.Pace`."""

    #: Updates for each collected frame, those of the prefill not counted. With the sizes above an update
    #: replays 256 frames, so each frame is replayed 64 times.
    ratio: float = above_zero(1.0, finite=True)
    #: The most updates after one batch; what is owed beyond it is done after later ones. null: no limit.
    burst: int | None = above_zero(None)
    #: Frames that are collected, by random actions, before the first update.
    prefill: int = kept(not_below_zero(1_000), "the pace is counted from the end of the prefill")

    def pace(self) -> Pace:
        """The pace that these settings describe.

        Raises:
            ConfigError: a number cannot be.

        Example:
            >>> PaceConfig(ratio=0.5).pace().due(frames=1_100, updates=0)
            50
        """
        return Pace(self.ratio, self.burst, self.prefill)


@dataclass
class ReplayConfig(RecipeConfig):
    """What these recipes share. ``target_return`` is that of greedy evaluations, where there are some.

    With ``buffer_checkpointed`` a checkpoint has the replay buffer, and a resumed run draws from it at once.
    It writes only the frames that are new since the checkpoint before; see
    :class:`~rlsync.recipes.replay.row_segments.RowSegments`. Without, checkpoints have no frames, and a
    resumed run collects ``pace.prefill`` frames before its next update.
    """

    #: Number of frames that the replay buffer holds. By default it holds all frames of the run.
    buffer_frames: int = kept(above_zero(100_000), BUFFER)
    #: Keep the replay buffer in checkpoints, so that a resumed run draws from it at once. A checkpoint writes
    #: only the frames that are new since the one before. false: checkpoints have no frames, and a resumed run
    #: collects pace.prefill frames before its next update. A resumed run cannot change it.
    buffer_checkpointed: bool = kept(True, BUFFER_KEPT)
    #: How many optimizer steps (updates) go with how many frames. Whichever side is ahead waits.
    pace: PaceConfig = field(default_factory=PaceConfig)
    #: A separate process of low priority that plays greedily while the run goes on. It writes
    #: evaluations.csv.
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)

    stops_by_evaluation: ClassVar[bool] = True
    in_stock_collectors: ClassVar[bool] = True

    def evaluations(self) -> EvaluationConfig:
        """See :meth:`RecipeConfig.evaluations`."""
        return self.evaluation

    def updates_after(self, config: Config, frames: int, updates: int) -> int:
        """See :meth:`RecipeConfig.updates_after`: as many as the pace allows."""
        return self.pace.pace().due(frames, updates)

    def updates_per_frame(self, config: Config) -> float:
        """See :meth:`RecipeConfig.updates_per_frame`: the replay ratio."""
        return self.pace.ratio

    def prefill_frames(self) -> int:
        """See :meth:`RecipeConfig.prefill_frames`."""
        return self.pace.prefill

    def frames_in_an_update(self) -> int:
        """How many stored frames one optimizer step learns from."""
        return self.batch_size

    def errors(self, config: Config) -> Iterator[RlsyncError]:
        """See :meth:`RecipeConfig.errors`."""
        if not list(bound_errors(self.pace)):  # those are told with their keys
            yield from caught(self.pace.pace, "recipe.pace")
        if self.pace.prefill >= self.total_frames:
            yield ConfigError(
                f"a prefill of {self.pace.prefill} frames leaves none of {self.total_frames} to learn from",
                "recipe.pace.prefill",
                f"give less than recipe.total_frames = {self.total_frames}",
            )
        if self.buffer_frames < self.frames_in_an_update():
            yield ConfigError(
                f"a replay buffer of {self.buffer_frames} frames never holds a batch of "
                f"{self.frames_in_an_update()}",
                "recipe.buffer_frames",
                f"give at least {self._batch_key()} = {self.frames_in_an_update()}",
            )

    def _batch_key(self) -> str:
        return "recipe.batch_size"
