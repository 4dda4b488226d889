"""What every recipe's trainer has: its arguments, the hooks that publish, log and watch, and its player."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from tensordict.nn import TensorDictModuleBase
from torch import optim
from torchrl.checkpoint import Checkpoint, GlobalRNGState
from torchrl.trainers import Trainer

from rlsync import DreamerPlayer, LogReceipts, SyncWeights
from rlsync.evaluation.checkpoint import CheckpointPlayer
from rlsync.recipes.hooks import (
    Bottleneck,
    EpisodeReturns,
    StalenessHistogram,
    StatisticsHook,
    StopIfNotFinite,
)
from rlsync.recipes.loggers import make_logger
from rlsync.recipes.networks import workers_policy
from rlsync.recipes.run import Run
from rlsync.recipes.run_files import CHECKPOINT, RECEIPTS, STALENESS
from rlsync.recipes.settings import IN_PROCESS
from rlsync.recipes.sync_settings import sync_map, trigger
from rlsync.transport.ring.format import RingCounters
from rlsync.workers.players.torchrl_policy import PolicyPlayer
from rlsync.workers.rollout_collector import RolloutCollector

#: The name of LogReceipts in checkpoints. TorchRL refuses a checkpoint that lacks a registered name.
_RECEIPTS_KEY = "sync_metrics"


def annealing(run: Run[Any], optimizer: optim.Optimizer) -> optim.lr_scheduler.LRScheduler | None:
    """A schedule that lowers the learning rate linearly to a twentieth over all frames, if asked for."""
    recipe = run.recipe
    if not recipe.anneal_lr:
        return None
    batches = max(1, recipe.total_frames // run.config.collector.frames_per_batch)
    return optim.lr_scheduler.LambdaLR(optimizer, lambda batch: max(1 - batch / batches, 0.05))


def trainer_settings(run: Run[Any]) -> dict[str, Any]:
    """The arguments that every stock trainer takes, of one run."""
    config = run.config
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
        "save_trainer_file": run.file(CHECKPOINT),
        "checkpoint": Checkpoint(rng=RandomState()),
    }


def register_hooks(trainer: Trainer, run: Run[Any], *, stop_at_return: bool = True) -> EpisodeReturns:
    """Register the hooks that every recipe on stock collectors has, and on transitions from a cluster.

    They publish by the config's sync map, log returns and publishes, watch the workers (on a cluster, tell of
    its nodes), and end the run before a step with a loss or a gradient that is not finite.

    Args:
        trainer: of the recipe.
        run: the run.
        stop_at_return: end the run when the returns of its own episodes reach ``recipe.target_return``.

    Returns:
        The hook that logs returns, and that can end the run.
    """
    collector = trainer.collector
    register_sync(trainer, run, collector.counters if isinstance(collector, RolloutCollector) else None)
    target = run.recipe.target_return if stop_at_return else None
    returns = EpisodeReturns(target, run.recipe.target_episodes)
    returns.register(trainer)
    run.place.watch(trainer)
    return returns


def register_sync(
    trainer: Trainer, run: Run[Any], counters: Callable[[], RingCounters] | None = None
) -> SyncWeights:
    """Register what every recipe has, whatever its collector.

    That is the hook that publishes by the config's sync map, those that log what publishing cost, how old
    the frames were and who waited for whom, the one that writes the run's statistics, and the one that ends
    the run before a step that is not finite.

    Args:
        trainer: the trainer.
        run: the run.
        counters: of the ring that rollouts come from; None if the collector has none.

    Returns:
        The hook that publishes.
    """
    settings, kind = run.config.sync, run.config.collector.kind
    sync = SyncWeights(
        sync_map(settings) | run.place.routes(trainer.collector),
        trigger(settings.when),
        history=settings.history,
        receipts_file=run.file(RECEIPTS),
    )
    sync.register(trainer)
    staleness = StalenessHistogram(sync, run.file(STALENESS))
    staleness.register(trainer)
    statistics = StatisticsHook(sync, staleness, run.folder, counters)
    statistics.register(trainer)
    num_workers = 1 if kind == IN_PROCESS else trainer.collector.num_workers
    Bottleneck(statistics.waits, num_workers, turns=kind in ("sync", IN_PROCESS)).register(trainer)
    LogReceipts(sync).register(trainer, _RECEIPTS_KEY)
    StopIfNotFinite().register(trainer)
    return sync


def policy_player(run: Run[Any], policy: TensorDictModuleBase, *, deterministic: bool) -> CheckpointPlayer:
    """What ``rlsync eval`` plays with, for a policy that workers on stock collectors act with.

    Args:
        run: the run; if its sync map declares a dtype, the policy gets it.
        policy: reads ``observation`` and writes ``action``.
        deterministic: take the likeliest action in place of drawing one.
    """
    acts, spaces = workers_policy(run.config.sync, policy), run.spaces
    acting = PolicyPlayer(
        acts,
        spaces.player_actions(),
        spaces.observation_shape,
        observation_dtype=spaces.observation_dtype,
        deterministic=deterministic,
        begins=acts.begins() if isinstance(acts, DreamerPlayer) else None,
    )
    return CheckpointPlayer(acts, acting, run.config.env.spec())


#: TorchRL's keys of accelerators, each with what knows how many there are.
_ACCELERATORS: Mapping[str, Any] = {"torch_cuda": torch.cuda, "torch_xpu": torch.xpu, "torch_mps": torch.mps}


class RandomState(GlobalRNGState):
    """The random numbers of Python, numpy, torch and its accelerators, as far as this machine has these.

    TorchRL's class refuses a checkpoint with the random numbers of a GPU where there is none, or where there
    are fewer. A resumed run may have other devices, so this one leaves those out that are not here.

    Source: torchrl.checkpoint.GlobalRNGState, whose checkpoints it reads and writes.

    Example:
        >>> state = RandomState().state_dict()
        >>> drawn = torch.rand(1)
        >>> RandomState().load_state_dict(state)
        >>> torch.equal(torch.rand(1), drawn)
        True
    """

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        here = dict(state_dict)
        for key, module in _ACCELERATORS.items():
            if key not in here:
                continue
            if not module.device_count():
                del here[key]
            elif not isinstance(here[key], torch.Tensor):  # one for each device
                here[key] = list(here[key])[: module.device_count()]
        super().load_state_dict(here)
