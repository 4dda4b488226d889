"""What the recipes ``impala`` and ``laser`` can be told."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from rlsync.core.errors import ConfigError, RlsyncError
from rlsync.recipes.bounds import above_zero, fraction, not_below_zero, one_of
from rlsync.recipes.config import Config, RecipeConfig, width_errors


@dataclass
class ModelConfig:
    """The network: a torso, an LSTM if it has units, policy and value; see ``ImpalaNet``.

    The torso ``auto`` is ``mlp`` for vectors and ``shallow`` for pixels; ``hidden``, the widths of its dense
    layers, is by default what is usual for it. ``torso_threads`` share the learner's passes of the torso: of
    use where workers leave cores idle.
    """

    torso: str = one_of("auto", "mlp", "shallow", "deep")
    hidden: list[int] | None = None
    lstm: int = not_below_zero(0)
    last_action: bool = False
    last_reward: bool = False
    channels_last: bool = True
    bfloat16: bool = False
    torso_threads: int = above_zero(1)


@dataclass
class ReplayConfig:
    """Replayed unrolls; a ``ratio`` of zero is IMPALA, without a replay and without a trust region.

    ``path`` is a folder to hold it in on disk instead of in memory; ``threshold`` is the trust region's, in
    nats, null for none.
    """

    ratio: float = not_below_zero(0.0)
    capacity_steps: int = above_zero(100_000)
    min_steps: int = above_zero(1_000)
    path: str | None = None
    checkpointed: bool = False
    threshold: float | None = above_zero(None)
    reference: str = one_of("mu", "implied")
    gate_delta: bool = False
    entropy_on: str = one_of("all", "online")


@dataclass
class EvaluationConfig:
    """A process of its own that evaluates one version after the other, with a low priority.

    ``every_frames`` of the training at least lie between two evaluations; 0 is none. ``episodes`` are played
    in each, up to eight at once.
    """

    every_frames: int = not_below_zero(0)
    episodes: int = above_zero(8)


@dataclass
class ImpalaConfig(RecipeConfig):
    """The asynchronous actor-learner (IMPALA, arXiv 1802.01561; LASER, arXiv 1909.11583).

    ``batch_size`` counts the unrolls, of ``unroll_length`` steps each, in one optimizer step; those that a
    replay adds are not among them. ``slots`` is the number of rollout slots, which bounds the lag; null
    takes one for each worker and those of two batches. ``overlap`` steps one half of a worker's environments
    while the network is busy with the other: of use where there are more cores than workers.
    """

    name: str = "impala"
    total_frames: int = above_zero(400_000)
    target_return: float | None = 450.0
    lr: float = above_zero(2e-3)
    anneal_lr: bool = False
    batch_size: int = above_zero(8)
    clip_norm: float = above_zero(40.0)
    unroll_length: int = above_zero(20)
    slots: int | None = above_zero(None)
    overlap: bool = False
    max_restarts: int = not_below_zero(5)
    optimizer: str = one_of("adam", "rmsprop")
    rms_alpha: float = fraction(0.99)
    rms_eps: float = above_zero(0.01)
    adam_eps: float = above_zero(1e-8)
    entropy_coeff: float = not_below_zero(0.01)
    baseline_coeff: float = not_below_zero(0.02)
    rho_bar: float = above_zero(1.0)
    c_bar: float = above_zero(1.0)
    pg_rho_bar: float = above_zero(1.0)
    vtrace_lambda: float = fraction(1.0)
    reward_clipping: str = one_of("none", "clip")
    reduction: str = one_of("mean", "sum")
    model: ModelConfig = field(default_factory=ModelConfig)
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)

    def errors(self, config: Config) -> Iterator[RlsyncError]:
        """See :meth:`RecipeConfig.errors`."""
        wanted = self.batch_size * self.unroll_length
        if config.collector.frames_per_batch != wanted:
            yield ConfigError(
                f"a batch of {config.collector.frames_per_batch} frames is not {self.batch_size} unrolls of "
                f"{self.unroll_length}",
                "collector.frames_per_batch",
                f"give recipe.batch_size x recipe.unroll_length = {wanted}",
            )
        if self.model.hidden is not None:
            yield from width_errors("recipe.model.hidden", self.model.hidden)
        if config.env.num_envs > 0 and self.batch_size % config.env.num_envs:
            yield ConfigError(
                f"a batch of {self.batch_size} unrolls is not made of rollouts of {config.env.num_envs}",
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
    """The recipe of a config that is about to be built.

    Raises:
        ConfigError: it is another recipe, or an evaluation has no run folder.
    """
    recipe = config.recipe
    if not isinstance(recipe, ImpalaConfig):
        raise ConfigError(f"not an IMPALA recipe: {recipe}", "recipe", "give recipe=impala or recipe=laser")
    if recipe.evaluation.every_frames and config.run_dir is None:
        raise ConfigError(
            "an evaluation has nowhere to write to",
            "recipe.evaluation.every_frames, run_dir",
            "give run_dir, or every_frames=0",
        )
    return recipe
