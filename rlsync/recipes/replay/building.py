"""The trainer of a recipe with a replay buffer, and its pace."""

from __future__ import annotations

from typing import Any

from torch import optim
from torchrl.collectors import BaseCollector
from torchrl.data import TensorDictReplayBuffer
from torchrl.objectives import LossModule
from torchrl.objectives.utils import TargetNetUpdater
from torchrl.trainers import LRSchedulerHook, OptimizationStepper, Trainer

from rlsync.recipes import parts
from rlsync.recipes.hooks import KeepPace
from rlsync.recipes.replay.config import ReplayConfig
from rlsync.recipes.replay.row_segments import RowSegments
from rlsync.recipes.settings import Config
from rlsync.torchrl_plugin.compat.trainers import replace_component


class NotKept:
    """Stands in a checkpoint where the replay buffer would be, if it is not kept there."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing: the buffer stays as it is."""


def make_trainer(
    config: Config,
    recipe: ReplayConfig,
    buffer: TensorDictReplayBuffer,
    collector: BaseCollector,
    loss: LossModule,
    optimizer: optim.Optimizer | None = None,
    stepper: OptimizationStepper | None = None,
    target: TargetNetUpdater | None = None,
) -> Trainer:
    """A trainer whose checkpoints have the replay buffer, or not, as the config says.

    It stores nothing and updates nothing yet: register what stores and draws, then call :func:`hold_pace`.

    Args:
        config: the run.
        recipe: its settings.
        buffer: the replay buffer.
        collector: with its workers started.
        loss: on the learner's device.
        optimizer: of all parameters; None where a stepper has its own.
        stepper: see ``torchrl.trainers.OptimizationStepper``.
        target: moves target networks; its hook is registered by the recipe.
    """
    trainer = Trainer(
        **parts.trainer_settings(config),
        collector=collector,
        loss_module=loss,
        optimizer=optimizer,
        optimization_stepper=stepper,
        replay_buffer=buffer,
        target_net_updater=target,
        optim_steps_per_batch=0,  # the pace sets it
    )
    if recipe.buffer_checkpointed:
        buffer.storage.checkpointer = RowSegments(buffer)
    elif trainer.checkpoint is not None:
        replace_component(trainer.checkpoint, "replay_buffer", NotKept())
    return trainer


def hold_pace(
    trainer: Trainer, config: Config, recipe: ReplayConfig, optimizer: optim.Optimizer | None
) -> None:
    """Let a trainer learn at the pace of the config, and lower its learning rate if the config says so.

    Args:
        trainer: that stores and draws already.
        config: the run.
        recipe: its settings.
        optimizer: whose rate may be lowered.
    """
    pace = KeepPace(recipe.pace.pace(), refills=not recipe.buffer_checkpointed)
    pace.register(trainer)
    scheduler = None if optimizer is None else parts.annealing(config, optimizer)
    if scheduler is not None:
        LRSchedulerHook(scheduler).register(trainer)
