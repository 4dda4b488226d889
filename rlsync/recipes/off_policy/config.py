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
    #: Widths of the hidden layers of the actor and of the two critics.
    hidden: list[int] = field(default_factory=lambda: [256, 256], metadata=WIDTHS)
    #: Draw frames whose values were wrong more often (prioritised replay). Otherwise all are drawn alike.
    prioritized: bool = kept(False, PRIORITIES)
    #: How much more often: 0 not at all, 1 in proportion to the error.
    priority_alpha: float = kept(fraction(0.6), PRIORITIES)
    #: How much of the bias that this brings is taken back by smaller steps: 0 nothing, 1 all.
    priority_beta: float = fraction(0.4)
    #: Observations and rewards in units of their own spread. The statistics of the observations are part of
    #: the networks and travel with the weights, so that a version always acts with its own.
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
    #: Frames to collect. The run ends here at the latest, and the learning rate falls over this many.
    total_frames: int = above_zero(50_000)
    lr: float = learning_rate(1e-3)
    batch_size: int = above_zero(64)
    clip_norm: float = above_zero(10.0)
    #: What follows each hidden layer: relu or tanh.
    activation: str = one_of("relu", "tanh")
    buffer_frames: int = kept(above_zero(50_000), BUFFER)
    pace: PaceConfig = field(default_factory=lambda: PaceConfig(ratio=0.5))
    #: Optimizer steps between two copies of the Q network to the target network. With few copies in a run, Q
    #: values cannot grow to what a long episode is worth.
    target_update_steps: int = above_zero(128)
    #: Let the Q network choose the action whose value the target network says (double DQN).
    double: bool = True
    #: Steps whose rewards are summed before a value is added. More steps spread rewards faster and are less
    #: exact.
    n_step: int = kept(above_zero(3), "the checkpoint has a replay buffer of such returns")
    #: Exploration rate at the start. 1: every action is random.
    epsilon_start: float = kept(fraction(1.0), EXPLORATION)
    #: Exploration rate at the end.
    epsilon_end: float = kept(fraction(0.04), EXPLORATION)
    #: Number of frames over which the exploration rate falls linearly.
    epsilon_frames: int = kept(above_zero(10_000), EXPLORATION)
    #: Lets workers explore at rates of their own: worker i of N at epsilon ** (1 + ladder_alpha * i / (N -
    #: 1)). Ape-X has 7. 0: all alike.
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
    #: Learning rate of Adam, for all networks and the temperature.
    lr: float = learning_rate(1e-3)
    anneal_lr: bool = kept(False, SCHEDULE)
    #: Largest norm of the gradient. Default: so large that only a step that would break the run is cut.
    clip_norm: float = above_zero(1_000.0)
    #: How far the target networks move to the trained ones in each optimizer step.
    tau: float = fraction(0.005)
    #: Initial weights of these networks: orthogonal with biases of 0 and small first actions, or torch's own,
    #: which are smaller (Stable-Baselines3 has them).
    initial_weights: str = one_of("orthogonal", "torch")


@dataclass
class SACConfig(ActorCriticConfig):
    """Soft actor-critic with a learned temperature (Haarnoja et al. 2018, arXiv 1812.05905)."""

    name: str = "sac"
    #: Temperature at the start: what a unit of entropy is worth. It is learned from there.
    alpha_init: float = in_buffer(above_zero(1.0), "alpha_init")


@dataclass
class TD3Config(ActorCriticConfig):
    """Twin delayed deep deterministic policy gradient (Fujimoto et al. 2018, arXiv 1802.09477).

    Noise is given in halves of the range of the actions.
    """

    name: str = "td3"
    #: Standard deviation of the noise that workers add to actions, in halves of the actions' range.
    exploration_noise: float = not_below_zero(0.1)
    #: Standard deviation of the noise on the target's actions, in halves of the actions' range.
    target_noise: float = not_below_zero(0.2)
    #: Largest such noise, in halves of the actions' range.
    target_noise_clip: float = not_below_zero(0.5)
    #: The actor is updated at every so many updates of the critics.
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
