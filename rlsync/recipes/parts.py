"""The parts that all recipes are built from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict.nn import TensorDictModuleBase
from torch import optim
from torchrl.checkpoint import Checkpoint
from torchrl.trainers import Trainer

from rlsync import DreamerPlayer, LogReceipts, SyncWeights, WatchWorkers
from rlsync.evaluation.checkpoint import CheckpointPlayer
from rlsync.recipes.collecting import started_collector
from rlsync.recipes.hooks import (
    Bottleneck,
    EpisodeReturns,
    StalenessHistogram,
    StatisticsHook,
    StopIfNotFinite,
)
from rlsync.recipes.loggers import make_logger
from rlsync.recipes.networks import MixedMLP, mlp, workers_dtype, workers_policy
from rlsync.recipes.random_state import RandomState
from rlsync.recipes.run_files import CHECKPOINT, RECEIPTS, STALENESS
from rlsync.recipes.settings import IN_PROCESS, Config
from rlsync.recipes.spaces import Spaces, make_env, making, naming_env, probe
from rlsync.recipes.sync_settings import sync_map, trigger
from rlsync.transport.ring.watch import RingCounters
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

#: The name of LogReceipts in checkpoints. TorchRL refuses a checkpoint that lacks a registered name.
_RECEIPTS_KEY = "sync_metrics"


def seed_everything(seed: int) -> None:
    """Seed torch and numpy here; workers are seeded by the trainer through their collector."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)


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
    if config.cluster.here:
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
    if not config.cluster.here:
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
    acting = PolicyPlayer(
        acts,
        spaces.player_actions(),
        spaces.observation_shape,
        observation_dtype=spaces.observation_dtype,
        deterministic=deterministic,
        begins=acts.begins() if isinstance(acts, DreamerPlayer) else None,
    )
    return CheckpointPlayer(acts, acting, config.env.spec())
