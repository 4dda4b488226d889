"""TorchRL's trainers: their operations and their optimizers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torchrl.trainers import Trainer
from torchrl.trainers import UpdateWeights as StockUpdateWeights

from rlsync.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class StockHook:
    """TorchRL's UpdateWeights hook of a trainer, at one stage.

    Args:
        hook: the hook.
        stage: where it is registered.
    """

    hook: StockUpdateWeights
    stage: str

    @property
    def feeds(self) -> object:
        """What it sends weights to: a sender, or a collector through ``update_policy_weights_``."""
        return self.hook.collector if self.hook.sender is None else self.hook.sender

    def __str__(self) -> str:
        hook = self.hook
        if hook.sender is not None:
            what = f"sender={type(hook.sender).__name__}"
        elif hook.weight_update_map is not None:
            what = ", ".join(f"{to} <- {source}" for to, source in hook.weight_update_map.items())
        else:
            what = type(hook.collector).__name__
        return f"TorchRL's UpdateWeights({what}) at {self.stage}"


def stock_update_weights(trainer: Trainer) -> list[StockHook]:
    """TorchRL's UpdateWeights hooks of a trainer, including those given to ``register_op``.

    Trainer cannot list its operations. Remove this function when it can.
    """
    return [
        StockHook(hook, name.removeprefix("_").removesuffix("_ops"))
        for name, ops in _operations(trainer).items()
        for op, _ in ops
        if isinstance(hook := _unwrapped(op), StockUpdateWeights)
    ]


def remove_stock_update_weights(trainer: Trainer, removed: Collection[StockHook]) -> None:
    """Remove some of TorchRL's UpdateWeights hooks from a trainer, from its checkpoints too.

    Trainer wraps each operation in a timing function, which holds it as ``__wrapped__``. Remove this function
    when stock trainers take the hook as an argument.
    """
    hooks = {id(stock.hook) for stock in removed}
    for ops in _operations(trainer).values():
        ops[:] = [op for op in ops if id(_unwrapped(op[0])) not in hooks]
    for name, module in list(trainer._modules.items()):
        if id(module) in hooks:
            del trainer._modules[name]
            if trainer.checkpoint is not None:
                trainer.checkpoint._components.pop(f"trainer_module.{name}", None)


@contextmanager
def all_or_nothing(trainer: Trainer) -> Iterator[None]:
    """Give a trainer its operations and modules back as they were, if the block raises.

    Remove this function when Trainer can take an operation back.
    """
    operations = {name: list(ops) for name, ops in _operations(trainer).items()}
    held = dict(vars(trainer)) | {"_modules": dict(trainer._modules)}
    components = {} if trainer.checkpoint is None else dict(trainer.checkpoint._components)
    try:
        yield
    except BaseException:
        vars(trainer).clear()
        vars(trainer).update(held)
        for name, ops in _operations(trainer).items():
            ops[:] = operations[name]
        if trainer.checkpoint is not None:
            trainer.checkpoint._components = components
        raise


def run_shutdown_operations(trainer: Trainer) -> None:
    """Call what is registered at the stage ``shutdown``, after a training that ended before it came there.

    Remove this function when ``Trainer.shutdown`` calls it.
    """
    trainer._shutdown_hook()


def _operations(trainer: Trainer) -> dict[str, list[tuple[Any, dict[str, Any]]]]:
    """The lists in which a trainer keeps what ``register_op`` was given."""
    return {name: held for name, held in vars(trainer).items() if name.endswith("_ops")}


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


def refuse_remote_learner(trainer: Trainer) -> None:
    """Refuse a trainer whose learner is in another process: its loss module here is not trained."""
    if trainer.learner_backend != "local":
        raise ConfigError(
            "the weights of this trainer are trained in another process",
            f"{type(trainer).__name__}(learner_backend={trainer.learner_backend!r})",
            "use learner_backend='local'; TorchRL publishes remote learners by itself",
        )
