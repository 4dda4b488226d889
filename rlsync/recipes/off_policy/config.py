"""The settings of the recipes that learn from a replay buffer: ``dqn``, ``sac`` and ``td3``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar

from rlsync.core.errors import ConfigError, RlsyncError
from rlsync.recipes.bounds import above_zero, bound_errors, caught, fraction, kept, not_below_zero, one_of
from rlsync.recipes.cluster_config import workers_on_a_node
from rlsync.recipes.config import SCHEDULE, Config, RecipeConfig, width_errors
from rlsync.recipes.device_config import stock_device_errors
from rlsync.recipes.evaluation_config import EvaluationConfig
from rlsync.recipes.off_policy.normalize import NormalizeConfig
from rlsync.workers.replay.pacing import Pace

#: Why a resumed run cannot change a field.
EXPLORATION = "the checkpoint has the exploration rate and its schedule"
BUFFER = "the checkpoint has a replay buffer of that kind"
BUFFER_KEPT = "the checkpoint has the replay buffer, or has none"
PRIORITIES = "the checkpoint has priorities of that kind, or has none"


@dataclass
class PaceConfig:
    """How many optimizer steps go with how many frames; see :class:`rlsync.workers.replay.pacing.Pace`."""

    ratio: float = above_zero(1.0, finite=True)
    burst: int | None = above_zero(None)
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
class OffPolicyConfig(RecipeConfig):
    """What these recipes share. ``target_return`` is that of greedy evaluations, where there are some.

    With ``buffer_checkpointed`` a checkpoint has the replay buffer, and a resumed run draws from it at once.
    It writes only the frames that are new since the checkpoint before; see
    :class:`~rlsync.recipes.off_policy.row_segments.RowSegments`. Without, checkpoints have no frames, and a
    resumed run collects ``pace.prefill`` frames before its next update.
    """

    batch_size: int = above_zero(256)
    hidden: list[int] = field(default_factory=lambda: [256, 256])
    buffer_frames: int = kept(above_zero(100_000), BUFFER)
    buffer_checkpointed: bool = kept(True, BUFFER_KEPT)
    prioritized: bool = kept(False, PRIORITIES)
    priority_alpha: float = kept(fraction(0.6), PRIORITIES)
    priority_beta: float = fraction(0.4)
    pace: PaceConfig = field(default_factory=PaceConfig)
    normalize: NormalizeConfig = field(default_factory=NormalizeConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)

    stops_by_evaluation: ClassVar[bool] = True

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

    def acts_on_clusters(self) -> bool:
        """See :meth:`RecipeConfig.acts_on_clusters`."""
        return True

    def errors(self, config: Config) -> Iterator[RlsyncError]:
        """See :meth:`RecipeConfig.errors`."""
        yield from width_errors("recipe.hidden", self.hidden)
        yield from stock_device_errors(config)
        if not list(bound_errors(self.pace)):  # those are told with their keys
            yield from caught(self.pace.pace, "recipe.pace")
        if self.pace.prefill >= self.total_frames:
            yield ConfigError(
                f"a prefill of {self.pace.prefill} frames leaves none of {self.total_frames} to learn from",
                "recipe.pace.prefill",
                f"give less than recipe.total_frames = {self.total_frames}",
            )
        if self.buffer_frames < self.batch_size:
            yield ConfigError(
                f"a replay buffer of {self.buffer_frames} frames never holds a batch of {self.batch_size}",
                "recipe.buffer_frames",
                f"give at least recipe.batch_size = {self.batch_size}",
            )
        if self.normalize.observations and any(route.dtype for route in config.sync.map):
            yield ConfigError(
                "workers that act in half precision would round the mean of an observation to three digits",
                "sync.map and recipe.normalize.observations",
                "leave the dtype out of the sync map, or give recipe.normalize.observations=false",
            )


@dataclass
class DQNConfig(OffPolicyConfig):
    """Deep Q-learning (Mnih et al. 2015), with a double target and returns of n steps.

    ``optim_steps_per_batch`` is what older configs said in place of ``pace.ratio``.
    """

    name: str = "dqn"
    total_frames: int = above_zero(50_000)
    lr: float = above_zero(1e-3, finite=True)
    batch_size: int = above_zero(64)
    clip_norm: float = above_zero(10.0)
    activation: str = one_of("relu", "tanh")
    buffer_frames: int = kept(above_zero(50_000), BUFFER)
    pace: PaceConfig = field(default_factory=lambda: PaceConfig(ratio=0.5))
    target_update_steps: int = above_zero(128)
    double: bool = True
    n_step: int = kept(above_zero(3), "the checkpoint has a replay buffer of such returns")
    epsilon_start: float = kept(fraction(1.0), EXPLORATION)
    epsilon_end: float = kept(fraction(0.04), EXPLORATION)
    epsilon_frames: int = kept(above_zero(10_000), EXPLORATION)
    ladder_alpha: float = not_below_zero(0.0)
    optim_steps_per_batch: int | None = field(default=None, metadata={"renamed": "pace.ratio"})

    def errors(self, config: Config) -> Iterator[RlsyncError]:
        """See :meth:`RecipeConfig.errors`."""
        yield from super().errors(config)
        if self.optim_steps_per_batch is not None:
            ratio = self.optim_steps_per_batch / max(1, config.collector.frames_per_batch)
            yield ConfigError(
                "recipe.optim_steps_per_batch is now recipe.pace.ratio, optimizer steps for each frame",
                "recipe.optim_steps_per_batch",
                f"give recipe.pace.ratio={ratio:g}",
            )
        if self.ladder_alpha and workers_on_a_node(config) < 2:
            yield ConfigError(
                "one worker makes no ladder of exploration rates",
                "recipe.ladder_alpha",
                "give 2 or more workers (on a cluster, on each node), or recipe.ladder_alpha=0",
            )

    @classmethod
    def of_older_run(cls, config: Config) -> Config:
        """See :meth:`RecipeConfig.of_older_run`. A run that said ``optim_steps_per_batch`` had no choices."""
        recipe = cls.of(config)
        if recipe.optim_steps_per_batch is None:
            return config
        ratio = recipe.optim_steps_per_batch / config.collector.frames_per_batch
        meant = replace(
            recipe,
            optim_steps_per_batch=None,
            pace=PaceConfig(ratio=ratio, prefill=0),
            activation="tanh",
            n_step=1,
        )
        return replace(config, recipe=meant)


@dataclass
class ActorCriticConfig(OffPolicyConfig):
    """What SAC and TD3 share: two critics, and targets that follow them slowly."""

    total_frames: int = above_zero(100_000)
    lr: float = above_zero(1e-3, finite=True)
    anneal_lr: bool = kept(False, SCHEDULE)
    clip_norm: float = above_zero(1_000.0)
    tau: float = fraction(0.005)


@dataclass
class SACConfig(ActorCriticConfig):
    """Soft actor-critic with a learned temperature (Haarnoja et al. 2018, arXiv 1812.05905)."""

    name: str = "sac"
    alpha_init: float = above_zero(1.0)


@dataclass
class TD3Config(ActorCriticConfig):
    """Twin delayed deep deterministic policy gradient (Fujimoto et al. 2018, arXiv 1802.09477).

    Noise is given in halves of the range of the actions.
    """

    name: str = "td3"
    exploration_noise: float = not_below_zero(0.1)
    target_noise: float = not_below_zero(0.2)
    target_noise_clip: float = not_below_zero(0.5)
    actor_every: int = above_zero(2)

    def errors(self, config: Config) -> Iterator[RlsyncError]:
        """See :meth:`RecipeConfig.errors`."""
        yield from super().errors(config)
        if self.anneal_lr:
            yield ConfigError(
                "td3 cannot lower the learning rate: it has two optimizers",
                "recipe.anneal_lr",
                "give recipe.anneal_lr=false",
            )
