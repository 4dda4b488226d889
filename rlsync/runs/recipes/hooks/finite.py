"""Ends a run before a loss or a gradient that is not finite reaches the weights."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn, optim
from torch.nn.utils import get_total_norm
from torchrl.trainers import Trainer

from rlsync import ConfigError, NotFinite
from rlsync.runs.recipes.pure import PureStepper
from rlsync.seams import all_finite, in_place_of, last_checkpoint, misuse, trainers

#: TorchRL's steppers write the norm of the gradient under a key that begins so, before they step.
_NORM = "grad_norm"


class StopIfNotFinite(misuse.RegistersItself):
    """Raises NotFinite before an optimizer step whose loss or gradient is infinite or not a number.

    It names the loss or the parameters, the step and the checkpoint, which is written once more if the
    weights, those of before, are finite. It reads the norm that TorchRL's steppers have computed, or computes
    one.
    """

    def __init__(self) -> None:
        self._seen = _LastLosses()
        self._trainer: Trainer | None = None
        self._steps = 0

    def register(self, trainer: Trainer, name: str = "stop_if_not_finite") -> None:
        """Check every step of every optimizer; ConfigError if the trainer has none. ``name`` is not used."""
        watched = trainers.optimizers(trainer)
        if not watched:
            problem = "the trainer has no optimizer to watch"
            cure = "register it after the optimizer or the optimization stepper is set"
            raise ConfigError(
                problem, f"StopIfNotFinite().register({type(trainer).__name__})", cure
            )
        self._trainer = trainer
        for optimizer in watched:
            optimizer.register_step_pre_hook(self._before_step)
        if isinstance(trainer.loss_module, nn.Module):
            trainer.loss_module.register_forward_hook(self._seen)
        if isinstance(trainer, Trainer):
            self._seen.watch_methods(trainer)
            if isinstance(trainer.optimization_stepper, PureStepper):
                trainer.optimization_stepper.told.append(self._seen.saw)

    def _before_step(self, optimizer: optim.Optimizer, args: object, kwargs: object) -> None:
        self._steps += 1
        losses = self._seen.losses()
        norms = self._seen.norms()
        if not norms:
            grads = [p.grad for p in _parameters(optimizer) if p.grad is not None]
            norms = [float(get_total_norm(grads))]
        if not (all(map(math.isfinite, norms)) and all(map(all_finite, losses.values()))):
            problem = self._at_fault(losses, optimizer)
            if problem:
                raise self._error(problem, optimizer)
        self._seen.forget()

    def _at_fault(self, losses: dict[str, Tensor], optimizer: optim.Optimizer) -> str:
        """What is not finite; empty if only the norm is, because squares of large numbers overflow."""
        wrong_losses = _not_finite(losses)
        if wrong_losses:
            return f"the loss {', '.join(wrong_losses)}"
        params = _parameters(optimizer)
        with_gradient = 0
        at_fault = []
        for parameter in params:
            if parameter.grad is not None:
                with_gradient += 1
                if not all_finite(parameter.grad):
                    at_fault.append(parameter)
        if not at_fault:
            return ""
        if len(at_fault) == with_gradient:
            # Clipping by a norm that is not a number spoils every gradient. Without clipping it shows which.
            at_fault = self._seen.parameters_at_fault(params) or at_fault
        names = ", ".join(map(self._name_of, at_fault[:3]))
        if len(at_fault) > 3:
            names += f" and {len(at_fault) - 3} more"
        return f"the gradient of {names} is not finite"

    def _name_of(self, parameter: Tensor) -> str:
        if self._trainer is not None and isinstance(self._trainer.loss_module, nn.Module):
            for name, other in self._trainer.loss_module.named_parameters():
                if other is parameter:
                    return repr(name)
        return f"a parameter of shape {tuple(parameter.shape)}"

    def _error(self, what: str, optimizer: optim.Optimizer) -> NotFinite:
        trainer = self._trainer
        assert trainer is not None
        cure = "no step was made; the weights are those of before"
        if not last_checkpoint.finite_weights(trainer):
            cure = "no step was made, but the weights were not finite before; resume from an older checkpoint"
        elif trainer.save_trainer_file is not None:
            saved = last_checkpoint.save_before_the_end(trainer)
            cure = f"no step was made; no checkpoint of before: {saved.why_not}"
            if saved.path is not None:
                cure = (
                    f"no step was made; {saved.path} has the weights of before: resume with a smaller "
                    "clip_norm or learning rate"
                )
        # The optimizer's own count outlives a resume.
        counts = [int(state["step"]) for state in optimizer.state.values() if "step" in state]
        step = max(counts, default=self._steps - 1) + 1
        return NotFinite(
            what, f"optimizer step {step}, after {trainer.collected_frames:,} frames", cure
        )


def _not_finite(losses: Mapping[str, Tensor]) -> list[str]:
    """The losses that are not finite, in words."""
    words = []
    for name, loss in losses.items():
        if not all_finite(loss):
            if loss.numel() == 1:
                words.append(f"{name!r} is {loss.item()}")
            else:
                words.append(f"{name!r} is not finite")
    return words


class _LastLosses:
    """A forward hook that keeps what the loss module was last given and returned, and no trainer."""

    def __init__(self) -> None:
        self._module: nn.Module | None = None
        self._given: tuple[object, ...] = ()
        self._returned: TensorDictBase | Mapping[str, Tensor] | None = None
        self._of_methods: dict[str, Tensor] = {}

    def watch_methods(self, trainer: Trainer) -> None:
        """Keep what methods of the loss module return, too: forward hooks do not see them."""

        @in_place_of(trainer, "compute_loss")
        def compute_loss(
            trainer: Trainer, sub_batch: TensorDictBase, method: str | None = None
        ) -> object:
            returned = type(trainer).compute_loss(trainer, sub_batch, method)
            match returned:
                case (Tensor() as loss, *_) if method is not None:
                    self._of_methods[method] = loss.detach()
            return returned

    def __call__(self, module: nn.Module, given: tuple[object, ...], returned: object) -> None:
        if isinstance(returned, TensorDictBase):
            self._module = module
            self._given = given
            self._returned = returned

    def saw(self, found: Mapping[str, Tensor]) -> None:
        """Keep losses and norms that no loss module returned."""
        self._returned = found

    def __deepcopy__(self, memo: dict[int, object]) -> _LastLosses:
        return _LastLosses()

    def forget(self) -> None:
        """Let go of the batch and of the graph."""
        self._module = None
        self._given = ()
        self._returned = None
        self._of_methods = {}

    def losses(self) -> dict[str, Tensor]:
        """The losses that are differentiated, by name; of methods, by theirs."""
        return self._under("loss") | self._of_methods

    def norms(self) -> list[float]:
        """The norms that the stepper wrote into what the loss module returned."""
        return list(map(float, self._under(_NORM).values()))

    def parameters_at_fault(self, params: list[Tensor]) -> list[Tensor]:
        """The parameters whose gradient is not finite before it is clipped, found by another pass."""
        if self._module is None:
            return []
        with torch.enable_grad():
            again = self._module(*self._given)
            total = sum(loss.sum() for name, loss in again.items() if name.startswith("loss"))
            if not isinstance(total, Tensor) or not total.requires_grad:
                return []
            grads = torch.autograd.grad(total, params, allow_unused=True)
        at_fault = []
        for parameter, grad in zip(params, grads, strict=True):
            if grad is not None and not all_finite(grad):
                at_fault.append(parameter)
        return at_fault

    def _under(self, prefix: str) -> dict[str, Tensor]:
        if self._returned is None:
            return {}
        return {name: value for name, value in self._returned.items() if name.startswith(prefix)}


def _parameters(optimizer: optim.Optimizer) -> list[Tensor]:
    parameters: list[Tensor] = []
    for group in optimizer.param_groups:
        parameters += group["params"]
    return parameters
