"""The settings of the recipes that learn values from a replay buffer: ``dqn``, ``sac`` and ``td3``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from rlsync.core.errors import ConfigError, RlsyncError
from rlsync.recipes.bounds import (
    WIDTHS,
    above_zero,
    fraction,
    in_buffer,
    kept,
    learning_rate,
    not_below_zero,
    one_of,
)
from rlsync.recipes.off_policy.normalize import NormalizeConfig
from rlsync.recipes.replay.config import BUFFER, PaceConfig, ReplayConfig
from rlsync.recipes.settings import SCHEDULE, Config

__all__ = ["DQNConfig", "OffPolicyConfig", "PaceConfig", "SACConfig", "TD3Config"]

#: Why a resumed run cannot change a field.
EXPLORATION = "the checkpoint has the exploration rate and its schedule"
PRIORITIES = "the checkpoint has priorities of that kind, or has none"


@dataclass
class OffPolicyConfig(ReplayConfig):
    """What these recipes share besides."""

    batch_size: int = above_zero(256)
    hidden: list[int] = field(default_factory=lambda: [256, 256], metadata=WIDTHS)
    prioritized: bool = kept(False, PRIORITIES)
    priority_alpha: float = kept(fraction(0.6), PRIORITIES)
    priority_beta: float = fraction(0.4)
    normalize: NormalizeConfig = field(default_factory=NormalizeConfig)

    def acts_on_clusters(self) -> bool:
        """See :meth:`RecipeConfig.acts_on_clusters`."""
        return True

    def errors(self, config: Config) -> Iterator[RlsyncError]:
        """See :meth:`RecipeConfig.errors`."""
        yield from super().errors(config)
        if self.normalize.observations and any(route.dtype for route in config.sync.map):
            yield ConfigError(
                "workers that act in half precision would round the mean of an observation to three digits",
                "sync.map and recipe.normalize.observations",
                "leave the dtype out of the sync map, or give recipe.normalize.observations=false",
            )


@dataclass
class DQNConfig(OffPolicyConfig):
    """Deep Q-learning (Mnih et al. 2015), with a double target and returns of n steps."""

    name: str = "dqn"
    total_frames: int = above_zero(50_000)
    lr: float = learning_rate(1e-3)
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

    def errors(self, config: Config) -> Iterator[RlsyncError]:
        """See :meth:`RecipeConfig.errors`."""
        yield from super().errors(config)
        if self.ladder_alpha and config.workers_per_node < 2:
            yield ConfigError(
                "one worker makes no ladder of exploration rates",
                "recipe.ladder_alpha",
                "give 2 or more workers (on a cluster, on each node), or recipe.ladder_alpha=0",
            )


@dataclass
class ActorCriticConfig(OffPolicyConfig):
    """What SAC and TD3 share: two critics, and targets that follow them slowly."""

    total_frames: int = above_zero(100_000)
    lr: float = learning_rate(1e-3)
    anneal_lr: bool = kept(False, SCHEDULE)
    clip_norm: float = above_zero(1_000.0)
    tau: float = fraction(0.005)
    initial_weights: str = one_of("orthogonal", "torch")


@dataclass
class SACConfig(ActorCriticConfig):
    """Soft actor-critic with a learned temperature (Haarnoja et al. 2018, arXiv 1812.05905)."""

    name: str = "sac"
    alpha_init: float = in_buffer(above_zero(1.0), "alpha_init")


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
