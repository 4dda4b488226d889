"""The settings of a run, as plain dataclasses. Every default value is written here, and only here.

The settings of environments, of publishing and of each recipe stand beside what uses them. The command line
fills all of them from configs/*.yaml and overrides; in Python they are built directly. The YAML files repeat
the defaults for people to read and copy, and a test compares the two. The defaults of :class:`Config` train
PPO on CartPole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

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
from rlsync.recipes.env_settings import AtariConfig, EnvConfig, RenderedConfig
from rlsync.recipes.sync_settings import RouteConfig, SyncConfig, WhenConfig

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "AtariConfig",
    "ClusterConfig",
    "CollectorConfig",
    "Config",
    "DeviceConfig",
    "EnvConfig",
    "EvaluationConfig",
    "LoggerConfig",
    "PPOConfig",
    "RecipeConfig",
    "RenderedConfig",
    "RouteConfig",
    "SyncConfig",
    "WhenConfig",
]

#: Why a resumed run cannot change the fields that decide about a schedule.
SCHEDULE = "the checkpoint has a schedule of the learning rate, or has none"

#: Loggers that need a package of the same name, which the extra of the same name installs.
LOGGER_PACKAGES = ("tensorboard", "wandb")

#: What OmegaConf has no type for: the name of a device, or a list of names.
DeviceOrList = Any

#: The kind of collector that acts in the learner's process.
IN_PROCESS = "in_process"

#: What ``cluster.kind`` says where all workers are on this machine.
THIS_MACHINE = "none"


@dataclass
class DeviceConfig:
    """The device on which a part of a run computes: ``cpu``, or an accelerator such as ``cuda:1``."""

    device: str = "cpu"


@dataclass
class CollectorConfig:
    """The worker processes, the devices on which they act, and how they adopt weights from the board.

    ``device`` is one device for all workers, or a list with one for each. With the kind ``in_process`` there
    is no worker process: the learner's own process acts, with the learner's own weights.
    """

    kind: str = one_of("sync", "async", IN_PROCESS)
    num_workers: int = above_zero(2)
    frames_per_batch: int = kept(above_zero(2048), "schedules and triggers count batches of that size")
    adopt: str = one_of("alias", "copy")
    start_timeout_s: float = above_zero(300.0)
    silent_timeout_s: float | None = above_zero(300.0)
    device: DeviceOrList = "cpu"


@dataclass
class ClusterConfig:
    """The machines that workers act on: this one, or the nodes of a Ray cluster.

    ``address`` is ``HOST:PORT`` of a running cluster, or null for a Ray on this machine.
    ``workers_per_node`` is null where each node has ``collector.num_workers``. ``resources`` is what an agent
    takes of Ray's resources; nodes that have less get no workers. With ``keep_agents`` agents outlive a
    learner that was killed, and wait for the one that resumes its run.
    """

    kind: str = one_of(THIS_MACHINE, "ray")
    address: str | None = None
    workers_per_node: int | None = above_zero(None)
    resources: dict[str, Any] = field(default_factory=dict)
    placement: str = one_of("all", "others")
    min_nodes: int = above_zero(1)
    credits: int = above_zero(2)
    node_timeout_s: float = above_zero(30.0)
    start_timeout_s: float = above_zero(300.0)
    keep_agents: bool = False
    learner_timeout_s: float = above_zero(600.0)

    @property
    def here(self) -> bool:
        """Whether all workers are on this machine."""
        return self.kind == THIS_MACHINE


@dataclass
class LoggerConfig:
    """Where metrics go, and the smallest number of frames between two points of a curve.

    ``kwargs`` are further arguments of TorchRL's logger class; its other arguments are the run's folder.
    """

    kind: str = one_of("csv", *LOGGER_PACKAGES, "none")
    every_frames: int = above_zero(1)
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass
class EvaluationConfig:
    """A separate process of low priority that evaluates one version after the other.

    ``every_frames`` is the least number of training frames between two evaluations; 0 turns evaluation off.
    Each evaluation plays ``episodes`` episodes, up to eight at once. Every ``video_every`` evaluations, and
    whenever a version is the best so far, the first episode is filmed; None films none.
    """

    every_frames: int = not_below_zero(0)
    episodes: int = above_zero(8)
    video_every: int | None = above_zero(None)


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
    #: Whether workers act with a policy of TorchRL's in its collectors, which serve not every device.
    in_stock_collectors: ClassVar[bool] = False

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
    in_stock_collectors: ClassVar[bool] = True

    hidden: list[int] = field(default_factory=lambda: [64, 64], metadata=WIDTHS)
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

    @property
    def workers_per_node(self) -> int:
        """How many workers each machine has."""
        own = None if self.cluster.here else self.cluster.workers_per_node
        return own or self.collector.num_workers
