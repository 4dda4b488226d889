"""The settings that recipes with a replay buffer share: its size, the pace, the evaluations, the networks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

from rlsync import ConfigError, RlsyncError
from rlsync.runs.actors.replay.pacing import Pace
from rlsync.runs.recipes import bounds
from rlsync.runs.recipes.settings import (
    SCHEDULE,
    Config,
    EvaluationConfig,
    ModelConfig,
    NormalizeConfig,
    RecipeConfig,
)

#: Why a resumed run cannot change some fields.
BUFFER = "the checkpoint has a replay buffer of that kind"
BUFFER_KEPT = "the checkpoint has the replay buffer, or has none"
PRIORITIES = "the checkpoint has priorities of that kind, or has none"
RETURNS = "the checkpoint has a replay buffer of such returns"


@dataclass
class PaceConfig:
    """How many optimizer steps go with how many frames: :class:`rlsync.runs.actors.replay.pacing.Pace`."""

    #: Updates for each collected frame, those of the prefill not counted. With the sizes above an update
    #: replays 256 frames, so each frame is replayed 64 times.
    ratio: float = bounds.above_zero(1.0, most=1_000)
    #: The most updates after one batch, at least ratio x collector.frames_per_batch; what is owed beyond it
    #: is done after later ones. null: no limit.
    burst: int | None = bounds.above_zero(None)
    #: Frames that are collected, by random actions, before the first update.
    prefill: int = bounds.kept(
        bounds.not_below_zero(1_000), "the pace counts from the end of the prefill"
    )

    def pace(self) -> Pace:
        return Pace(self.ratio, self.burst, self.prefill)


@dataclass
class ReplayConfig(RecipeConfig):
    """What these recipes share.

    ``target_return`` is that of greedy evaluations, where there are some. How checkpoints have the buffer:
    :class:`~rlsync.runs.recipes.replay.row_segments.RowSegments`.
    """

    #: Number of frames that the replay buffer holds. By default it holds all frames of the run. Memory is
    #: taken as frames arrive; on an accelerator, that of all at once.
    buffer_frames: int = bounds.kept(bounds.above_zero(100_000), BUFFER)
    #: Keep the replay buffer in checkpoints, so that a resumed run draws from it at once. A checkpoint writes
    #: only the frames that are new since the one before. false: checkpoints have no frames, and a resumed run
    #: collects pace.prefill frames before its next update. A resumed run cannot change it.
    buffer_checkpointed: bool = bounds.kept(True, BUFFER_KEPT)
    #: How many optimizer steps (updates) go with how many frames. Whichever side is ahead waits.
    pace: PaceConfig = field(default_factory=PaceConfig)
    #: A separate process of low priority that plays greedily while the run goes on. It writes
    #: evaluations.csv.
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)

    stops_by_evaluation: ClassVar[bool] = True
    #: How many observations the buffer stores for a frame: the one before the step, and the one after it.
    stored_observations: ClassVar[int] = 2

    def updates_after(self, config: Config, frames: int, updates: int) -> int:
        return self.pace.pace().due(frames, updates)

    def prefill_frames(self) -> int:
        return self.pace.prefill

    def frames_in_an_update(self) -> int:
        """How many stored frames one optimizer step learns from."""
        return self.batch_size

    def errors(self, config: Config) -> Iterator[RlsyncError]:
        asked = self.pace.ratio * config.collector.frames_per_batch
        if self.pace.burst is not None and 0 < self.pace.burst < asked < math.inf:
            problem = f"at most {self.pace.burst} updates after a batch are fewer than the ratio's {asked:g}"
            least = f"recipe.pace.ratio x collector.frames_per_batch = {math.ceil(asked)}"
            yield ConfigError(problem, "recipe.pace.burst", f"give at least {least}, or null")
        if self.pace.prefill >= self.total_frames:
            problem = f"a prefill of {self.pace.prefill} frames leaves none of {self.total_frames} to learn from"
            cure = f"give less than recipe.total_frames = {self.total_frames}"
            yield ConfigError(problem, "recipe.pace.prefill", cure)
        if self.buffer_frames < (needed := self.frames_in_an_update()):
            problem = (
                f"a replay buffer of {self.buffer_frames} frames never holds a batch of {needed}"
            )
            yield ConfigError(
                problem, "recipe.buffer_frames", f"give at least {self._batch_key()} = {needed}"
            )

    def _batch_key(self) -> str:
        return "recipe.batch_size"


@dataclass
class OffPolicyConfig(ReplayConfig):
    """What the recipes that learn values of flat observations share: ``dqn``, ``sac`` and ``td3``."""

    update_keys: ClassVar[tuple[str, ...]] = ("compile", "update_dtype")

    batch_size: int = bounds.above_zero(256)
    #: Widths of the hidden layers of the actor and of the two critics.
    hidden: list[int] = field(default_factory=lambda: [256, 256], metadata=bounds.WIDTHS)
    #: Draw frames whose values were wrong more often (prioritised replay). Otherwise all are drawn alike.
    prioritized: bool = bounds.kept(False, PRIORITIES)
    #: How much more often: 0 not at all, 1 in proportion to the error.
    priority_alpha: float = bounds.kept(bounds.fraction(0.6), PRIORITIES)
    #: How much of the bias that this brings is taken back by smaller steps, at the start: 0 nothing, 1 all.
    priority_beta: float = bounds.fraction(0.4)
    #: The same at recipe.total_frames; between, it changes linearly.
    priority_beta_end: float = bounds.fraction(1.0)
    #: Steps whose rewards are summed before a value is added. More steps spread rewards faster and are less
    #: exact. A sum ends with its episode, and where its worker's part of a batch ends.
    n_step: int = bounds.kept(bounds.above_zero(1), RETURNS)
    #: Observations and rewards in units of their own spread. The statistics of the observations are part of
    #: the networks and travel with the weights, so that a version always acts with its own.
    model: ModelConfig = field(default_factory=ModelConfig)
    normalize: NormalizeConfig = field(default_factory=NormalizeConfig)

    def acts_on_clusters(self) -> bool:
        return True

    def errors(self, config: Config) -> Iterator[RlsyncError]:
        yield from super().errors(config)
        yield from self.normalize.errors(config)


@dataclass
class ActorCriticConfig(OffPolicyConfig):
    """What the recipes with an actor and two critics share."""

    total_frames: int = bounds.above_zero(100_000)
    buffer_frames: int = bounds.same_as(ReplayConfig, "buffer_frames", 1_000_000)
    pace: PaceConfig = field(default_factory=lambda: PaceConfig(prefill=10_000))
    #: Learning rate of Adam, for the actor, and for what has no rate of its own.
    lr: float = bounds.learning_rate(3e-4)
    #: Learning rate of the critics. null: recipe.lr.
    critic_lr: float | None = bounds.learning_rate(None)
    anneal_lr: bool = bounds.kept(False, SCHEDULE)
    #: Largest norm of the gradient. Default: so large that only a step that would break the run is cut.
    clip_norm: float = bounds.above_zero(1_000.0)
    #: Initial weights of these networks: torch's own, as in Stable-Baselines3, or orthogonal, which are
    #: larger, with biases of 0 and small first actions.
    initial_weights: str = bounds.one_of("torch", "orthogonal")
