"""The settings of a run, as plain dataclasses. Every default value is written here, and only here.

Those of environments, publishing and recipes stand beside what uses them. configs/*.yaml repeat the defaults
for people to read and copy, and a test compares the two.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from rlsync import ConfigError, RlsyncError
from rlsync.runs.evaluation.play import GIVE_UP_AFTER_S, GIVE_UP_AFTER_STEPS
from rlsync.runs.recipes import bounds
from rlsync.runs.recipes.env_settings import AtariConfig as AtariConfig
from rlsync.runs.recipes.env_settings import EnvConfig as EnvConfig
from rlsync.runs.recipes.env_settings import RenderedConfig as RenderedConfig
from rlsync.runs.recipes.lag import THIS_MACHINE, lag_in_words
from rlsync.runs.recipes.sync_settings import RouteConfig as RouteConfig
from rlsync.runs.recipes.sync_settings import SyncConfig as SyncConfig
from rlsync.runs.recipes.sync_settings import WhenConfig as WhenConfig

if TYPE_CHECKING:
    from typing_extensions import Self

#: Why a resumed run cannot change the fields that decide about a schedule.
SCHEDULE = "the checkpoint has a schedule of the learning rate, or has none"

#: Loggers that need a package of the same name, which the extra of the same name installs.
LOGGER_PACKAGES = ("tensorboard", "wandb")
#: ``mine = "my_package:make"``: ``make(exp_name=..., log_dir=..., **logger.kwargs)`` makes a TorchRL Logger.
LOGGERS = "rlsync.loggers"

BFLOAT16 = "bfloat16"

DeviceOrList = Any  #: what OmegaConf has no type for: the name of a device, or a list of names

#: seconds between two checkpoints at least, where a run says nothing of them
CHECKPOINT_REST_S = 30.0


@dataclass
class DeviceConfig:
    """The device on which a part of a run computes: ``cpu``, or an accelerator such as ``cuda:1``."""

    device: str = "cpu"


@dataclass
class CollectorConfig:
    """The workers, the devices on which they act, how they adopt weights from the board, and their lag."""

    #: Number of worker processes. Default: 2, for a machine with two cores. 0: there is no other process, and
    #: the learner's own acts between its updates, for a debugger or a notebook: the same run as with one
    #: worker and lag 0.
    num_workers: int = bounds.not_below_zero(2, most=1_000)
    #: Frames in one batch, from all workers together. Each recipe sets its own value; this is that of
    #: recipe=ppo. Give a multiple of num_workers x env.num_envs.
    frames_per_batch: int = bounds.kept(
        bounds.above_zero(2048), "schedules and triggers count batches of that size"
    )
    #: How many rollouts of each worker may be ahead of the learner. Rollout n of each worker acts with the
    #: version that is the newest when the learner has learned from the rollouts up to n-1-lag of all workers,
    #: and whoever is ahead waits: so two runs of one seed are the same. 0: workers wait for each update. 1:
    #: they act while the learner learns. null: nobody waits, and workers act with whatever is the newest.
    lag: int | None = bounds.not_below_zero(1)
    #: How a worker takes new weights from the board. alias (the default): it uses the memory of the board,
    #: and nothing is copied. copy: it copies them, for code that keeps the address of a parameter. Compiled
    #: policies always copy.
    adopt: str = bounds.one_of("alias", "copy")
    #: Seconds that all workers may take to start, most of which they make their environments. The run then
    #: ends, and names the worker that is not ready, and where it hangs. Default: five minutes.
    start_timeout_s: float = bounds.above_zero(300.0)
    #: Seconds after which the run ends if a worker gives no sign of life. Give more than the longest rollout
    #: takes. Default: five minutes. null: wait for ever. A worker that has died is started again, a few
    #: times, whatever stands here.
    silent_timeout_s: float | None = bounds.above_zero(300.0)
    #: The device on which a worker's policy acts: one for all workers, or a list with one for each, such as
    #: [cuda:0, cuda:1]. Environments stay on the CPU, and frames reach the learner through host memory.
    #: Default: cpu.
    device: DeviceOrList = "cpu"


@dataclass
class ClusterConfig:
    """The machines that workers act on: this one, or the nodes of a Ray cluster."""

    #: Where workers act: none, on this machine; ray, on the nodes of a Ray cluster.
    kind: str = bounds.one_of(THIS_MACHINE, "ray")
    #: HOST:PORT of the head node of a running cluster, of which this machine is a node; auto for one that was
    #: started on this machine. null: the run starts a Ray of its own on this machine, and ends it.
    address: str | None = None
    #: Worker processes on each node. null: collector.num_workers.
    workers_per_node: int | None = bounds.above_zero(None, most=1_000)
    #: What a node's agent takes of Ray's resources, by name, for example {rollouts: 1}. A node that has less
    #: gets no workers. By default every node gets some. Agents take no CPUs of Ray's; their workers use them
    #: nevertheless.
    resources: dict[str, Any] = field(default_factory=dict)
    #: Which nodes get workers: all, or others, which leaves the learner's node out.
    placement: str = bounds.one_of("all", "others")
    #: Number of nodes that must be there before the run begins. More may join at any time.
    min_nodes: int = bounds.above_zero(1)
    #: Rollouts of a node that may be on their way, or wait for the learner, at once. When these are used up
    #: and the node's slots are full, its workers wait.
    credits: int = bounds.above_zero(2)
    #: Seconds after which a node is given up if its agent gives no answer. The agent is then killed and
    #: started again.
    node_timeout_s: float = bounds.above_zero(30.0)
    #: Seconds that a node may take until its workers are ready.
    start_timeout_s: float = bounds.above_zero(300.0)

    @property
    def here(self) -> bool:
        return self.kind == THIS_MACHINE


@dataclass
class LoggerConfig:
    """Where metrics go, and the smallest number of frames between two points of a curve."""

    #: Where metrics go: csv, tensorboard, wandb, none, or a logger of an installed package.
    kind: str = bounds.one_of("csv", *LOGGER_PACKAGES, "none", group=LOGGERS)
    #: Smallest number of frames between two points of a curve. Default: 1, a point for every batch.
    every_frames: int = bounds.above_zero(1)
    #: More arguments for TorchRL's logger; by default there are none.
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass
class EvaluationConfig:
    """A separate process of low priority that evaluates one version after the other."""

    #: Least number of frames between two evaluations; 0: none. With a lag the learner waits for the one before,
    #: else versions are skipped while the process plays.
    every_frames: int = bounds.not_below_zero(0)
    #: Episodes in one evaluation, up to eight at once.
    episodes: int = bounds.above_zero(8)
    #: Every how many evaluations one is filmed, its first episode, as videos/version_NUMBER.gif; null: none.
    #: The best version so far is always filmed then, as best.gif. Needs rlsync[video].
    video_every: int | None = bounds.above_zero(None)
    #: Steps after which an episode counts as one that never ends. Evaluations then end with an error, and so
    #: does rlsync eval.
    give_up_after_steps: int = bounds.above_zero(GIVE_UP_AFTER_STEPS)
    #: Seconds in which no episode ends, after which the same is said. Default: half an hour.
    give_up_after_s: float = bounds.above_zero(GIVE_UP_AFTER_S)


@dataclass
class NormalizeConfig:
    """What is brought to unit spread, and how far a number may then lie from its mean."""

    #: Subtract the mean of all collected observations, and divide by their standard deviation: of each number, and
    #: of each pixel, for which every eighth step counts.
    observations: bool = bounds.kept(
        False, "the checkpoint has networks that see observations so, or not"
    )
    #: Divide rewards by the root of the mean of their squares.
    rewards: bool = bounds.kept(
        False, "the checkpoint has Q values of rewards that are scaled so, or not"
    )
    #: Largest distance from 0 of a normalised observation.
    clip: float = bounds.above_zero(10.0)

    @property
    def clip_of_observations(self) -> float | None:
        """Largest distance from 0 of an observation; None: they are not normalised."""
        return self.clip if self.observations else None

    def errors(self, config: Config) -> Iterator[RlsyncError]:
        """What is wrong with these settings beyond their bounds."""
        if self.observations and any(route.dtype for route in config.sync.map):
            problem = "workers that act in half precision would round the mean of an observation to three digits"
            cure = (
                "leave the dtype out of the sync map, or give recipe.normalize.observations=false"
            )
            yield ConfigError(problem, "sync.map and recipe.normalize.observations", cure)


@dataclass
class OnPolicyNormalizeConfig(NormalizeConfig):
    """The same for batches that are learned from once, with the law of Stable-Baselines3's VecNormalize."""

    #: Divide rewards by the standard deviation of the discounted returns of all environments so far: the law of
    #: VecNormalize in Stable-Baselines3. Reported returns are the environment's own.
    rewards: bool = bounds.kept(
        False, "the checkpoint has values of rewards that are scaled so, or not"
    )
    #: Largest distance from 0 of a normalised observation, and of a divided reward.
    clip: float = bounds.above_zero(10.0)


class Batches(NamedTuple):
    """How many steps each environment makes in a rollout, and how many rollouts make a batch."""

    steps: int
    rollouts: int


@dataclass
class RecipeConfig:
    """The settings that all recipes share.

    ``_recipe_`` says where the recipe lies, as ``module:OBJECT``, if it is neither rlsync's nor an installed
    package's; see ``docs/how_to/write_a_recipe.md``.
    """

    #: The name of the recipe. Choose it with recipe=..., which also sets its keys, and not here.
    name: str = "ppo"
    #: Frames to collect. At the latest, the batch that reaches them ends the run.
    total_frames: int = bounds.above_zero(150_000)
    #: The run ends when the newest greedy evaluation has this mean return; without evaluations, when the
    #: newest episodes have it. null: never. Which return is good depends on the environment: configs/tuned
    #: has those that are known.
    target_return: float | None = None
    #: Number of newest finished episodes in that mean, where there are no evaluations.
    target_episodes: int = bounds.above_zero(20)
    #: Learning rate of Adam at the start.
    lr: float = bounds.learning_rate(2e-3)
    #: Lower the learning rate linearly to a twentieth.
    anneal_lr: bool = bounds.kept(True, SCHEDULE)
    #: Discount: rewards a hundred steps ahead still count for a third.
    gamma: float = bounds.in_buffer(bounds.fraction(0.99), "gamma")
    #: Frames in one optimizer step, drawn from the replay buffer.
    batch_size: int = bounds.above_zero(128)
    #: Largest norm of the gradient.
    clip_norm: float = bounds.above_zero(0.5)
    #: Whether an update is compiled, which takes the first one half a minute or more, less where it was done
    #: before. auto: if a run on a CPU or CUDA, with a C++ compiler, has at least 50,000 updates; on; off.
    compile: str = bounds.one_of("auto", "on", "off")
    #: In which dtype losses are computed, float32 or bfloat16. Weights and the optimizer keep float32.
    update_dtype: str = bounds.one_of("float32", BFLOAT16)
    _recipe_: str | None = None

    #: Which of the keys compile and update_dtype its updates can serve.
    update_keys: ClassVar[tuple[str, ...]] = ()
    #: Whether ``target_return`` is that of evaluations, where there are some.
    stops_by_evaluation: ClassVar[bool] = False
    #: Whether workers act in ``update_dtype``, too.
    acts_in_update_dtype: ClassVar[bool] = False

    @classmethod
    def of(cls, config: Config) -> Self:
        """The recipe's settings in a config; ConfigError if they are those of another recipe."""
        if not isinstance(config.recipe, cls):
            problem = (
                f"this recipe takes the settings {cls.__name__}, got {type(config.recipe).__name__}"
            )
            raise ConfigError(problem, "recipe", f"give recipe={cls().name}")
        return config.recipe

    def errors(self, config: Config) -> Iterator[RlsyncError]:
        """What is wrong with these settings beyond their bounds; ``config`` is the whole run's."""
        yield from ()

    def evaluations(self) -> EvaluationConfig:
        """The settings of the process that evaluates meanwhile: the field ``evaluation``, if there is one."""
        evaluation = vars(self).get("evaluation")
        if isinstance(evaluation, EvaluationConfig):
            return evaluation
        return EvaluationConfig()

    def batches(self, config: Config) -> Batches:
        """What a batch is made of; by default, one rollout of each worker."""
        workers = config.workers_per_node
        if not config.cluster.here:
            workers *= config.cluster.min_nodes
        rollouts = max(1, workers)
        envs = rollouts * max(1, config.env.num_envs)
        return Batches(math.ceil(config.collector.frames_per_batch / envs), rollouts)

    def updates_after(self, config: Config, frames: int, updates: int) -> int | None:
        """How many optimizer steps follow a batch; None if the recipe cannot tell, and has no plan.

        ``frames`` are collected when the batch has arrived, and ``updates`` were done before.
        """
        return None

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
        mean = f"at a mean return of {self.target_return:g}"
        evaluation = self.evaluations()
        if self.stops_by_evaluation and evaluation.every_frames:
            return f"{mean} in a greedy evaluation over {evaluation.episodes} episodes"
        return f"{mean} over {self.target_episodes} episodes"

    def variant(self) -> str:
        """What a run and the run that resumes it have in common: the name, unless one recipe has several."""
        return self.name

    def says_which_batches(self) -> bool:
        """Whether :meth:`errors` says which numbers of frames make a batch; else whole rollouts do."""
        return False

    def ring_policy(self) -> str:
        """What workers do when the ring is full, because the learner is busy: a ``WhenFull``."""
        return "block"

    def population(self) -> int:
        """How many agents the run trains; one is a run like any other."""
        return 1

    def acts_on_clusters(self) -> bool:
        """Whether this recipe's workers may be on the nodes of a cluster."""
        return False


@dataclass
class ModelConfig:
    """How networks see pictures; numbers go through ``recipe.hidden``."""

    #: The convolutions that see pictures: nature (as in DQN) or impala (residual). auto: nature, and impala for
    #: pictures below 36 x 36.
    torso: str = bounds.one_of("auto", "nature", "impala")
    #: Widths of the dense layers behind the convolutions. null: [512] for nature, [256] for impala.
    hidden: list[int] | None = field(default=None, metadata=bounds.WIDTHS)
    #: Memory format of the convolutions.
    channels_last: bool = True


@dataclass
class OnPolicyModelConfig(ModelConfig):
    """The same, with an LSTM where a recipe learns from unrolls."""

    #: Units of an LSTM behind these layers, from which actions and values are computed; 0: none. A minibatch is
    #: then whole unrolls, so recipe.batch_size is a multiple of their steps.
    lstm: int = bounds.kept(
        bounds.not_below_zero(0), "the checkpoint has an LSTM of so many units, or none"
    )


@dataclass
class PPOConfig(RecipeConfig):
    """Proximal policy optimisation (Schulman et al. 2017)."""

    update_keys: ClassVar[tuple[str, ...]] = ("compile", "update_dtype")
    stops_by_evaluation: ClassVar[bool] = True

    # no checkpoint keeps it: advantages are computed with the config's
    gamma: float = bounds.fraction(0.99)
    #: Widths of the hidden layers. Actor and critic have such layers each, and share none.
    hidden: list[int] = field(default_factory=lambda: [64, 64], metadata=bounds.WIDTHS)
    #: What follows each hidden layer: tanh or relu.
    activation: str = bounds.one_of("tanh", "relu")
    #: Initial weights of these networks: orthogonal, with biases of 0 and small first actions, or torch's own.
    initial_weights: str = bounds.one_of("orthogonal", "torch")
    #: Logarithm of the scales of actions that are numbers, at the start: with 0 each is one.
    initial_log_scale: float = bounds.between(-5.0, 2.0, 0.0)
    #: Number of passes over each batch.
    num_epochs: int = bounds.above_zero(4)
    #: Lambda of generalised advantage estimation: 1 uses the returns alone, 0 the critic alone.
    gae_lambda: float = bounds.fraction(0.95)
    #: How far the probability ratio may move before it is clipped; 0.2 as in the paper.
    clip_epsilon: float = bounds.in_buffer(bounds.above_zero(0.2), "clip_epsilon")
    #: Whether the advantages of a minibatch lose their mean and are divided by their deviation, so that the step
    #: does not grow with the rewards.
    normalize_advantage: bool = False
    #: Weight of the entropy bonus; 0: none, since CartPole needs no more exploration than sampling gives.
    entropy_coeff: float = bounds.in_buffer(bounds.not_below_zero(0.0), "entropy_coeff")
    #: Weight of the critic's loss.
    critic_coeff: float = bounds.in_buffer(bounds.not_below_zero(0.5), "critic_coeff")
    model: OnPolicyModelConfig = field(default_factory=OnPolicyModelConfig)
    #: The critic's loss: smooth_l1, in which errors above one count as much as they are large, or l2, their
    #: squares, as in the paper and in Stable-Baselines3.
    critic_loss: str = bounds.one_of("smooth_l1", "l2")
    #: Observations and rewards in units of their own spread. The statistics of the observations are part of
    #: the networks and travel with the weights, so that a version always acts with its own.
    normalize: OnPolicyNormalizeConfig = field(default_factory=OnPolicyNormalizeConfig)
    #: A separate process of low priority that plays greedily while the run goes on. It writes evaluations.csv
    #: and best.pt.
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)

    def errors(self, config: Config) -> Iterator[RlsyncError]:
        yield from super().errors(config)
        yield from self.normalize.errors(config)
        if self.model.lstm:
            yield from self._lstm_errors(config)

    def _lstm_errors(self, config: Config) -> Iterator[RlsyncError]:
        """What a network with an LSTM, and updates that learn from whole unrolls, cannot do."""
        cannot = (
            ("compile", self.compile == "on", "auto or off"),
            ("update_dtype", self.update_dtype == BFLOAT16, "float32"),
            ("activation", self.activation != "tanh", "tanh"),
            ("initial_weights", self.initial_weights != "orthogonal", "orthogonal"),
        )
        for key, is_asked, cure in cannot:
            if is_asked:
                problem = f"ppo with an LSTM cannot serve recipe.{key}"
                where = f"recipe.model.lstm={self.model.lstm}, recipe.{key}"
                yield ConfigError(
                    problem, where, f"give recipe.{key}={cure}; or recipe.model.lstm=0"
                )
        steps = self.batches(config).steps
        if self.batch_size % steps:
            near = max(1, self.batch_size // steps) * steps
            problem = (
                f"minibatches of {self.batch_size} frames are not whole unrolls of {steps} steps"
            )
            cure = f"give a multiple of {steps}, like {near}; with more environments unrolls are shorter"
            where = f"recipe.model.lstm={self.model.lstm}, recipe.batch_size"
            yield ConfigError(problem, where, cure)

    def updates_after(self, config: Config, frames: int, updates: int) -> int:
        return self.num_epochs * math.ceil(config.collector.frames_per_batch / self.batch_size)

    def acts_on_clusters(self) -> bool:
        return True


#: The numbers by which a sweeper may compare runs: see ``Config.objective``.
AUTO = "auto"
BEST = "best"
RETURN = "return"
FRAMES_TO_TARGET = "-frames_to_target"
SECONDS_TO_TARGET = "-seconds_to_target"


@dataclass
class Config:
    """One run. Built in Python without a ``run_dir`` it writes nothing.

    ``cluster`` says on which machines workers act. ``learner`` has the device of the networks that are
    trained, ``evaluation`` that of ``rlsync eval`` and of the evaluating process.
    """

    #: Seeds torch, numpy, and every worker's environments; the same by default, so that a run can be
    #: repeated.
    seed: int = bounds.not_below_zero(0)
    #: A run folder or a checkpoint folder to resume from; null: start anew. All other keys then have the
    #: values of that run's config.yaml; give only those that you want to change. auto: the folder run_dir, if it
    #: has a checkpoint, else start anew there. See docs/how_to/resume.md.
    resume: str | None = None
    #: How often the run is started again from its checkpoint when something kills it: the kernel's memory killer,
    #: or a crash in native code. It needs a run_dir. An error that ends the run by itself does not start it again.
    restarts: int = bounds.not_below_zero(0)
    #: The folder for receipts.jsonl, metrics, the checkpoint and config.yaml; null: a new one, see
    #: hydra.run.dir below.
    run_dir: str | None = None
    #: Leave this null. rlsync train writes the folder of --config-dir here, so that rlsync eval finds a
    #: recipe of yours.
    config_dir: str | None = None
    #: Frames between two checkpoints; null: a twentieth of recipe.total_frames, and with collector.lag at least
    #: 10,000 steps of each environment, else at least half a minute. With collector.lag a life ends at each.
    #: One is also written at the end of a run, also if it ends by Ctrl-C, SIGTERM, a lost worker or another
    #: error. Only a run that is killed (SIGKILL) loses frames: at most this many.
    checkpoint_every_frames: int | None = bounds.above_zero(None)
    #: After so many frames the workers end, and the run goes on from its checkpoint with new ones: in another
    #: life, at which rlsync rerun --from can begin. null: one life.
    life_frames: int | None = bounds.above_zero(None)
    #: Seconds after Ctrl-C or SIGTERM until worker processes that hold the learner up, because they are
    #: stopped or hang in an environment, are killed; the run then ends as ever, with a checkpoint. Their last
    #: rollout is lost. Longer than a batch takes to be collected, or a first update compiled. null: wait
    #: for them until collector.silent_timeout_s.
    stop_within_s: float | None = bounds.above_zero(60.0)
    #: What a run returns to a sweeper that chooses values by it: best (mean return of the best evaluation), return
    #: (of the newest training episodes), -frames_to_target or -seconds_to_target (until recipe.target_return).
    #: auto: best, else return. The larger, the better: let the sweeper maximise. A run without it has failed.
    objective: str = bounds.one_of(AUTO, BEST, RETURN, FRAMES_TO_TARGET, SECONDS_TO_TARGET)
    env: EnvConfig = field(default_factory=EnvConfig)
    collector: CollectorConfig = field(default_factory=CollectorConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    recipe: RecipeConfig = field(default_factory=PPOConfig)
    learner: DeviceConfig = field(default_factory=DeviceConfig)
    evaluation: DeviceConfig = field(default_factory=DeviceConfig)

    def lag_facts(self) -> str:
        """How old the weights are that workers act with, in words."""
        return lag_in_words(self.collector.lag, in_process=self.in_process)

    def __post_init__(self) -> None:
        # Relative paths mean the working directory of now: an environment may change it later.
        if self.run_dir is not None:
            self.run_dir = str(Path(self.run_dir).absolute())
        if self.resume is not None:
            self.resume = str(Path(self.resume).absolute())

    @property
    def frames_between_checkpoints(self) -> int:
        return self.life_length or self.checkpoint_every_frames or self._twentieth

    @property
    def _twentieth(self) -> int:
        return max(1, self.recipe.total_frames // 20)

    @property
    def life_length(self) -> int | None:
        """The frames of a life of a run that its seed decides: of whole batches, to which all workers give alike.

        None: nothing decides when its workers adopt.
        """
        if not (self.in_process or (self.cluster.here and self.collector.lag is not None)):
            return None
        batches = self.recipe.batches(self)
        workers = self.workers_per_node
        frames = self.checkpoint_every_frames
        if frames is None:
            least = LEAST_STEPS_OF_A_LIFE * self.env.num_envs * workers
            frames = max(least, self._twentieth)
        alike = batches.steps * self.env.num_envs * math.lcm(batches.rollouts, workers)
        return math.ceil(frames / alike) * alike

    @property
    def in_process(self) -> bool:
        """Whether the learner's own process acts, and there is no other."""
        return self.cluster.here and self.collector.num_workers == 0

    @property
    def workers_per_node(self) -> int:
        """How many workers act on each machine; the learner's own process is one."""
        here = max(1, self.collector.num_workers)
        if self.cluster.here:
            return here
        return self.cluster.workers_per_node or here


#: Of each environment, unless the config says how long a life is: at its end an episode may be broken off.
LEAST_STEPS_OF_A_LIFE = 10_000
