"""The settings of the Dreamer recipes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

from rlsync import ConfigError, RlsyncError
from rlsync.runs.recipes import bounds
from rlsync.runs.recipes.replay.settings import BUFFER, PaceConfig, ReplayConfig
from rlsync.runs.recipes.settings import Config

_SIZES = "the checkpoint has networks of that size"


@dataclass
class DreamerConfig(ReplayConfig):
    """What the Dreamer recipes share.

    An optimizer step (update) learns from ``batch_size`` sequences of ``sequence_length`` stored frames, and
    imagines ``horizon`` steps from each of these frames.
    """

    stored_observations: ClassVar[int] = 1

    #: Learning rate of Adam, for the world model. Default: for networks of this size; larger ones need a
    #: smaller one.
    lr: float = bounds.learning_rate(1e-3)
    anneal_lr: bool = bounds.kept(
        False, "the checkpoint has a schedule of the learning rate, or has none"
    )
    gamma: float = bounds.in_buffer(bounds.fraction(0.997), "gamma")
    #: How much of a return is imagined rewards, and how much the critic's opinion: 1 is rewards alone.
    gae_lambda: float = bounds.in_buffer(bounds.fraction(0.95), "lmbda")
    #: Sequences in one optimizer step.
    batch_size: int = bounds.above_zero(16)
    #: Stored frames in each sequence, all of one episode. The prefill must have a sequence of each
    #: environment.
    sequence_length: int = bounds.at_least(2, 16)
    #: Steps that are imagined from each of these frames.
    horizon: int = bounds.above_zero(15)
    #: Number of frames that the replay buffer holds. By default it holds all frames of the run. The first
    #: observation of an episode counts as one, too.
    buffer_frames: int = bounds.kept(bounds.above_zero(100_000), BUFFER)
    pace: PaceConfig = field(default_factory=lambda: PaceConfig(ratio=0.25, prefill=500))
    #: What a worker's recurrent state becomes when it adopts new weights in the middle of an episode: keep,
    #: reset (to zeros), or recompute (from the episode so far, with the new weights).
    on_adoption: str = bounds.one_of("keep", "reset", "recompute")
    #: With on_adoption=recompute: the most steps of an episode that the state is made from.
    window: int = bounds.above_zero(64)
    #: Width of hidden layers, of encoder, decoder, heads, actor and critic.
    cells: int = bounds.kept(bounds.above_zero(128), _SIZES)
    #: Number of hidden layers in each of these networks.
    depth: int = bounds.kept(bounds.above_zero(1), _SIZES)
    #: Width of the recurrent state, which is called the belief.
    belief: int = bounds.kept(bounds.above_zero(128), _SIZES)
    #: Nats of difference between prior and posterior that cost nothing: of dreamer_v3 in each row, of
    #: dreamer_v1 in the mean of all.
    free_nats: float = bounds.not_below_zero(1.0)

    def frames_in_an_update(self) -> int:
        return self.batch_size * self.sequence_length

    def update_facts(self) -> str:
        return (
            f"world model, actor and critic, one step each, on {self.batch_size} sequences of "
            f"{self.sequence_length} stored frames; {self.horizon} steps are imagined from each of these "
            f"{self.frames_in_an_update()}"
        )

    def acts_on_clusters(self) -> bool:
        return True

    def _batch_key(self) -> str:
        return "recipe.batch_size x recipe.sequence_length"

    def errors(self, config: Config) -> Iterator[RlsyncError]:
        yield from super().errors(config)
        streams = self.batches(config).rollouts * config.env.num_envs
        frames = self.sequence_length
        if self.pace.prefill < frames * streams:
            prefill = f"a prefill of {self.pace.prefill} frames from {streams} environments"
            problem = f"{prefill} has no sequence of {frames} frames (recipe.sequence_length)"
            cure = f"give recipe.pace.prefill={frames * streams} or more"
            yield ConfigError(problem, "recipe.pace.prefill", cure)


@dataclass
class DreamerV3Config(DreamerConfig):
    """DreamerV3 (Hafner et al. 2023). A state is ``categoricals`` draws from ``classes`` classes each."""

    name: str = "dreamer_v3"
    total_frames: int = bounds.above_zero(20_000)
    batch_size: int = bounds.above_zero(4)
    #: Stored frames in each sequence; it may cross the end of an episode, and begins without a state. The
    #: prefill must have a sequence of each environment.
    sequence_length: int = bounds.at_least(2, 64)
    #: A gradient is cut to this share of the norm of its weights.
    clip_norm: float = bounds.in_optimizer(bounds.above_zero(0.3), "agc")
    #: The other part of the state is drawn: so many numbers ...
    categoricals: int = bounds.kept(bounds.above_zero(8), _SIZES)
    #: ... each one of so many classes.
    classes: int = bounds.kept(bounds.above_zero(8), _SIZES)
    #: Only for pictures: the four layers of the image encoder have 2, 3, 4 and 4 times as many channels, and
    #: those of the decoder, too.
    channels: int = bounds.kept(bounds.above_zero(8), _SIZES)
    #: Share of a uniform distribution in what is drawn, so that nothing becomes impossible.
    unimix: float = bounds.fraction(0.01)
    #: Bins in which rewards and values are predicted.
    bins: int = bounds.kept(bounds.at_least(2, 255), _SIZES)
    #: What a unit of entropy of the actor is worth, in units of the spread of returns.
    entropy: float = bounds.not_below_zero(3e-4)
    #: How far the slow critic moves to the critic in each optimizer step.
    tau: float = bounds.fraction(0.02)
    #: Optimizer steps over which the learning rate grows to its value; 0: none.
    warmup_steps: int = bounds.in_optimizer(bounds.not_below_zero(0), "warmup_steps")

    def errors(self, config: Config) -> Iterator[RlsyncError]:
        yield from super().errors(config)
        if self.gamma == 1:
            problem = "dreamer_v3 imagines 1 / (1 - gamma) steps ahead, which a discount of 1 makes infinite"
            yield ConfigError(problem, "recipe.gamma", "give less than 1, like 0.997")


@dataclass
class DreamerV1Config(DreamerConfig):
    """DreamerV1 (Hafner et al. 2019, arXiv 1912.01603).

    A state is ``state`` numbers, drawn from Gaussians. ``lr`` is that of the world model. Its imagined
    episodes never end: it suits environments without terminal states.
    """

    name: str = "dreamer_v1"
    total_frames: int = bounds.above_zero(20_000)
    lr: float = bounds.learning_rate(1e-3, group=0)
    gamma: float = bounds.in_buffer(bounds.fraction(0.99), "gamma")
    clip_norm: float = bounds.above_zero(100.0)
    #: The other part of the state is drawn: so many numbers.
    state: int = bounds.kept(bounds.above_zero(30), _SIZES)
    free_nats: float = bounds.not_below_zero(3.0)
    #: Weight of that difference in the world model's loss. The decoder's errors are summed over the numbers
    #: of an observation, so an observation of a few numbers needs a small weight.
    kl_scale: float = bounds.above_zero(1.0, finite=True)
    #: Learning rate for the actor.
    actor_lr: float = bounds.learning_rate(3e-4, group=1)
    #: Learning rate for the critic.
    value_lr: float = bounds.learning_rate(3e-4, group=2)
    #: The world model and the critic learn rewards times this. Choose it so that returns are tens, not
    #: hundreds. Logged returns are those of the environment. A resumed run cannot change it.
    reward_scale: float = bounds.kept(
        bounds.above_zero(1.0, finite=True), "the checkpoint has values of rewards times that"
    )
    #: Standard deviation of the actor's choice at the start, before it is squashed into the bounds. At 5 most
    #: choices are near a bound.
    actor_std: float = bounds.above_zero(5.0, finite=True)
    #: The least that this standard deviation can become.
    actor_least_std: float = bounds.above_zero(1e-4, finite=True)
    #: Standard deviation of the noise that workers add to actions, in halves of the range of each number.
    exploration_noise: float = bounds.not_below_zero(0.3)

    def errors(self, config: Config) -> Iterator[RlsyncError]:
        yield from super().errors(config)
        if self.belief != self.cells:
            problem = f"TorchRL's prior of DreamerV1 has one width, got {self.cells} cells and {self.belief}"
            yield ConfigError(problem, "recipe.belief", f"give recipe.belief={self.cells}")
