"""What TorchRL's trainers write into their checkpoints, and what they require there."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torchrl.checkpoint import Checkpoint
from torchrl.trainers import Trainer, TrainerHookBase

#: What a Checkpoint calls a module of a trainer, before its name.
_COMPONENT = "trainer_module."


def replace_component(checkpoint: Checkpoint, name: str, component: object) -> None:
    """Write and read ``component`` under a name that a stock trainer has given away when it was built.

    Remove this function when a component can be registered anew.
    """
    checkpoint._components.pop(name, None)
    checkpoint.register(name, component)


def registered_modules(trainer: Trainer) -> list[object]:
    """The modules that the trainer keeps in its checkpoints."""
    return list(trainer._modules.values())


def free_name(trainer: Trainer, name: str) -> str:
    """``name``, or the first of ``name_2``, ``name_3``, ... that no module of the trainer has."""
    found, number = name, 1
    while found in trainer._modules:
        number += 1
        found = f"{name}_{number}"
    return found


def let_it_be_absent(trainer: Trainer, hook: TrainerHookBase) -> None:
    """Let the trainer load checkpoints that were written without ``hook``: it is then given an empty dict.

    TorchRL 0.14 refuses a checkpoint that lacks a module of the trainer. Stock trainers keep their
    UpdateWeights out of their checkpoints, so older ones lack the hook that replaces it.
    Remove this function when a module can be registered as one that may be absent.
    """
    held = getattr(vars(trainer).get("load_state_dict"), "__self__", None)
    if not isinstance(held, _Loading):
        held = _Loading(trainer)
        trainer.load_state_dict, trainer.load_from_file = held.load_state_dict, held.load_from_file
    held.may_be_absent.add(hook)


class _Loading:
    """How a trainer loads a checkpoint that may lack some of its modules."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = weakref.ref(trainer)
        self.may_be_absent: weakref.WeakSet[TrainerHookBase] = weakref.WeakSet()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        trainer = self._present()
        with self._without_absent(trainer, state_dict):
            type(trainer).load_state_dict(trainer, state_dict)

    def load_from_file(self, file: str | Path, **kwargs: Any) -> Trainer:
        trainer = self._present()
        if not Checkpoint.is_checkpoint(file):  # the other formats go through load_state_dict
            return type(trainer).load_from_file(trainer, file, **kwargs)
        components = Checkpoint.manifest(file)["components"]
        written = {name.removeprefix(_COMPONENT) for name in components if name.startswith(_COMPONENT)}
        with self._without_absent(trainer, written):
            return type(trainer).load_from_file(trainer, file, **kwargs)

    def _present(self) -> Trainer:
        trainer = self._trainer()
        if trainer is None:
            raise ReferenceError("the trainer is gone")
        return trainer

    @contextmanager
    def _without_absent(self, trainer: Trainer, written: Collection[str]) -> Iterator[None]:
        modules = trainer._modules
        absent = {n: m for n, m in modules.items() if n not in written and m in self.may_be_absent}
        components = None if trainer.checkpoint is None else dict(trainer.checkpoint._components)
        trainer._modules = {name: module for name, module in modules.items() if name not in absent}
        for name in absent if trainer.checkpoint is not None else ():
            trainer.checkpoint._components.pop(_COMPONENT + name, None)
        try:
            yield
        finally:
            trainer._modules = modules
            if trainer.checkpoint is not None and components is not None:
                trainer.checkpoint._components = components
        for module in absent.values():
            module.load_state_dict({})
