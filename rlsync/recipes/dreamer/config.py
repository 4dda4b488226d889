"""The settings of the Dreamer recipes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec

from rlsync.core.errors import ConfigError, RlsyncError
from rlsync.recipes.bounds import (
    above_zero,
    at_least,
    fraction,
    in_buffer,
    in_optimizer,
    kept,
    learning_rate,
    not_below_zero,
    one_of,
)
from rlsync.recipes.replay.config import BUFFER, PaceConfig, ReplayConfig
from rlsync.recipes.settings import Config, RenderedConfig

#: The image encoder of DreamerV3 makes a picture smaller by this factor.
SHRINKS_BY = 16

_SIZES = "the checkpoint has networks of that size"


@dataclass
class OpenLoopConfig:
    """When to look at what the model imagines: after ``seen`` observations it imagines ``ahead`` steps."""

    every_frames: int = not_below_zero(1_000)
    seen: int = above_zero(5)
    ahead: int = above_zero(10)


@dataclass
class DreamerConfig(ReplayConfig):
    """What the Dreamer recipes share.

    An optimizer step (update) learns from ``batch_size`` sequences of ``sequence_length`` stored frames, and
    imagines ``horizon`` steps from each of these frames.
    """

    lr: float = learning_rate(1e-3)
    anneal_lr: bool = kept(False, "the checkpoint has a schedule of the learning rate, or has none")
    gamma: float = in_buffer(fraction(0.997), "gamma")
    gae_lambda: float = in_buffer(fraction(0.95), "lmbda")
    batch_size: int = above_zero(16)
    sequence_length: int = at_least(2, 16)
    horizon: int = above_zero(15)
    buffer_frames: int = kept(above_zero(100_000), BUFFER)
    pace: PaceConfig = field(default_factory=lambda: PaceConfig(ratio=0.25, prefill=500))
    on_adoption: str = one_of("keep", "reset", "recompute")
    window: int = above_zero(64)
    cells: int = kept(above_zero(128), _SIZES)
    depth: int = kept(above_zero(1), _SIZES)
    belief: int = kept(above_zero(128), _SIZES)
    free_nats: float = not_below_zero(1.0)
    open_loop: OpenLoopConfig = field(default_factory=OpenLoopConfig)

    def frames_in_an_update(self) -> int:
        """See :meth:`ReplayConfig.frames_in_an_update`."""
        return self.batch_size * self.sequence_length

    def update_facts(self) -> str:
        """See :meth:`RecipeConfig.update_facts`."""
        return (
            f"world model, actor and critic, one step each, on {self.batch_size} sequences of "
            f"{self.sequence_length} stored frames; {self.horizon} steps are imagined from each of these "
            f"{self.frames_in_an_update()}"
        )

    def _batch_key(self) -> str:
        return "recipe.batch_size x recipe.sequence_length"

    def errors(self, config: Config) -> Iterator[RlsyncError]:
        """See :meth:`RecipeConfig.errors`."""
        yield from super().errors(config)
        streams = config.collector.num_workers * config.env.num_envs
        needed = {"recipe.pace.prefill": (self.sequence_length, "recipe.sequence_length", "")}
        if self.open_loop.every_frames:
            looked_at = self.open_loop.seen + self.open_loop.ahead
            needed["recipe.open_loop"] = (looked_at, "seen + ahead", ", or recipe.open_loop.every_frames=0")
        for key, (frames, name, otherwise) in needed.items():
            if self.pace.prefill < frames * streams:
                yield ConfigError(
                    f"a prefill of {self.pace.prefill} frames from {streams} environments has no sequence of "
                    f"{frames} frames ({name})",
                    key,
                    f"give recipe.pace.prefill={frames * streams} or more{otherwise}",
                )


@dataclass
class DreamerV3Config(DreamerConfig):
    """DreamerV3 (Hafner et al. 2023). A state is ``categoricals`` draws from ``classes`` classes each."""

    name: str = "dreamer_v3"
    total_frames: int = above_zero(20_000)
    clip_norm: float = in_optimizer(above_zero(0.3), "agc")
    categoricals: int = kept(above_zero(8), _SIZES)
    classes: int = kept(above_zero(8), _SIZES)
    channels: int = kept(above_zero(8), _SIZES)
    unimix: float = fraction(0.01)
    bins: int = kept(at_least(2, 255), _SIZES)
    entropy: float = not_below_zero(3e-4)
    tau: float = fraction(0.02)
    warmup_steps: int = in_optimizer(not_below_zero(0), "warmup_steps")

    def errors(self, config: Config) -> Iterator[RlsyncError]:
        """See :meth:`RecipeConfig.errors`."""
        yield from super().errors(config)
        if isinstance(env := config.env, RenderedConfig):
            if env.img_height % SHRINKS_BY or env.img_width % SHRINKS_BY:
                yield ConfigError(
                    f"the encoder cannot halve a picture of {env.img_height} x {env.img_width} four times",
                    "env.img_height, env.img_width",
                    f"give multiples of {SHRINKS_BY}, like 64",
                )
            if self.open_loop.every_frames and find_spec("PIL") is None:
                yield ConfigError(
                    "pillow is not installed, which writes the pictures that the model imagines",
                    "recipe.open_loop.every_frames",
                    "pip install 'rlsync[video]', or give 0",
                )


@dataclass
class DreamerV1Config(DreamerConfig):
    """DreamerV1 (Hafner et al. 2019, arXiv 1912.01603). A state is ``state`` numbers, drawn from Gaussians.

    ``lr`` is that of the world model. Its imagined episodes never end: it suits environments without
    terminal states.
    """

    name: str = "dreamer_v1"
    total_frames: int = above_zero(20_000)
    lr: float = learning_rate(1e-3, group=0)
    gamma: float = in_buffer(fraction(0.99), "gamma")
    clip_norm: float = above_zero(100.0)
    state: int = kept(above_zero(30), _SIZES)
    free_nats: float = not_below_zero(3.0)
    kl_scale: float = above_zero(1.0, finite=True)
    actor_lr: float = learning_rate(3e-4, group=1)
    value_lr: float = learning_rate(3e-4, group=2)
    reward_scale: float = kept(
        above_zero(1.0, finite=True), "the checkpoint has values of rewards times that"
    )
    actor_std: float = above_zero(5.0, finite=True)
    actor_least_std: float = above_zero(1e-4, finite=True)
    exploration_noise: float = not_below_zero(0.3)

    def errors(self, config: Config) -> Iterator[RlsyncError]:
        """See :meth:`RecipeConfig.errors`."""
        yield from super().errors(config)
        if self.belief != self.cells:
            yield ConfigError(
                f"TorchRL's prior of DreamerV1 has one width, got {self.cells} cells and {self.belief}",
                "recipe.belief",
                f"give recipe.belief={self.cells}",
            )
