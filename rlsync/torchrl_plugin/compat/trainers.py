"""TorchRL's trainers: their operations, their optimizers and their checkpoints."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torchrl.checkpoint import Checkpoint
from torchrl.trainers import Trainer
from torchrl.trainers import UpdateWeights as StockUpdateWeights

from rlsync.core.errors import ConfigError


def remove_stock_update_weights(trainer: Trainer) -> list[str]:
    """Remove TorchRL's UpdateWeights hooks from a trainer, and return the stages they were registered at.

    Trainer wraps each operation in a timing function, which holds it as ``__wrapped__``. Remove this function
    when stock trainers take the hook as an argument.
    """
    removed = []
    for stage, name in (("post_steps", "_post_steps_ops"), ("post_optim", "_post_optim_ops")):
        ops = getattr(trainer, name)
        kept = [op for op in ops if not isinstance(_unwrapped(op[0]), StockUpdateWeights)]
        removed += [stage] * (len(ops) - len(kept))
        ops[:] = kept
    for key, module in list(trainer._modules.items()):
        if isinstance(module, StockUpdateWeights):
            del trainer._modules[key]
    return removed


def stock_update_weights(trainer: Trainer) -> list[StockUpdateWeights]:
    """TorchRL's UpdateWeights hooks of a trainer, including those given to ``register_op``.

    Trainer cannot list its operations. Remove this function when it can.
    """
    ops = [*trainer._post_steps_ops, *trainer._post_optim_ops]
    return [hook for op in ops if isinstance(hook := _unwrapped(op[0]), StockUpdateWeights)]


def _unwrapped(op: Any) -> object:
    return getattr(op, "__wrapped__", op)


def optimizer_steps(trainer: Trainer, counted: int) -> int:
    """Optimizer steps of a trainer: the count of its stepper if it has one, else ``counted``.

    ``Trainer._optim_count`` counts one too many for each epoch that ends by StopIteration.
    """
    stepper = trainer.optimization_stepper
    own = getattr(stepper, "optimizer_step_count", None)
    return counted if own is None else int(own)


def optimizers(trainer: Trainer) -> list[torch.optim.Optimizer]:
    """The optimizers of a trainer, of its stepper and of its hooks, also those in a list, a tuple or a dict.

    Remove this function when Trainer has an accessor for all of them.
    """
    hooks = [_unwrapped(op) for op, _ in getattr(trainer, "_optimizer_ops", ())]
    owners = [trainer, trainer.optimization_stepper, *trainer._modules.values(), *hooks]
    attributes = [value for owner in owners for value in getattr(owner, "__dict__", {}).values()]
    held = [value for attribute in attributes for value in _flat(attribute)]
    return list({id(o): o for o in held if isinstance(o, torch.optim.Optimizer)}.values())


def _flat(attribute: Any) -> Iterable[object]:
    match attribute:
        case list() | tuple():
            return attribute
        case dict():
            return attribute.values()
    return (attribute,)


def replace_component(checkpoint: Checkpoint, name: str, component: object) -> None:
    """Write and read ``component`` under a name that a stock trainer has given away when it was built.

    Remove this function when a component can be registered anew.
    """
    checkpoint._components.pop(name, None)
    checkpoint.register(name, component)


def registered_modules(trainer: Trainer) -> list[object]:
    """The modules that the trainer keeps in its checkpoints."""
    return list(trainer._modules.values())


def refuse_remote_learner(trainer: Trainer) -> None:
    """Refuse a trainer whose learner is in another process: its loss module here is not trained."""
    if trainer.learner_backend != "local":
        raise ConfigError(
            "the weights of this trainer are trained in another process",
            f"{type(trainer).__name__}(learner_backend={trainer.learner_backend!r})",
            "use learner_backend='local'; TorchRL publishes remote learners by itself",
        )
