"""The parts that all recipes are built from."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn, optim
from torchrl.checkpoint import Checkpoint
from torchrl.collectors import BaseCollector, Collector, MultiAsyncCollector, MultiSyncCollector
from torchrl.envs import EnvBase
from torchrl.modules import MLP
from torchrl.trainers import Trainer

from rlsync import BoardScheme, DreamerPlayer, Forkserver, LogReceipts, SyncWeights, WatchWorkers
from rlsync.recipes.checkpoint_player import CheckpointPlayer
from rlsync.recipes.cluster_config import THIS_MACHINE
from rlsync.recipes.collector_config import IN_PROCESS
from rlsync.recipes.config import Config, EnvConfig, sync_map, trigger
from rlsync.recipes.device_config import learner_device, worker_devices
from rlsync.recipes.hooks import (
    Bottleneck,
    EpisodeReturns,
    StalenessHistogram,
    StatisticsHook,
    StopIfNotFinite,
)
from rlsync.recipes.loggers import make_logger
from rlsync.recipes.off_policy.ladder import env_makers
from rlsync.recipes.random_state import RandomState
from rlsync.recipes.run_files import CHECKPOINT, RECEIPTS, STALENESS
from rlsync.recipes.spaces import Spaces, make_env, making, naming_env, probe
from rlsync.tensors.layout import dtype_named
from rlsync.transport.ring.watch import RingCounters
from rlsync.workers.devices import CPU
from rlsync.workers.envs.specs import GymnasiumEnvs
from rlsync.workers.players.torchrl_policy import PolicyPlayer
from rlsync.workers.rollout_collector import RolloutCollector

__all__ = [
    "MixedMLP",
    "Spaces",
    "annealing",
    "make_env",
    "making",
    "mlp",
    "naming_env",
    "policy_player",
    "probe",
    "register_hooks",
    "register_sync",
    "seed_everything",
    "started_collector",
    "trainer_settings",
    "workers_dtype",
    "workers_policy",
]

#: LogReceipts' name in checkpoints, which older checkpoints have, too: TorchRL refuses one that lacks it.
_RECEIPTS_KEY = "sync_metrics"
_COLLECTORS = {"sync": MultiSyncCollector, "async": MultiAsyncCollector}


def seed_everything(seed: int) -> None:
    """Seed torch and numpy here; workers are seeded by the trainer through their collector."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)


class MixedMLP(MLP):
    """An MLP that computes in the dtype of its weights and returns float32."""

    def forward(self, *inputs: Tensor) -> Tensor:
        """See :class:`torchrl.modules.MLP`."""
        dtype = self[0].weight.dtype  # functional calls put plain tensors in the parameters' place
        return super().forward(*(tensor.to(dtype) for tensor in inputs)).float()


def mlp(
    features: int,
    outputs: int,
    hidden: list[int],
    *,
    last_gain: float,
    activation: type[nn.Module] = nn.Tanh,
) -> MixedMLP:
    """A network with orthogonal weights. A small ``last_gain`` makes its first outputs small."""
    net = MixedMLP(in_features=features, out_features=outputs, num_cells=hidden, activation_class=activation)
    layers = [layer for layer in net if isinstance(layer, nn.Linear)]
    for layer in layers:
        nn.init.orthogonal_(layer.weight, 2**0.5)
        nn.init.zeros_(layer.bias)
    nn.init.orthogonal_(layers[-1].weight, last_gain)
    return net


def workers_dtype(config: Config) -> torch.dtype | None:
    """The dtype in which workers hold their networks, if the sync map declares one."""
    return next((dtype_named(route.dtype) for route in config.sync.map if route.dtype), None)


def workers_policy(config: Config, policy: TensorDictModuleBase) -> TensorDictModuleBase:
    """What workers act with: ``policy``, or a copy whose networks have the dtype that the map declares."""
    dtype = workers_dtype(config)
    if dtype is None:
        return policy
    policy = copy.deepcopy(policy)
    for module in policy.modules():
        if isinstance(module, MixedMLP):
            module.to(dtype)
    return policy


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
    if config.cluster.kind == THIS_MACHINE:
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
            return Collector(makers[0], acting, **common, **devices, track_policy_version=True)
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


def annealing(config: Config, optimizer: optim.Optimizer) -> optim.lr_scheduler.LRScheduler | None:
    """A schedule that lowers the learning rate linearly to a twentieth over all frames, if asked for."""
    if not config.recipe.anneal_lr:
        return None
    batches = max(1, config.recipe.total_frames // config.collector.frames_per_batch)
    return optim.lr_scheduler.LambdaLR(optimizer, lambda batch: max(1 - batch / batches, 0.05))


def trainer_settings(config: Config) -> dict[str, Any]:
    """The arguments that every stock trainer takes, from one config."""
    run_dir = config.run_dir
    return {
        "total_frames": config.recipe.total_frames,
        "frame_skip": 1,
        "seed": config.seed,
        "clip_grad_norm": True,
        "clip_norm": config.recipe.clip_norm,
        "progress_bar": False,
        "logger": make_logger(config),
        "log_interval": config.logger.every_frames - 1,  # TorchRL logs when MORE frames have passed
        "save_trainer_interval": config.checkpoint_every_frames,
        "save_trainer_file": None if run_dir is None else Path(run_dir) / CHECKPOINT,
        "checkpoint": Checkpoint(rng=RandomState()),
    }


def register_hooks(trainer: Trainer, config: Config, *, stop_at_return: bool = True) -> EpisodeReturns:
    """Register the hooks that every recipe on stock collectors has, and on transitions from a cluster.

    They publish by the config's sync map, log returns and publishes, watch the workers (on a cluster, tell of
    its nodes), and end the run before a step with a loss or a gradient that is not finite.

    Args:
        trainer: of the recipe.
        config: of the run.
        stop_at_return: end the run when the returns of its own episodes reach ``recipe.target_return``.

    Returns:
        The hook that logs returns, and that can end the run.
    """
    collector = trainer.collector
    register_sync(trainer, config, collector.counters if isinstance(collector, RolloutCollector) else None)
    target = config.recipe.target_return if stop_at_return else None
    returns = EpisodeReturns(target, config.recipe.target_episodes)
    returns.register(trainer)
    if config.cluster.kind == THIS_MACHINE:
        if config.collector.kind != IN_PROCESS:
            WatchWorkers(config.collector.silent_timeout_s).register(trainer)
    else:
        from rlsync.recipes.on_cluster import tell_nodes  # which needs ray

        tell_nodes(trainer, config, collector)
    return returns


def register_sync(
    trainer: Trainer, config: Config, counters: Callable[[], RingCounters] | None = None
) -> SyncWeights:
    """Register what every recipe has, whatever its collector.

    That is the hook that publishes by the config's sync map, those that log what publishing cost, how old
    the frames were and who waited for whom, the one that writes the run's statistics, and the one that ends
    the run before a step that is not finite.

    Args:
        trainer: the trainer.
        config: of the run.
        counters: of the ring that rollouts come from; None if the collector has none.

    Returns:
        The hook that publishes.
    """
    run_dir = None if config.run_dir is None else Path(config.run_dir)
    routes = sync_map(config.sync)
    if config.cluster.kind != THIS_MACHINE:
        from rlsync.recipes.on_cluster import own_routes  # which needs ray

        routes |= own_routes(trainer.collector)
    sync = SyncWeights(
        routes,
        trigger(config.sync.when),
        history=config.sync.history,
        receipts_file=None if run_dir is None else run_dir / RECEIPTS,
    )
    sync.register(trainer)
    staleness = StalenessHistogram(sync, None if run_dir is None else run_dir / STALENESS)
    staleness.register(trainer)
    statistics = StatisticsHook(sync, staleness, run_dir, counters)
    statistics.register(trainer)
    turns = config.collector.kind in ("sync", IN_PROCESS)
    num_workers = getattr(trainer.collector, "num_workers", 1)  # the learner itself, in its process
    Bottleneck(statistics.waits, num_workers, turns=turns).register(trainer)
    LogReceipts(sync).register(trainer, _RECEIPTS_KEY)
    StopIfNotFinite().register(trainer)
    return sync


def policy_player(
    config: Config, policy: TensorDictModuleBase, spaces: Spaces, *, deterministic: bool
) -> CheckpointPlayer:
    """What ``rlsync eval`` plays with, for a policy that workers on stock collectors act with.

    Args:
        config: of the run; if its sync map declares a dtype, the policy gets it.
        policy: reads ``observation`` and writes ``action``.
        spaces: of the environment.
        deterministic: take the likeliest action in place of drawing one.
    """
    acts = workers_policy(config, policy)
    # The same single environment that GymEnv makes in the workers.
    envs = GymnasiumEnvs(config.env.id, config.env.kwargs)
    acting = PolicyPlayer(
        acts,
        spaces.player_actions(),
        (spaces.features,),
        deterministic=deterministic,
        begins=acts.begins() if isinstance(acts, DreamerPlayer) else None,
    )
    return CheckpointPlayer(acts, acting, envs)
