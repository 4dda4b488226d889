"""One run: its config, what follows from it, each derived once, and where its workers are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import torch
from tensordict.nn import TensorDictModuleBase
from torchrl.collectors import BaseCollector, MultiAsyncCollector, MultiSyncCollector
from torchrl.data import Unbounded
from torchrl.envs import EnvBase, TensorDictPrimer
from torchrl.trainers import Trainer

from rlsync import BoardScheme, Forkserver
from rlsync.recipes.env_settings import EnvConfig
from rlsync.recipes.networks import workers_policy
from rlsync.recipes.run_files import VERSIONS
from rlsync.recipes.settings import IN_PROCESS, Config, RecipeConfig
from rlsync.recipes.spaces import make_env, making, naming_env
from rlsync.torchrl_plugin.compat.collectors import SeededCollector
from rlsync.workers.collector import UnrollCollector
from rlsync.workers.devices import CPU, device_named, device_of_each
from rlsync.workers.player import Playable
from rlsync.workers.players.q import EpsilonLadder
from rlsync.workers.players.torchrl_policy import EXPONENT
from rlsync.workers.rollout_collector import RolloutCollector

if TYPE_CHECKING:
    from rlsync.recipes.on_cluster import Cluster

S = TypeVar("S", bound=RecipeConfig)


class Run(Generic[S]):
    """A checked config, the ``spaces`` that the recipe's probe found, and what follows from the two. What is
    derived is derived when it is asked for first: a machine that only evaluates needs no device of the
    learner. ConfigError when a device is asked for that this machine does not have.
    """

    def __init__(self, config: Config, spaces: Any = None) -> None:
        self.config = config
        self.recipe: S = config.recipe  # type: ignore[assignment]
        self.spaces = spaces
        self.folder = None if config.run_dir is None else Path(config.run_dir)

    def file(self, name: str) -> Path | None:
        """The file of this name in the run's folder; None where the run writes nothing."""
        return None if self.folder is None else self.folder / name

    def seed_everything(self) -> None:
        """Seed torch and numpy here; workers are seeded by the trainer through their collector."""
        torch.manual_seed(self.config.seed)
        np.random.seed(self.config.seed % 2**32)

    @cached_property
    def device(self) -> torch.device:
        """The learner's: where the networks, the loss, the optimizer and TorchRL's replay buffer are."""
        return device_named(self.config.learner.device, "learner.device")

    @cached_property
    def worker_devices(self) -> tuple[torch.device, ...]:
        """Where the policy of each worker of a machine acts."""
        each = self.config.collector.device
        return device_of_each(each, self.config.workers_per_node, "collector.device")

    @cached_property
    def evaluation_device(self) -> torch.device:
        """Where ``rlsync eval`` and the evaluating process play."""
        return device_named(self.config.evaluation.device, "evaluation.device")

    @cached_property
    def place(self) -> Here | Cluster:
        """Where the workers are: on this machine, or on the nodes of a cluster."""
        if self.config.cluster.here:
            return Here(self)
        from rlsync.recipes.on_cluster import Cluster  # which needs ray

        return Cluster(self)


_COLLECTORS = {"sync": MultiSyncCollector, "async": MultiAsyncCollector}


class Here:
    """Workers on this machine, or none: with ``collector.kind=in_process`` the learner's process acts."""

    def __init__(self, run: Run[Any]) -> None:
        #: What TorchRL's PPOTrainer must be told to publish, though SyncWeights publishes in its place.
        self.update_map: dict[str, str] | None = {"policy": "loss_module.actor_network"}
        self._run = run
        self._settings = run.config.collector
        self.workers = self._settings.num_workers  #: on each machine

    def transitions(
        self,
        policy: TensorDictModuleBase,
        *,
        random_frames: int,
        ladder: EpsilonLadder | None,
        maker: Callable[[EnvConfig], EnvBase],
    ) -> BaseCollector:
        """Start workers that act with a policy of TorchRL's; see :func:`started_collector`."""
        run, settings, env = self._run, self._settings, self._run.config.env
        makers = [partial(maker, env)] * self.workers
        if ladder is not None:
            rungs = [ladder.exponent(worker, self.workers) for worker in range(self.workers)]
            makers = [partial(make_env_on_rung, env, rung) for rung in rungs]
        common: dict[str, Any] = {
            "frames_per_batch": settings.frames_per_batch,
            "total_frames": -1,  # the trainer counts
            "init_random_frames": random_frames,
        }
        acting = workers_policy(run.config.sync, policy)
        if settings.kind == IN_PROCESS:
            devices = {name: each[0] for name, each in _devices([run.device]).items()}
            with making(env):
                return SeededCollector(makers[0], acting, **common, **devices, track_policy_version=True)
        adopt: Any = settings.adopt
        board = BoardScheme(
            adopt, start_timeout_s=settings.start_timeout_s, silent_timeout_s=settings.silent_timeout_s
        )
        if (versions_file := run.file(VERSIONS)) is not None:
            board.board.ledger.reserve_in(versions_file)  # the first one is published when workers start
        with naming_env(env), Forkserver(preload=[__name__]):
            collector: BaseCollector = _COLLECTORS[settings.kind](
                makers,
                acting,
                **common,
                **_devices(run.worker_devices),
                num_sub_threads=1,
                weight_sync_schemes={"policy": board},
            )
        return collector

    def unrolls(self, network: Playable, *, when_full: Any, **shared: Any) -> RolloutCollector:
        """Start workers that make unrolls. ``when_full``: what they do if no slot is free."""
        env = self._run.config.env
        with naming_env(env):
            return UnrollCollector(
                network,
                env.spec(),
                num_workers=self.workers,
                policy_device=self._run.worker_devices,
                when_full=when_full,
                start_timeout_s=self._settings.start_timeout_s,
                versions_file=self._run.file(VERSIONS),
                **shared,
            )

    def routes(self, collector: BaseCollector) -> dict[str, str]:
        """What is published besides the sync map of the config."""
        return {}

    def watch(self, trainer: Trainer) -> None:
        """Nothing: a board watches its workers, and so does a ring's collector."""


@contextmanager
def started_collector(
    run: Run[Any],
    policy: TensorDictModuleBase,
    *,
    random_frames: int = 0,
    ladder: EpsilonLadder | None = None,
    maker: Callable[[EnvConfig], EnvBase] = make_env,
) -> Iterator[BaseCollector]:
    """Worker processes, here or on a cluster, that act with ``policy`` and adopt its weights from a board.

    With ``collector.kind=in_process`` there is no other process and no board: the learner's process acts with
    ``policy`` itself.

    Policies act on the devices that the config names. Environments step on the CPU, and frames arrive in
    host memory. The processes are started from a fork server, unless the program chose ``fork``. They keep
    running after the ``with`` block. If the block raises, they are shut down.

    They take random actions in the first ``random_frames`` frames. With a ``ladder`` the environments of
    each worker have an ``exploration_exponent`` by it. ``maker`` makes those of a worker on this machine.

    ConfigError if an environment cannot be made or a cluster cannot be used; WorkerLost or AdoptionTimeout if
    workers did not start.
    """
    collector = run.place.transitions(policy, random_frames=random_frames, ladder=ladder, maker=maker)
    try:
        yield collector
    except BaseException:
        collector.shutdown()
        raise


def make_env_on_rung(config: EnvConfig, exponent: float) -> EnvBase:
    """The environments of one worker, which add ``exploration_exponent`` to each observation."""
    rung = TensorDictPrimer(primers={EXPONENT: Unbounded((1,))}, default_value=exponent, expand_specs=True)
    return make_env(config).append_transform(rung)


def _devices(of_workers: Sequence[torch.device]) -> dict[str, list[torch.device | None]]:
    """TorchRL's arguments. With a CPU named it would move the learner's own weights to shared memory."""
    acting = [None if device == CPU else device for device in of_workers]
    beside = [None if device is None else CPU for device in acting]
    return {"policy_device": acting, "env_device": beside, "storing_device": beside}
