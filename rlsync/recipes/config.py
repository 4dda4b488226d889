"""The settings of a run, as plain dataclasses. Every default value is written here, and only here.

The command line fills them from configs/*.yaml and overrides; in Python they are built directly. The YAML
files repeat the defaults for people to read and copy, and a test compares the two. The defaults of
:class:`Config` train PPO on CartPole.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from rlsync.core.errors import ConfigError, RlsyncError
from rlsync.recipes.bounds import (
    above_zero,
    bound_errors,
    fraction,
    in_buffer,
    kept,
    learning_rate,
    not_below_zero,
    one_of,
    refuse,
)
from rlsync.recipes.cluster_config import ClusterConfig, cluster_errors
from rlsync.recipes.collector_config import CollectorConfig, in_process_errors
from rlsync.recipes.device_config import DeviceConfig, device_errors, stock_device_errors
from rlsync.recipes.env_config import AtariConfig, EnvConfig, RenderedConfig
from rlsync.recipes.evaluation_config import EvaluationConfig
from rlsync.recipes.evaluation_video import video_errors
from rlsync.recipes.sync_config import (
    RouteConfig,
    SyncConfig,
    WhenConfig,
    map_errors,
    sync_map,
    trigger,
    trigger_errors,
)

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "Config",
    "EnvConfig",
    "AtariConfig",
    "RenderedConfig",
    "CollectorConfig",
    "ClusterConfig",
    "DeviceConfig",
    "SyncConfig",
    "RouteConfig",
    "WhenConfig",
    "LoggerConfig",
    "RecipeConfig",
    "PPOConfig",
    "sync_map",
    "trigger",
    "errors",
    "check",
]


#: Why a resumed run cannot change the fields that decide about a schedule.
SCHEDULE = "the checkpoint has a schedule of the learning rate, or has none"


#: Loggers that need a package of the same name, which the extra of the same name installs.
LOGGER_PACKAGES = ("tensorboard", "wandb")


@dataclass
class LoggerConfig:
    """Where metrics go, and the smallest number of frames between two points of a curve.

    ``kwargs`` are further arguments of TorchRL's logger class; its other arguments are the run's folder.
    """

    kind: str = one_of("csv", *LOGGER_PACKAGES, "none")
    every_frames: int = above_zero(1)
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass
class RecipeConfig:
    """The settings that all recipes share.

    ``target_return`` ends the run early; None never does. Which return is good depends on the environment:
    the files in ``configs/tuned`` have those that are known. ``_recipe_`` says where the recipe lies, as
    ``module:OBJECT``, if it is neither rlsync's nor an installed package's; see
    ``docs/how_to/write_a_recipe.md``.
    """

    name: str = "ppo"
    total_frames: int = above_zero(150_000)
    target_return: float | None = None
    target_episodes: int = above_zero(20)
    lr: float = learning_rate(2e-3)
    anneal_lr: bool = kept(True, SCHEDULE)
    gamma: float = in_buffer(fraction(0.99), "gamma")
    batch_size: int = above_zero(128)
    clip_norm: float = above_zero(0.5)
    _recipe_: str | None = None

    #: Whether ``target_return`` is that of evaluations, where there are some.
    stops_by_evaluation: ClassVar[bool] = False

    @classmethod
    def of(cls, config: Config) -> Self:
        """The recipe's settings in a config.

        Args:
            config: of a run.

        Raises:
            ConfigError: they are those of another recipe.

        Example:
            >>> PPOConfig.of(Config(recipe=PPOConfig(lr=0.1))).lr
            0.1
        """
        if not isinstance(config.recipe, cls):
            raise ConfigError(
                f"this recipe takes the settings {cls.__name__}, got {type(config.recipe).__name__}",
                "recipe",
                f"give recipe={cls().name}",
            )
        return config.recipe

    def errors(self, config: Config) -> Iterator[RlsyncError]:
        """What is wrong with these settings beyond their bounds; ``config`` is the whole run's."""
        yield from ()

    def evaluations(self) -> EvaluationConfig:
        """The settings of the process that evaluates while the run goes on; by default there is none."""
        return EvaluationConfig()

    def updates_after(self, config: Config, frames: int, updates: int) -> int | None:
        """How many optimizer steps follow a batch; None if the recipe cannot tell, and has no plan.

        Args:
            config: of the run.
            frames: collected when the batch has arrived.
            updates: done before.
        """
        return None

    def updates_per_frame(self, config: Config) -> float:
        """Optimizer steps for each frame, in the long run and after the prefill; 0 if that is not known.

        Args:
            config: of the run.
        """
        per_batch = config.collector.frames_per_batch
        return (self.updates_after(config, per_batch, 0) or 0) / per_batch

    def prefill_frames(self) -> int:
        """How many frames come before the first optimizer step, and are not counted in the ratio."""
        return 0

    def update_facts(self) -> str:
        """What one optimizer step trains, and on what, in words; empty where that is plain."""
        return ""

    def goal(self) -> str:
        """What ends the run before all frames are collected, in words; empty if nothing does."""
        if self.target_return is None:
            return ""
        evaluation = self.evaluations()
        if self.stops_by_evaluation and evaluation.every_frames:
            return (
                f"at a mean return of {self.target_return:g} in a greedy evaluation over "
                f"{evaluation.episodes} episodes"
            )
        return f"at a mean return of {self.target_return:g} over {self.target_episodes} episodes"

    def variant(self) -> str:
        """What a run and the run that resumes it have in common: the name, unless one recipe has several."""
        return self.name

    def acts_on_clusters(self) -> bool:
        """Whether this recipe's workers may be on the nodes of a cluster."""
        return False


@dataclass
class PPOConfig(RecipeConfig):
    """Proximal policy optimisation (Schulman et al. 2017).

    ``target_return`` is that of greedy evaluations, where there are some.
    """

    stops_by_evaluation: ClassVar[bool] = True

    hidden: list[int] = field(default_factory=lambda: [64, 64])
    num_epochs: int = above_zero(4)
    gae_lambda: float = in_buffer(fraction(0.95), "lmbda")
    clip_epsilon: float = in_buffer(above_zero(0.2), "clip_epsilon")
    entropy_coeff: float = in_buffer(not_below_zero(0.0), "entropy_coeff")
    critic_coeff: float = in_buffer(not_below_zero(0.5), "critic_coeff")
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)

    def evaluations(self) -> EvaluationConfig:
        """See :meth:`RecipeConfig.evaluations`."""
        return self.evaluation

    def updates_after(self, config: Config, frames: int, updates: int) -> int:
        """See :meth:`RecipeConfig.updates_after`: some passes over the batch."""
        return self.num_epochs * math.ceil(config.collector.frames_per_batch / self.batch_size)

    def acts_on_clusters(self) -> bool:
        """See :meth:`RecipeConfig.acts_on_clusters`."""
        return True

    def errors(self, config: Config) -> Iterator[RlsyncError]:
        """See :meth:`RecipeConfig.errors`."""
        yield from width_errors("recipe.hidden", self.hidden)
        yield from stock_device_errors(config)


@dataclass
class Config:
    """One run.

    ``run_dir`` is the folder that receives receipts, metrics and the checkpoint; without one the run writes
    nothing. After Ctrl-C or SIGTERM, workers that hold the learner up for ``stop_within_s`` seconds are
    killed; null waits for them. ``resume`` is a run folder or a checkpoint folder to continue from.
    ``config_dir`` is the folder that ``--config-dir`` named: ``rlsync train`` fills it in, and
    ``rlsync eval`` looks there for the recipe. ``cluster`` says on which machines workers act.
    ``learner`` has the device of the networks that are trained, ``evaluation`` that of ``rlsync eval`` and of
    the evaluating process.
    """

    seed: int = not_below_zero(0)
    resume: str | None = None
    run_dir: str | None = None
    config_dir: str | None = None
    checkpoint_every_frames: int = above_zero(50_000)
    stop_within_s: float | None = above_zero(60.0)
    env: EnvConfig = field(default_factory=EnvConfig)
    collector: CollectorConfig = field(default_factory=CollectorConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    recipe: RecipeConfig = field(default_factory=PPOConfig)
    learner: DeviceConfig = field(default_factory=DeviceConfig)
    evaluation: DeviceConfig = field(default_factory=DeviceConfig)


def width_errors(key: str, layers: list[int]) -> Iterator[RlsyncError]:
    """One error if there is no layer, or a layer without units."""
    if not layers or min(layers) < 1:
        yield ConfigError(f"{key} cannot be {list(layers)}", key, "give widths, like [64,64]")


def errors(config: Config) -> Iterator[RlsyncError]:
    """All that is wrong with a config, as far as its values tell: no environment is made."""
    yield from bound_errors(config)
    yield from trigger_errors(config.sync.when)
    yield from map_errors(config.sync)
    yield from config.env.errors()
    yield from device_errors(config)
    yield from cluster_errors(config)
    yield from in_process_errors(config)
    yield from video_errors(config)
    kind = config.logger.kind
    if kind in LOGGER_PACKAGES and importlib.util.find_spec(kind) is None:
        yield ConfigError(f"{kind} is not installed", "logger.kind", f"pip install 'rlsync[{kind}]'")
    yield from config.recipe.errors(config)
    collector, steps = config.collector, config.collector.num_workers * config.env.num_envs
    if 0 < collector.frames_per_batch < steps:
        yield ConfigError(
            f"a batch of {collector.frames_per_batch} frames leaves some environments idle",
            "collector.frames_per_batch",
            f"give at least collector.num_workers x env.num_envs = {steps}",
        )


def check(config: Config) -> Config:
    """Refuse values that cannot work. Starts no process and makes no environment.

    Returns:
        The same config.

    Raises:
        ConfigError: names the key, its value and what it accepts.
        PathSyntaxError: a path of the sync map is not written in the grammar.
    """
    refuse(errors(config))
    return config
