"""Where a run's workers are, and the collectors that they make there: processes here, or on a cluster."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from tensordict.nn import TensorDictModuleBase
from torchrl.collectors import BaseCollector, MultiSyncCollector
from torchrl.data import Unbounded
from torchrl.envs import EnvBase, TensorDictPrimer
from torchrl.trainers import Trainer

from rlsync import BoardScheme, Forkserver, Rerun
from rlsync.core.schedule import FixedLag
from rlsync.recipes.env_settings import EnvConfig
from rlsync.recipes.networks import workers_policy
from rlsync.recipes.run import Run
from rlsync.recipes.run_files import VERSIONS
from rlsync.recipes.settings import IN_PROCESS
from rlsync.recipes.spaces import Maker, make_env, making, naming_env
from rlsync.torchrl_plugin.compat.collectors import SeededCollector, WaitingAsyncCollector
from rlsync.workers.collector import UnrollCollector
from rlsync.workers.devices import CPU
from rlsync.workers.player import Player
from rlsync.workers.players.q import EpsilonLadder
from rlsync.workers.players.torchrl_policy import EXPONENT
from rlsync.workers.repeated import RepeatedUnrolls
from rlsync.workers.rollout_collector import RolloutCollector

_COLLECTORS = {"sync": MultiSyncCollector, "async": WaitingAsyncCollector}


class Here:
    """Workers on this machine, or none: then the learner's process acts. A run has it, or a ``Cluster``."""

    def __init__(self, run: Run[Any]) -> None:
        #: What TorchRL's PPOTrainer must be told to publish, though SyncWeights publishes in its place.
        self.update_map: dict[str, str] | None = {"policy": "loss_module.actor_network"}
        self._run = run
        self._settings = run.config.collector
        self.workers = self._settings.num_workers  #: on each machine

    def transitions(
        self, policy: TensorDictModuleBase, *, random_frames: int, ladder: EpsilonLadder | None, maker: Maker
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
        again = run.again if settings.kind == "async" else None  # others are the same with every run
        scheme = BoardScheme(
            adopt,
            start_timeout_s=settings.start_timeout_s,
            silent_timeout_s=settings.silent_timeout_s,
            transport=settings.transport,
            _board=None if again is None else Rerun(again).board,
        )
        if (versions_file := run.file(VERSIONS)) is not None:
            scheme.board.ledger.reserve_in(versions_file)  # the first one is published when workers start
        with naming_env(env), Forkserver(preload=[__name__]):
            return _COLLECTORS[settings.kind](
                makers,
                acting,
                **common,
                **_devices(run.worker_devices),
                num_sub_threads=1,
                weight_sync_schemes={"policy": scheme},
            )

    def unrolls(self, player: Player, *, when_full: Any, **shared: Any) -> RolloutCollector:
        """Start workers of unrolls; ``when_full`` is for here, ``shared`` are arguments of clusters, too."""
        env, lag = self._run.config.env, self._settings.lag
        computed = None if lag is None else FixedLag(lag, self.workers, shared["rollouts_per_batch"])
        life = self._run.again or computed
        make = UnrollCollector if life is None else partial(RepeatedUnrolls, life=life, lag=lag or 0)
        with naming_env(env):
            return make(
                player,
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
    maker: Maker = make_env,
) -> Iterator[BaseCollector]:
    """Worker processes, here or on a cluster, that act with ``policy`` and adopt weights from a board. With
    ``collector.kind=in_process`` the learner's process acts with ``policy`` itself, and there is no board.

    Policies act on the devices that the config names; environments step on the CPU, and frames arrive in host
    memory. Processes are started from a fork server, unless the program chose ``fork``. They keep running
    after the ``with`` block; if it raises, they are shut down. They take random actions in the first
    ``random_frames`` frames. With a ``ladder`` the environments of each worker have an
    ``exploration_exponent`` by it. ``maker`` makes those of a worker on this machine. ConfigError if an
    environment cannot be made or a cluster cannot be used; WorkerLost or AdoptionTimeout if workers did not
    start.
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
