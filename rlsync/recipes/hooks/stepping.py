"""Makes a trainer's updates by functions of tensors, or in TorchRL's way where these cannot serve."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.trainers import Trainer

from rlsync.recipes.hooks.finite import StopIfNotFinite
from rlsync.recipes.pure import Gradients, NotServed, Phase, Update, eager_gradients
from rlsync.torchrl_plugin.compat.trainers import GradientsInside, foreign_hand, own_step_hooks, stock_step

_log = logging.getLogger(__name__)


class PureStepper(GradientsInside):
    """Takes the place of a trainer's own stepper, and makes the same updates without modules.

    It takes TorchRL's way, and says why, if ``make`` raises NotServed, and while somebody else has a hook on
    the losses, the gradients or the steps, which a pure update would pass by: it looks before each batch.
    Either way reads and writes the same tensors, draws the same noise, and gives the same results but for
    rounding.

    A step with a loss or a gradient that is not finite is not made: StopIfNotFinite is asked first.
    """

    def __init__(self, make: Callable[[], Update], *, compiles: bool = False, bfloat16: bool = False) -> None:
        self.why_not: str | None = None  #: what the updates take TorchRL's way for
        self._compiles, self._bfloat16 = compiles, bfloat16
        self._update: Update | None = None
        self._graphs: dict[int, Callable[..., Gradients]] = {}
        self._averages: dict[str, Tensor] = {}
        self._averaged_steps = 0
        try:
            self._update = make()
            self._places = [phase.places(self._update.weights) for phase in self._update.phases]
        except NotServed as error:
            self._never: str | None = str(error)
        else:
            self._never = None

    def register(self, trainer: Trainer, name: str = "") -> None:
        """Make the updates of this trainer from now on. Checkpoints have what they had without it."""
        self.trainer = trainer
        self._stock = trainer.optimization_stepper
        trainer.optimization_stepper = self
        trainer.register_op("pre_optim_steps", self.look)
        trainer.register_op("pre_epoch_log", self._new_epoch)
        self.look()

    def look(self) -> None:
        """Decide how the next updates are made."""
        before = self.why_not
        self.why_not, self._averages = self._never, {}
        if self._update is not None and self._never is None:
            optimizers = [phase.optimizer for phase in self._update.phases]
            self.why_not = foreign_hand(self.trainer, optimizers, self._update.networks)
        if self.why_not != before:
            _log.info("updates are made %s", self.way())

    def way(self) -> str:
        """How updates are made, in words."""
        if self.why_not is not None:
            return f"in TorchRL's way: {self.why_not}"
        return "by a function of tensors"

    def step(self, trainer: Trainer, sub_batch: TensorDictBase) -> TensorDictBase:
        update = self._update
        if self.why_not is not None or update is None:
            return stock_step(trainer, self._stock, sub_batch)
        batch = update.read(sub_batch)
        noise = update.noise(batch)
        due = len(update.phases) if update.due is None else update.due()
        found: dict[str, Tensor] = {}
        for phase, places in zip(update.phases[:due], self._places, strict=False):
            found |= self._make(phase, places, batch, noise)
        if due < len(update.phases):
            found |= update.idle
        elif update.after is not None:
            update.after()
        if (errors := found.pop("td_error", None)) is not None:
            sub_batch["td_error"] = errors
        return self._averaged(found)

    def _averaged(self, found: dict[str, Tensor]) -> TensorDict:
        """What Trainer averages, in one operation for all: it gets the averages once, and then no more."""
        if not self._averages:
            self._averages = {name: value.clone() for name, value in found.items()}
            self._averaged_steps = 1
            return TensorDict(self._averages)
        self._averaged_steps += 1
        values = [found[name] for name in self._averages]
        torch._foreach_lerp_(list(self._averages.values()), values, 1 / self._averaged_steps)
        return TensorDict()

    def _new_epoch(self, batch: object) -> None:
        self._averaged_steps = 0  # as Trainer does: the averages are those of the newest epoch

    def _make(
        self, phase: Phase, places: list[tuple[str, int]], batch: Any, noise: Sequence[Tensor]
    ) -> dict[str, Tensor]:
        assert self._update is not None
        optimizer = phase.optimizer
        self.graded = frozenset(map(id, optimizer.param_groups[0]["params"]))
        stops = []
        for owner, hook in own_step_hooks(optimizer):
            if isinstance(owner, StopIfNotFinite):
                stops.append(owner)
            else:
                hook(optimizer, (), {})
        step = eager_gradients(phase, self._update.weights, batch, noise, self._bfloat16)
        norm = float(step.norm)
        if not math.isfinite(norm + float(step.total)):
            for stop in stops:
                stop.look(optimizer, step.found, step.grads)
        if norm > self.trainer.clip_norm:
            torch._foreach_mul_(list(step.grads), self.trainer.clip_norm / (norm + 1e-6))
        phase.step(step.grads)
        vars(optimizer)["_opt_called"] = True  # a schedule of the rate warns if nobody called optimizer.step
        return step.found | ({"grad_norm_0": step.norm} if len(self._update.phases) == 1 else {})
