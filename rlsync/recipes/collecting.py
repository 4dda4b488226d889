"""The collector of a recipe: worker processes here or on a cluster, or the learner's own process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from tensordict.nn import TensorDictModuleBase
from torchrl.collectors import BaseCollector, MultiAsyncCollector, MultiSyncCollector
from torchrl.envs import EnvBase

from rlsync import BoardScheme, Forkserver
from rlsync.recipes.networks import workers_policy
from rlsync.recipes.off_policy.ladder import env_makers
from rlsync.recipes.run import learner_device, worker_devices
from rlsync.recipes.settings import IN_PROCESS, Config, EnvConfig
from rlsync.recipes.spaces import Spaces, make_env, making, naming_env, probe
from rlsync.torchrl_plugin.compat.collectors import SeededCollector
from rlsync.workers.devices import CPU

_COLLECTORS = {"sync": MultiSyncCollector, "async": MultiAsyncCollector}


@contextmanager
def started_collector(
    config: Config,
    policy: TensorDictModuleBase,
    *,
    random_frames: int = 0,
    ladder_alpha: float = 0.0,
    spaces: Spaces | None = None,
    maker: Callable[[EnvConfig], EnvBase] = make_env,
) -> Iterator[BaseCollector]:
    """Worker processes, here or on a cluster, that act with ``policy`` and adopt its weights from a board.

    With ``collector.kind=in_process`` there is no other process and no board: the learner's process acts with
    ``policy`` itself.

    Policies act on the devices that the config names. Environments step on the CPU, and frames arrive in
    host memory. The processes are started from a fork server, unless the program chose ``fork``. They keep
    running after the ``with`` block. If the block raises, they are shut down.

    Args:
        config: of the run.
        policy: what the workers act with.
        random_frames: they take random actions in so many frames first.
        ladder_alpha: above 0, the environments of each worker have an ``exploration_exponent``; see
            :class:`~rlsync.workers.players.q.EpsilonLadder`.
        spaces: of the environment; a cluster needs them.
        maker: makes the environments of a worker on this machine.
    """
    if config.cluster.here:
        workers = config.collector.num_workers
        makers = env_makers(config.env, ladder_alpha, workers) if ladder_alpha else None
        collector = _stock_collector(
            config, policy, random_frames, makers or [partial(maker, config.env)] * workers
        )
    else:
        from rlsync.recipes.on_cluster import transition_collector  # which needs ray

        collector = transition_collector(
            config,
            workers_policy(config, policy),
            spaces or probe(config.env),
            random_frames=random_frames,
            ladder_alpha=ladder_alpha,
        )
    try:
        yield collector
    except BaseException:
        collector.shutdown()
        raise


def _stock_collector(
    config: Config,
    policy: TensorDictModuleBase,
    random_frames: int,
    makers: Sequence[Callable[[], EnvBase]],
) -> BaseCollector:
    settings = config.collector
    common: dict[str, Any] = {
        "frames_per_batch": settings.frames_per_batch,
        "total_frames": -1,  # the trainer counts
        "init_random_frames": random_frames,
    }
    acting = workers_policy(config, policy)
    if settings.kind == IN_PROCESS:
        devices = {name: each[0] for name, each in _devices([learner_device(config)]).items()}
        with making(config.env):
            return SeededCollector(makers[0], acting, **common, **devices, track_policy_version=True)
    adopt: Any = settings.adopt
    board = BoardScheme(adopt, start_timeout_s=settings.start_timeout_s)
    with naming_env(config.env), Forkserver(preload=[__name__]):
        collector: BaseCollector = _COLLECTORS[settings.kind](
            makers,
            acting,
            **common,
            **_devices(worker_devices(config)),
            num_sub_threads=1,
            weight_sync_schemes={"policy": board},
        )
    return collector


def _devices(of_workers: Sequence[torch.device]) -> dict[str, list[torch.device | None]]:
    """TorchRL's arguments. With a CPU named it would move the learner's own weights to shared memory."""
    acting = [None if device == CPU else device for device in of_workers]
    beside = [None if device is None else CPU for device in acting]
    return {"policy_device": acting, "env_device": beside, "storing_device": beside}
