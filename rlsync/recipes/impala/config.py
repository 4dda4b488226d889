"""The config of the recipes ``impala`` and ``laser``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, get_args

from rlsync.core.errors import ConfigError, RlsyncError
from rlsync.recipes.bounds import (
    WIDTHS,
    above_zero,
    fraction,
    in_optimizer,
    kept,
    learning_rate,
    not_below_zero,
    one_of,
    same_as,
    values_for,
)
from rlsync.recipes.impala.settings import LossSettings
from rlsync.recipes.impala.trust import TrustRegion
from rlsync.recipes.settings import SCHEDULE, Config, EvaluationConfig, RecipeConfig
from rlsync.transport.ring.format import WhenFull


@dataclass
class ModelConfig:
    """The network: a torso, an LSTM if it has units, policy and value; see ``ImpalaNet``.

    The torso ``auto`` is ``mlp`` for vectors and ``shallow`` for pixels. ``hidden`` gives the widths of its
    dense layers; null takes the usual ones of that torso. ``torso_threads`` is the number of threads that
    share the learner's passes of the torso; more than one helps where the workers leave cores idle.
    """

    torso: str = one_of("auto", "mlp", "shallow", "deep")
    hidden: list[int] | None = field(default=None, metadata=WIDTHS)
    lstm: int = not_below_zero(0)
    last_action: bool = False
    last_reward: bool = False
    channels_last: bool = True
    bfloat16: bool = False
    torso_threads: int = above_zero(1)


@dataclass
class UnrollReplayConfig:
    """Replayed unrolls; with a ``ratio`` of zero there is no replay and the other keys have no effect.

    ``path`` is a folder in which the replay is kept on disk instead of in memory. ``threshold``,
    ``reference`` and ``gate_delta`` are those of :class:`TrustRegion`; a ``threshold`` of null is no trust
    region.
    """

    ratio: float = not_below_zero(0.0)
    capacity_steps: int = above_zero(100_000)
    min_steps: int = above_zero(1_000)
    path: str | None = None
    checkpointed: bool = False
    threshold: float | None = same_as(TrustRegion, "threshold", default=None)
    reference: str = same_as(TrustRegion, "reference")
    gate_delta: bool = same_as(TrustRegion, "gate_delta")
    entropy_on: str = same_as(LossSettings, "entropy_on")

    def loss_options(self) -> dict[str, Any]:
        """The options of :class:`LossSettings` that depend on the replay."""
        if not self.ratio:
            return {}
        region = None
        if self.threshold is not None:
            region = TrustRegion(self.threshold, self.reference, self.gate_delta)
        return {"trust_region": region, "entropy_on": self.entropy_on}


@dataclass
class ImpalaConfig(RecipeConfig):
    """The asynchronous actor-learner (IMPALA, arXiv 1802.01561; LASER, arXiv 1909.11583).

    One optimizer step uses ``batch_size`` new unrolls of ``unroll_length`` steps each, plus those that a
    replay adds. ``slots`` is the number of rollout slots, which bounds the lag; null takes one for each
    worker plus those of two batches. ``when_full`` says what happens when none is free. ``overlap`` steps one
    half of a worker's environments while the network computes the actions of the other half; it helps where
    there are more cores than workers.
    """

    name: str = "impala"
    total_frames: int = above_zero(400_000)
    lr: float = learning_rate(2e-3)
    anneal_lr: bool = kept(False, SCHEDULE)
    batch_size: int = above_zero(8)
    clip_norm: float = above_zero(40.0)
    unroll_length: int = above_zero(20)
    slots: int | None = above_zero(None)
    when_full: str = one_of(*get_args(WhenFull))
    overlap: bool = False
    max_restarts: int = not_below_zero(5)
    optimizer: str = kept(one_of("adam", "rmsprop"), "the checkpoint has the state of that optimizer")
    rms_alpha: float = in_optimizer(fraction(0.99), "alpha", optimizer="RMSprop")
    rms_eps: float = in_optimizer(above_zero(0.01), "eps", optimizer="RMSprop")
    adam_eps: float = in_optimizer(above_zero(1e-8), "eps", optimizer="Adam")
    entropy_coeff: float = same_as(LossSettings, "entropy_coeff")
    baseline_coeff: float = same_as(LossSettings, "baseline_coeff")
    rho_bar: float = same_as(LossSettings, "rho_bar")
    c_bar: float = same_as(LossSettings, "c_bar")
    pg_rho_bar: float = same_as(LossSettings, "pg_rho_bar")
    vtrace_lambda: float = same_as(LossSettings, "lam")
    reward_clipping: str = same_as(LossSettings, "reward_clipping")
    reduction: str = same_as(LossSettings, "reduction")
    model: ModelConfig = field(default_factory=ModelConfig)
    replay: UnrollReplayConfig = field(default_factory=UnrollReplayConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)

    def variant(self) -> str:
        """With a replay it is LASER: its checkpoints have the replay's state."""
        return "laser" if self.replay.ratio else self.name

    def evaluations(self) -> EvaluationConfig:
        """See :meth:`RecipeConfig.evaluations`."""
        return self.evaluation

    def updates_after(self, config: Config, frames: int, updates: int) -> int:
        """See :meth:`RecipeConfig.updates_after`: one for each batch."""
        return 1

    def acts_on_clusters(self) -> bool:
        """See :meth:`RecipeConfig.acts_on_clusters`."""
        return True

    def loss_settings(self) -> LossSettings:
        """The settings of the loss. Without a replay those under ``replay`` have no effect.

        Raises:
            ConfigError: a value is out of its range.
        """
        options = values_for(LossSettings, self) | {"lam": self.vtrace_lambda} | self.replay.loss_options()
        return LossSettings(**options)

    def errors(self, config: Config) -> Iterator[RlsyncError]:
        """See :meth:`RecipeConfig.errors`."""
        if config.collector.kind != "async":
            yield ConfigError(
                f"the workers of {self.name} never wait for the learner: its collector cannot be sync",
                "collector.kind",
                "give collector.kind=async",
            )
        wanted = self.batch_size * self.unroll_length
        if config.collector.frames_per_batch != wanted:
            yield ConfigError(
                f"a batch of {config.collector.frames_per_batch} frames is not {self.batch_size} unrolls of "
                f"{self.unroll_length}",
                "collector.frames_per_batch",
                f"give recipe.batch_size x recipe.unroll_length = {wanted}",
            )
        if self.when_full != "block" and not config.cluster.here:
            yield ConfigError(
                "the nodes of a cluster drop no unroll: their workers wait for a free slot",
                "recipe.when_full",
                "give recipe.when_full=block, or cluster=none",
            )
        if config.env.num_envs > 0 and self.batch_size % config.env.num_envs:
            yield ConfigError(
                f"{self.batch_size} unrolls are not a whole number of rollouts of {config.env.num_envs}",
                "recipe.batch_size",
                f"give a multiple of env.num_envs = {config.env.num_envs}, the unrolls of one rollout",
            )
        if self.replay.ratio and self.replay.min_steps > self.replay.capacity_steps:
            yield ConfigError(
                f"a replay of {self.replay.capacity_steps} steps never holds {self.replay.min_steps}",
                "recipe.replay.min_steps",
                f"give at most recipe.replay.capacity_steps = {self.replay.capacity_steps}",
            )


def settings_of(config: Config) -> ImpalaConfig:
    """The recipe of a config, checked before it is built.

    Raises:
        ConfigError: the recipe is another one, or there is an evaluation and no run folder to write it to.
    """
    recipe = ImpalaConfig.of(config)
    if recipe.evaluation.every_frames and config.run_dir is None:
        raise ConfigError(
            "an evaluation needs a run folder to write to",
            "recipe.evaluation.every_frames, run_dir",
            "give run_dir, or every_frames=0",
        )
    return recipe
