"""Settings that come back from a checkpoint although the config of a resumed run has changed them.

Optimizers keep learning rate, epsilon and the like beside their state, and TorchRL's losses and value
estimators keep discount and coefficients in buffers. Loading a checkpoint brings the old values back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torchrl.trainers import Trainer

from rlsync.torchrl_plugin.compat import trainers

#: Pairs of values: that of the run before, and that of this run.
Changed = Sequence[tuple[Any, Any]]


class Settings:
    """What the config has set in a trainer. Make it before a checkpoint is loaded, to put changes in again.

    Args:
        trainer: as it was built from the config.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._optimizers = trainers.optimizers(trainer)
        self._schedulers = schedulers(trainer)
        self._groups = [[_options(group) for group in one.param_groups] for one in self._optimizers]
        self._numbers = [(number, number.item()) for number in _numbers(trainer)]

    def put_back(self, changed: Changed | None) -> None:
        """Put in again what the config has changed; everything else stays as the checkpoint has it.

        Args:
            changed: what differs from the config of the run before. None if that is not known: then options
                of optimizers are those of this config.
        """
        for number, set_to in self._numbers:
            if changed and _is_change(number.item(), set_to, changed):
                with torch.no_grad():
                    number.fill_(set_to)
        for optimizer, groups in zip(self._optimizers, self._groups, strict=True):
            for group, fresh in zip(optimizer.param_groups, groups, strict=True):
                self._put_back_options(group, fresh, changed)
        for scheduler in self._schedulers:
            scheduler.base_lrs = [group["initial_lr"] for group in scheduler.optimizer.param_groups]

    def _put_back_options(
        self, group: dict[str, Any], fresh: dict[str, Any], changed: Changed | None
    ) -> None:
        # A schedule lowers "lr" and keeps the rate that it began with. Both change in proportion.
        base = "initial_lr" if "initial_lr" in group else "lr"
        old, new = group[base], fresh.get(base, fresh["lr"])
        if _applies(old, new, changed):
            group["lr"] = group["lr"] * (new / old) if old else new
            group[base] = new
        for name in fresh.keys() & group.keys() - {"lr", "initial_lr"}:
            if _applies(group[name], fresh[name], changed):
                group[name] = fresh[name]


def schedulers(trainer: Trainer) -> list[LRScheduler]:
    """The learning rate schedules of a trainer's registered hooks."""
    return [value for value in _held_by_hooks(trainer) if isinstance(value, LRScheduler)]


def _numbers(trainer: Trainer) -> list[Tensor]:
    """The buffers with a single number in the loss module, and in modules that registered hooks hold."""
    parts = [trainer.loss_module, *_held_by_hooks(trainer)]
    owners = [part for part in parts if isinstance(part, nn.Module)]
    buffers = [b for owner in owners for b in owner.buffers() if b.numel() == 1 and b.is_floating_point()]
    return list({id(buffer): buffer for buffer in buffers}.values())


def _held_by_hooks(trainer: Trainer) -> list[object]:
    return [value for hook in trainers.registered_modules(trainer) for value in (hook, *vars(hook).values())]


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _applies(loaded: Any, fresh: Any, changed: Changed | None) -> bool:
    if isinstance(loaded, Tensor) or isinstance(fresh, Tensor) or loaded == fresh:
        return False
    return changed is None or _is_change(loaded, fresh, changed)


def _is_change(loaded: Any, fresh: Any, changed: Changed) -> bool:
    return any(_equal(loaded, before) and _equal(fresh, now) for before, now in changed)


def _equal(one: Any, other: Any) -> bool:
    """Whether two numbers are equal; buffers have them rounded to float32."""
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in (one, other))
    return math.isclose(one, other, rel_tol=1e-6) if numbers else bool(one == other)
