"""The settings of ``impala`` and ``laser``, of V-trace and of the loss, each written once, without torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, get_args

from rlsync import ConfigError, RlsyncError
from rlsync.runs.actors.ring.format import WhenFull
from rlsync.runs.recipes import bounds
from rlsync.runs.recipes.settings import (
    SCHEDULE,
    Batches,
    Config,
    EvaluationConfig,
    OnPolicyNormalizeConfig,
    RecipeConfig,
)

if TYPE_CHECKING:
    from torch import Tensor


class Trust(NamedTuple):
    """What a trust region decided about the steps of an unroll.

    Example:
        >>> import torch
        >>> Trust(torch.tensor([True, False]), gate_delta=False).accepted.sum()
        tensor(1)
    """

    accepted: Tensor  #: [T, ...] bool, true for the steps inside
    gate_delta: bool  #: whether a rejected step loses its temporal difference, too


@dataclass(frozen=True, slots=True)
class TrustRegion:
    """Accepts a step when KL(target policy || reference policy) at its observation is below a threshold.

    Raises:
        ConfigError: the threshold is not above zero, or there is no such reference.

    Source: LASER, arXiv 1909.11583, section on the trust region scheme.

    Example:
        >>> import torch
        >>> TrustRegion(threshold=0.3).decide(torch.tensor([0.1, 0.5])).accepted
        tensor([ True, False])
    """

    threshold: float = bounds.above_zero(MISSING)  #: in nats, above zero
    #: ``"mu"``, the behaviour policy; or ``"implied"``, the policy whose value V-trace estimates: min(rho_bar
    #: * behaviour policy, target policy), normalised (policies that make one choice only).
    reference: str = bounds.one_of("mu", "implied")
    gate_delta: bool = False  #: whether a rejected step loses its temporal difference, too

    def __post_init__(self) -> None:
        bounds.refuse(bounds.bound_errors(self, "TrustRegion."))

    def decide(self, kl: Tensor) -> Trust:
        """Decide for each step.

        Args:
            kl: [T, ...], the divergence from the reference at each step, in nats.
        """
        return Trust(kl < self.threshold, self.gate_delta)


@dataclass(frozen=True, kw_only=True)
class VTraceSettings:
    """The values of V-trace.

    Raises:
        ConfigError: a value is out of its range.

    Source: IMPALA, arXiv 1802.01561, section 4.

    Example:
        >>> VTraceSettings(rho_bar=2.0).c_bar
        1.0
    """

    gamma: float = bounds.same_as(RecipeConfig, "gamma")  #: discount
    #: Bound of the probability ratio in the temporal difference. It decides which policy's value is learned.
    rho_bar: float = bounds.above_zero(1.0)
    #: Bound of the ratio in the trace. It decides how far back a temporal difference reaches.
    c_bar: float = bounds.above_zero(1.0)
    pg_rho_bar: float = bounds.above_zero(1.0)  #: bound of the ratio in the advantage
    #: The lambda of TD(lambda) and GAE(lambda). 1 is plain V-trace; smaller values give shorter returns.
    lam: float = bounds.fraction(1.0)

    def __post_init__(self) -> None:
        bounds.refuse(bounds.bound_errors(self))


@dataclass(frozen=True, kw_only=True)
class LossSettings(VTraceSettings):
    """The options of :class:`ImpalaLoss`: V-trace's values, and those below.

    Args:
        gamma, rho_bar, c_bar, pg_rho_bar, lam: see :class:`VTraceSettings`.

    Raises:
        ConfigError: a value is out of its range.

    Source: IMPALA, arXiv 1802.01561; LASER, arXiv 1909.11583.

    Example:
        >>> LossSettings(lam=0.95, entropy_on="online").reduction
        'mean'
    """

    entropy_coeff: float = bounds.not_below_zero(0.01)  #: weight of the entropy bonus
    #: Weight of the baseline's loss. The paper has 0.5; where returns are large, the baseline's gradient is
    #: then many times the policy's.
    baseline_coeff: float = bounds.not_below_zero(0.02)
    reward_clipping: str = bounds.one_of("none", "clip")  #: ``"none"``, or ``"clip"`` to [-1, 1]
    #: ``"mean"`` or ``"sum"`` (as in the paper) over the T * B steps.
    reduction: str = bounds.one_of("mean", "sum")
    #: ``"all"`` unrolls, or only the ``"online"`` ones, as in LASER; the others then count as 0 in the mean.
    entropy_on: str = bounds.one_of("all", "online")
    #: LASER's, or None. The policy and the baseline do not learn from steps outside.
    trust_region: TrustRegion | None = None


@dataclass
class ModelConfig:
    """The network: a torso, an LSTM if it has units, policy and value; see ``ImpalaNet``."""

    #: mlp for vectors; nature (as in DQN) or impala (residual) for pixels. auto chooses mlp or nature.
    torso: str = bounds.one_of(
        "auto", "mlp", "nature", "impala", of_0_1={"shallow": "nature", "deep": "impala"}
    )
    #: Widths of the torso's dense layers. null: [64, 64] for mlp, [512] for nature, [256] for impala.
    hidden: list[int] | None = field(default=None, metadata=bounds.WIDTHS)
    #: Units of the LSTM; 0: no LSTM.
    lstm: int = bounds.not_below_zero(0)
    #: Whether the last action and the last reward are inputs of the network.
    last_action: bool = False
    last_reward: bool = False
    #: Memory format of the convolutions.
    channels_last: bool = True
    #: Threads that share the learner's passes of the torso. More than one helps where workers leave cores
    #: idle.
    torso_threads: int = bounds.above_zero(1)


@dataclass
class UnrollReplayConfig:
    """Replayed unrolls, and the trust region of :class:`TrustRegion` for what is learned from them."""

    #: Replayed unrolls for each new one. 0: no replay, and the other keys of this section have no effect.
    ratio: float = bounds.not_below_zero(0.0, most=1_000)
    #: Capacity, in steps.
    capacity_steps: int = bounds.above_zero(100_000)
    #: Nothing is replayed before the replay holds this many steps.
    min_steps: int = bounds.above_zero(1_000)
    #: A folder to keep the replay in, on disk; null: in memory.
    path: str | None = None
    #: The most memory, in bytes, that the replay of several agents (recipe.agents) may take. It has the
    #: capacity of all of them together.
    max_bytes: int = bounds.above_zero(1 << 30)
    #: Whether checkpoints contain the replay. A resumed run can then replay at once, but each checkpoint is
    #: as large as the replay.
    checkpointed: bool = False
    #: Trust region: steps where KL(policy || reference) is not below this many nats are not learned from.
    #: null: no trust region.
    threshold: float | None = bounds.same_as(TrustRegion, "threshold", default=None)
    #: The reference: mu, the behaviour policy, or implied, the policy that V-trace evaluates, which is
    #: min(rho_bar * mu, policy), normalised; it is known where an action is one choice.
    reference: str = bounds.same_as(TrustRegion, "reference")
    #: Whether a rejected step also loses its temporal difference.
    gate_delta: bool = bounds.same_as(TrustRegion, "gate_delta")
    #: Entropy bonus on all unrolls, or on online (new) ones only; the others then count as 0 in the mean.
    entropy_on: str = bounds.same_as(LossSettings, "entropy_on")


@dataclass
class ImpalaConfig(RecipeConfig):
    """The asynchronous actor-learner (IMPALA, arXiv 1802.01561; LASER, arXiv 1909.11583)."""

    #: Not compile: beside channels-last convolutions it gains nothing (nature torso, T=20, B=8, one thread:
    #: 245 ms an update, 241 without, medians of 16 by turns).
    update_keys: ClassVar[tuple[str, ...]] = ("update_dtype",)
    acts_in_update_dtype: ClassVar[bool] = True

    #: The recipe. recipe=... on the command line sets it together with its keys.
    name: str = "impala"
    #: The run ends after this many frames at the latest. anneal_lr lowers the learning rate over them.
    total_frames: int = bounds.above_zero(400_000)
    #: Learning rate at the start.
    lr: float = bounds.learning_rate(2e-3)
    #: Whether the learning rate falls linearly to a twentieth over total_frames.
    anneal_lr: bool = bounds.kept(False, SCHEDULE)
    #: New unrolls in one optimizer step; replayed ones come on top. Must be a multiple of env.num_envs.
    batch_size: int = bounds.above_zero(8)
    #: Largest norm of the gradient. The paper has 40.
    clip_norm: float = bounds.above_zero(40.0)
    #: Steps in one unroll. The paper has 20.
    unroll_length: int = bounds.above_zero(20)
    #: Number of rollout slots. Fewer slots bound the age of unrolls more tightly. null: one for each worker,
    #: plus those of two batches.
    slots: int | None = bounds.above_zero(None)
    #: What happens when no slot is free. block: the worker waits, and nothing is lost. drop_oldest: when the
    #: learner comes for an unroll and all slots are full, it drops the oldest. drop_newest: the worker plays
    #: on and drops that rollout.
    when_full: str = bounds.one_of(*get_args(WhenFull))
    #: Step one half of a worker's environments while the network computes the actions of the other half. This
    #: helps where there are more cores than workers.
    overlap: bool = False
    #: How many times within ten minutes a worker that died is started again before the run fails.
    max_restarts: int = bounds.not_below_zero(5)
    #: adam or rmsprop. The paper has rmsprop; adam needs no tuning on CartPole.
    optimizer: str = bounds.kept(
        bounds.one_of("adam", "rmsprop"), "the checkpoint has that optimizer's state"
    )
    #: RMSProp's alpha: the decay of its running mean of squared gradients.
    rms_alpha: float = bounds.in_optimizer(bounds.fraction(0.99), "alpha", optimizer="RMSprop")
    #: RMSProp's epsilon, added to the denominator.
    rms_eps: float = bounds.in_optimizer(bounds.above_zero(0.01), "eps", optimizer="RMSprop")
    #: Adam's epsilon. Larger values shrink the steps of weights with small gradients.
    adam_eps: float = bounds.in_optimizer(bounds.above_zero(1e-8), "eps", optimizer="Adam")
    #: Weight of the entropy bonus.
    entropy_coeff: float = bounds.same_as(LossSettings, "entropy_coeff")
    #: Weight of the baseline's loss. The paper has 0.5; with CartPole's returns in the hundreds the
    #: baseline's gradient would then be many times the policy's.
    baseline_coeff: float = bounds.same_as(LossSettings, "baseline_coeff")
    #: V-trace: bound of the probability ratio in the temporal difference. It decides which policy is
    #: evaluated. The paper has 1.
    rho_bar: float = bounds.same_as(LossSettings, "rho_bar")
    #: V-trace: bound of the ratio in the trace. It decides how far back a temporal difference reaches. The
    #: paper has 1.
    c_bar: float = bounds.same_as(LossSettings, "c_bar")
    #: V-trace: bound of the ratio in the advantage of the policy gradient. The paper has 1.
    pg_rho_bar: float = bounds.same_as(LossSettings, "pg_rho_bar")
    #: V-trace: lambda, as in GAE. 1 is plain V-trace; smaller values bootstrap earlier.
    vtrace_lambda: float = bounds.same_as(LossSettings, "lam")
    #: In which dtype the torso computes, float32 or bfloat16, in workers, too. All the rest keeps float32.
    update_dtype: str = bounds.same_as(RecipeConfig, "update_dtype")
    #: none, or clip: rewards are clipped to [-1, 1] for learning, after normalize.rewards. Logged returns are
    #: not clipped.
    reward_clipping: str = bounds.same_as(LossSettings, "reward_clipping")
    #: mean or sum over the steps of a batch. With mean, the learning rate does not depend on the size of the
    #: batch.
    reduction: str = bounds.same_as(LossSettings, "reduction")
    #: Learners in processes of their own, each with its own workers, which share one replay. Agent n has the
    #: seed seed + n and the folder agents/n.
    agents: int = bounds.above_zero(1, most=1_000)
    #: What agents differ in: keys of the recipe, each with a value for each agent, as a list or as Hydra
    #: writes a sweep: {lr: [0.001, 0.003], model.lstm: "range(1,3)"}. null: nothing but the seed.
    vary: Any = None
    model: ModelConfig = field(default_factory=ModelConfig)
    #: What is brought to unit spread. Pixels are counted when they are learned from.
    normalize: OnPolicyNormalizeConfig = field(default_factory=OnPolicyNormalizeConfig)
    #: Replay of unrolls, as in recipe=laser. IMPALA has none.
    replay: UnrollReplayConfig = field(default_factory=UnrollReplayConfig)
    #: A separate process that plays episodes with one version after the other and writes evaluations.csv.
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)

    def variant(self) -> str:
        """With a replay it is LASER: its checkpoints have the replay's state."""
        if self.replay.ratio:
            return "laser"
        return self.name

    def batches(self, config: Config) -> Batches:
        return Batches(self.unroll_length, self.batch_size // max(1, config.env.num_envs))

    def updates_after(self, config: Config, frames: int, updates: int) -> int:
        return 1

    def says_which_batches(self) -> bool:
        return True

    def ring_policy(self) -> str:
        return self.when_full

    def population(self) -> int:
        return self.agents

    def acts_on_clusters(self) -> bool:
        return True

    def loss_settings(self) -> LossSettings:
        """The settings of the loss. Without a replay those under ``replay`` have no effect."""
        options = bounds.values_for(LossSettings, self) | {"lam": self.vtrace_lambda}
        replay = self.replay
        if replay.ratio:
            options["entropy_on"] = replay.entropy_on
            if replay.threshold is not None:
                options["trust_region"] = TrustRegion(
                    replay.threshold, replay.reference, replay.gate_delta
                )
        return LossSettings(**options)

    def errors(self, config: Config) -> Iterator[RlsyncError]:
        yield from self.normalize.errors(config)
        frames = config.collector.frames_per_batch
        wanted = self.batch_size * self.unroll_length
        if frames != wanted:
            problem = f"a batch of {frames} frames is not {self.batch_size} unrolls of {self.unroll_length}"
            cure = f"give recipe.batch_size x recipe.unroll_length = {wanted}"
            yield ConfigError(problem, "collector.frames_per_batch", cure)
        if self.when_full != "block" and not config.cluster.here:
            problem = "the nodes of a cluster drop no unroll: their workers wait for a free slot"
            yield ConfigError(
                problem, "recipe.when_full", "give recipe.when_full=block, or cluster=none"
            )
        if config.env.num_envs > 0 and self.batch_size % config.env.num_envs:
            problem = f"{self.batch_size} unrolls are not a whole number of rollouts of {config.env.num_envs}"
            cure = f"give a multiple of env.num_envs = {config.env.num_envs}, the unrolls of one rollout"
            yield ConfigError(problem, "recipe.batch_size", cure)
        if self.replay.ratio and self.replay.min_steps > self.replay.capacity_steps:
            problem = f"a replay of {self.replay.capacity_steps} steps never holds {self.replay.min_steps}"
            cure = f"give at most recipe.replay.capacity_steps = {self.replay.capacity_steps}"
            yield ConfigError(problem, "recipe.replay.min_steps", cure)
        if self.agents > 1:
            yield from self._population_errors(config)
        elif self.vary is not None:
            cure = "give recipe.agents, or leave it out"
            yield ConfigError("one agent does not differ from others", "recipe.vary", cure)

    def _population_errors(self, config: Config) -> Iterator[RlsyncError]:
        """What agents that share a replay cannot have."""
        if not isinstance(self.vary, dict | None):
            cure = "write recipe.vary={KEY: [A, B]}"
            yield ConfigError(f"{self.vary!r} is no list of values by key", "recipe.vary", cure)
        collector = config.collector
        checks = (
            ("recipe.replay.ratio", not self.replay.ratio, "give recipe=laser, which has a replay"),
            ("recipe.replay.path", bool(self.replay.path), "leave it out"),
            ("recipe.replay.checkpointed", self.replay.checkpointed, "give false"),
            ("cluster.kind", not config.cluster.here, "give cluster=none"),
            ("collector.lag", collector.lag is not None, "give null"),
            ("collector.num_workers", not collector.num_workers, "give 1 or more"),
            ("life_frames", config.life_frames is not None, "leave life_frames out"),
        )
        for key, is_wrong, cure in checks:
            if is_wrong:
                yield ConfigError(f"{self.agents} agents share one replay in memory", key, cure)
