"""What every recipe's trainer has: its arguments, its logger, the hooks that publish, log and watch."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import optim
from torchrl.checkpoint import Checkpoint, GlobalRNGState
from torchrl.record.loggers import Logger, TensorboardLogger, WandbLogger
from torchrl.trainers import Trainer

from rlsync import ConfigError, LogReceipts, RecordSchedule, RlsyncError, SyncWeights, VerifySync
from rlsync.runs.actors.repeated import RepeatedUnrolls
from rlsync.runs.compat.trainers import CsvFiles, forget_logged
from rlsync.runs.evaluation.checkpoint import Component
from rlsync.runs.recipes.checkpoints import WholeCheckpoint, taken
from rlsync.runs.recipes.checks import more_frames
from rlsync.runs.recipes.hooks.finite import StopIfNotFinite
from rlsync.runs.recipes.hooks.measuring import StalenessHistogram, StatisticsHook
from rlsync.runs.recipes.hooks.steering import EpisodeReturns
from rlsync.runs.recipes.place import prefill_route
from rlsync.runs.recipes.pure import PureStepper
from rlsync.runs.recipes.rerun import schedule_facts
from rlsync.runs.recipes.run import Run
from rlsync.runs.recipes.run_files import (
    CHECKPOINT,
    METRICS,
    RECEIPTS,
    SCHEDULE,
    STALENESS,
    VERSIONS,
)
from rlsync.runs.recipes.settings import CHECKPOINT_REST_S, LOGGERS, Config, RecipeConfig
from rlsync.runs.recipes.sync_settings import sync_map, trigger, verify_trigger
from rlsync.seams import extensions, first_line, trainers

#: The name of LogReceipts in checkpoints. TorchRL refuses a checkpoint that lacks a registered name.
_RECEIPTS_KEY = "sync_metrics"


def annealing(
    run: Run[RecipeConfig], optimizer: optim.Optimizer
) -> optim.lr_scheduler.LRScheduler | None:
    """A schedule that lowers the learning rate linearly to a twentieth over all frames, if asked for."""
    recipe = run.recipe
    if not recipe.anneal_lr:
        return None
    batches = max(1, recipe.total_frames // run.config.collector.frames_per_batch)
    return optim.lr_scheduler.LambdaLR(optimizer, lambda batch: max(1 - batch / batches, 0.05))


def trainer_settings(run: Run[RecipeConfig]) -> dict[str, Any]:
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
        "save_trainer_interval": config.frames_between_checkpoints,
        "save_trainer_file": run.file(CHECKPOINT),
        "checkpoint": WholeCheckpoint(rng=RandomState()),
    }


def register_hooks(
    trainer: Trainer, run: Run[RecipeConfig], *, stop_at_return: bool = True
) -> EpisodeReturns:
    """Register those of :func:`register_sync`, what watches the workers, and the returned one.

    That logs returns and, with ``stop_at_return``, ends the run at ``recipe.target_return``.
    """
    register_sync(trainer, run)
    target = None
    if stop_at_return:
        target = run.recipe.target_return
    returns = EpisodeReturns(target, run.recipe.target_episodes)
    returns.register(trainer)
    run.place.watch(trainer)
    return returns


def register_sync(trainer: Trainer, run: Run[RecipeConfig]) -> SyncWeights:
    """Register and return the hook that publishes by the config's map.

    And those that log its cost, ages and waits, write statistics, and end the run before a step that is not
    finite.
    """
    forget_logged(trainer)
    settings = run.config.sync
    collector = trainer.collector
    sync = SyncWeights(
        sync_map(settings) | prefill_route(collector),
        trigger(settings.when),
        history=settings.history,
        receipts_file=run.file(RECEIPTS),
        versions_file=run.file(VERSIONS),
    )
    sync.register(trainer)
    if run.life_length is not None:
        EndsOfLives(sync, run.life_length).register(trainer)
    elif run.config.checkpoint_every_frames is None:
        rest_between_checkpoints(trainer)

    # What rlsync rerun needs, and comparisons of what acts with what was published.
    alone = run.shared is None  # what others put into a shared replay is not recorded
    if run.folder is not None and settings.digest_every is not None and alone:
        RecordSchedule(
            sync,
            run.folder / SCHEDULE,
            every=settings.digest_every,
            facts=schedule_facts(run.config),
            way=partial(_way_of_updates, trainer),
        ).register(trainer)
    verifies = verify_trigger(settings)
    verify = None
    if verifies is not None:
        verify = VerifySync(sync, verifies, behaviour=verifies, timeout_s=600.0)
        verify.register(trainer)

    # What is measured, and the guard that ends the run before a step that is not finite.
    staleness = StalenessHistogram(sync, run.file(STALENESS))
    staleness.register(trainer)
    StatisticsHook(
        sync,
        staleness,
        run.folder,
        verify=verify,
        num_workers=collector.num_workers,
        more_frames=more_frames(run.config),
    ).register(trainer)
    LogReceipts(sync).register(trainer, _RECEIPTS_KEY)
    StopIfNotFinite().register(trainer)
    return sync


def _way_of_updates(trainer: Trainer) -> str | None:
    """What of the updates may decide the last bits of a number, if they are functions of tensors."""
    stepper = trainer.optimization_stepper
    if isinstance(stepper, PureStepper):
        return stepper.kind()
    return None


#: Why a trainer was asked to stop, if by a signal.
INTERRUPTED = "interrupted"


class EndsOfLives:
    """Writes a checkpoint where a life ends, and publishes with what the next one begins.

    A run that goes on from there does so, too: what is published within a batch may lack what comes after its
    last step, such as a rate of exploration. Where a run is stopped, or fails, within a life, its checkpoint
    says so, and that of the end of the life before is kept.
    """

    def __init__(self, sync: SyncWeights, frames: int) -> None:
        self._sync = sync
        self._frames = frames
        self._began_at = 0

    def register(self, trainer: Trainer) -> None:
        """Register after what publishes."""
        trainer.register_op("setup", partial(self._begin, trainer))
        trainer.register_op("post_steps", partial(self._look, trainer))
        if isinstance(trainer.collector, RepeatedUnrolls):
            trainer.checkpoint.saved_envs = trainer.collector.saved_envs

    def _begin(self, trainer: Trainer) -> None:
        self._began_at = trainer.collected_frames
        trainer.register_op("batch_process", partial(self._within, trainer))
        # After all others of this stage, which may end the run.
        trainer.register_op("post_steps_log", partial(self._after_a_batch, trainer))

    def _look(self, trainer: Trainer) -> None:
        trainer.save_trainer_interval = math.inf
        if not self._ends(trainer):
            return
        trainer.save_trainer_interval = -1  # TorchRL saves when MORE frames have passed
        if trainer.collected_frames < trainer.total_frames:
            self._sync.publish("life")

    def _ends(self, trainer: Trainer) -> bool:
        """Whether a life ends now."""
        return (trainer.collected_frames - self._began_at) % self._frames == 0

    def _within(self, trainer: Trainer, batch: TensorDictBase) -> None:
        trainer.checkpoint.within_a_life = True

    def _after_a_batch(self, trainer: Trainer, batch: TensorDictBase) -> None:
        why = trainers.stop_reason(trainer)
        over = trainer.collected_frames >= trainer.total_frames or why not in (None, INTERRUPTED)
        trainer.checkpoint.within_a_life = not (over or self._ends(trainer))


def rest_between_checkpoints(trainer: Trainer) -> None:
    """Let half a minute pass between two checkpoints: each takes the learner a good part of a second."""
    frames = trainer.save_trainer_interval

    def look() -> None:
        trainer.save_trainer_interval = math.inf
        if time.monotonic() - trainer.checkpoint.written >= CHECKPOINT_REST_S:
            trainer.save_trainer_interval = frames

    trainer.register_op("post_steps", look)


#: TorchRL's keys of accelerators, each with what knows how many there are.
_ACCELERATORS: Mapping[str, Any] = {
    "torch_cuda": torch.cuda,
    "torch_xpu": torch.xpu,
    "torch_mps": torch.mps,
}


class RandomState(GlobalRNGState):
    """GlobalRNGState, which refuses a checkpoint with random numbers of accelerators that are not here."""

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


def make_logger(config: Config) -> Logger | None:
    """The logger that a config names, or None; ConfigError if it cannot start: no worker runs yet."""
    kind = config.logger.kind
    run_dir = config.run_dir
    kwargs = config.logger.kwargs
    if run_dir is None or kind == "none":
        return None
    try:
        if kind == "wandb":
            return _wandb(config, run_dir)
        make: Any = {"tensorboard": TensorboardLogger, "csv": CsvFiles}.get(kind)
        if make is None:
            make = extensions.imported(extensions.installed(LOGGERS)[kind], "logger")
        logger = make(exp_name=METRICS, log_dir=run_dir, **kwargs)
    except TypeError as error:
        problem = f"the {kind} logger does not take these arguments: {first_line(error)}"
        cure = "give what it lacks, +logger.kwargs.NAME=VALUE, and leave out what it does not know"
        raise ConfigError(problem, "logger.kwargs", cure) from error
    except (OSError, RlsyncError):
        raise  # these say what, where and how to mend it
    except Exception as error:
        problem = f"the {kind} logger cannot start: {type(error).__name__}: {first_line(error)}"
        raise ConfigError(problem, "logger.kind", "mend it, or take logger=csv") from error

    # TorchRL's loggers in processes of their own do not inherit Logger.
    log_scalar = getattr(type(logger), "log_scalar", Logger.log_scalar)
    if log_scalar is Logger.log_scalar or not hasattr(logger, "close"):
        cure = "let it return a torchrl.record.loggers.Logger that has a log_scalar of its own"
        problem = f"the {kind} logger is none: it is a {type(logger).__name__}"
        raise ConfigError(problem, "logger.kind", cure)
    return logger


def _wandb(config: Config, run_dir: str) -> Logger:
    import wandb

    kwargs = {"id": _wandb_id(config.resume), "config": asdict(config)} | dict(config.logger.kwargs)
    try:
        return WandbLogger(
            exp_name=Path(run_dir).name, log_dir=str(Path(run_dir) / METRICS), **kwargs
        )
    except wandb.Error as error:
        cure = "run `wandb login` first, or give logger.kwargs.mode=offline"
        raise ConfigError(
            f"wandb cannot start: {first_line(error)}", "logger.kind", cure
        ) from error


def _wandb_id(resume: str | None) -> str | None:
    """The id of the Weights & Biases run that wrote the checkpoint to resume from, if one did."""
    if resume is None:
        return None
    # the whole was checked before
    newest = taken(Path(resume), trusted=True, components=["logger"])
    if newest is None or "logger" not in Checkpoint.manifest(newest.checkpoint)["components"]:
        return None
    saved = Component()
    Checkpoint(logger=saved).load(newest.checkpoint, components=["logger"])
    return saved.state.get("local", {}).get("id")
