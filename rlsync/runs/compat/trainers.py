"""TorchRL's trainers: how a step is made, what hooks read of its batch, and what others have hung on it."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable

from tensordict import NestedKey, TensorDictBase
from torch import nn
from torchrl.data.replay_buffers.samplers import RandomSampler, SamplerWithoutReplacement
from torchrl.objectives.common import _updater_check_forward_prehook
from torchrl.record.loggers import CSVLogger, Logger, TensorboardLogger
from torchrl.trainers import OptimizationStepper, ReplayBufferTrainer, Trainer
from torchrl.trainers.algorithms.td3 import TD3OptimizationStepper

from rlsync.runs.compat.replay import Fields, RowBuffer
from rlsync.seams import in_place_of, trainers


def forget_logged(trainer: Trainer) -> None:
    """Keep the newest value of each metric. Until Trainer does not keep all values for ever."""
    trainer._log_dict = defaultdict(lambda: deque(maxlen=1))


def stock_step(
    trainer: Trainer, stepper: OptimizationStepper | None, batch: TensorDictBase
) -> TensorDictBase:
    """An optimizer step by a stepper, or as Trainer makes it without one. Until it is a method of Trainer."""
    if stepper is not None:
        return stepper.step(trainer, batch)
    losses = trainer.loss_module(batch)
    trainer._post_loss_hook(batch)
    return trainer._optimizer_hook(trainer._process_loss_hook(batch, losses))


def is_actors_turn(stepper: TD3OptimizationStepper) -> bool:
    """Count an update of TD3; whether it is one of the actor, too. Until the stepper has a method for it."""
    stepper._update_counter += 1
    return stepper._update_counter % stepper.policy_update_delay == 0


def fields_read(trainer: Trainer) -> set[NestedKey] | None:
    """The fields that hooks read of the batches of updates; None if one of them may read any."""
    fields: set[NestedKey] = set()
    for op, _ in [*trainer._process_optim_batch_ops, *trainer._post_optim_log_ops]:
        owner = trainers.owner_of(op)
        if isinstance(owner, trainers.Reader) and trainers.is_ours(owner):
            fields.update(owner.reads)
        elif type(owner) is not ReplayBufferTrainer:  # which draws them
            return None
    return fields


def draw_only(trainer: Trainer, buffer: RowBuffer, fields: Callable[[], Fields | None]) -> None:
    """Let updates draw only these fields of a buffer; None: all. Until a trainer can ask for some."""

    @in_place_of(trainer, "_process_optim_batch_hook")
    def process(trainer: Trainer, batch: TensorDictBase) -> TensorDictBase:
        buffer.fields = fields()
        try:
            return type(trainer)._process_optim_batch_hook(trainer, batch)
        finally:
            buffer.fields = None  # whoever draws for another purpose gets all


_ALIKE = (RandomSampler, SamplerWithoutReplacement)  #: samplers without priorities


def foreign_hand(trainer: Trainer, networks: Iterable[nn.Module]) -> str | None:
    """What somebody else has hung on losses or gradients, in words; None if nobody has."""
    for op, _ in [*trainer._post_loss_ops, *trainer._process_loss_ops]:
        owner = trainers.owner_of(op)
        if not (
            isinstance(owner, ReplayBufferTrainer) and type(owner.replay_buffer.sampler) in _ALIKE
        ):
            return f"{type(owner).__name__} is registered at post_loss or process_loss"
    for module in [
        trainer.loss_module,
        *(part for network in networks for part in network.modules()),
    ]:
        hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
        hooks += [*module._backward_pre_hooks.values(), *module._backward_hooks.values()]
        if not all(
            trainers.is_ours(hook) or hook is _updater_check_forward_prehook for hook in hooks
        ):
            return f"somebody's hook is on {type(module).__name__}"
    for name, parameter in trainer.loss_module.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            return f"somebody's hook is on the gradient of {name}"
    return None


def leave_out_later(logger: Logger | None, frames: int) -> None:
    """Let TensorBoard leave out what was logged after so many frames, which is logged again from now on.

    Until TensorboardLogger takes ``purge_step``.
    """
    if isinstance(logger, TensorboardLogger):
        writer = logger.experiment
        writer.close()
        writer.purge_step = frames + 1


class CsvFiles(CSVLogger):
    """Writes each number to its file and forgets it; TorchRL's class keeps all, in each checkpoint too."""

    def log_scalar(self, name: str, value: float, step: int | None = None) -> None:
        super().log_scalar(name, value, step)
        if step is not None:  # without one, TorchRL counts those that it keeps
            del self.experiment.scalars[name]

    def _checkpoint_state(self) -> dict[str, object]:
        return {}
