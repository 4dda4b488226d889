"""TorchRL's trainers: their operations, optimizers and checkpoints, and what they ask of a collector."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from tensordict import NestedKey
from tensordict.nn import TensorDictModuleBase, TensorDictParams
from torch import nn
from torchrl.checkpoint import Checkpoint
from torchrl.collectors import AsyncBatchedCollector, Collector
from torchrl.collectors._multi_base import MultiCollector
from torchrl.trainers import Trainer, TrainerHookBase
from torchrl.trainers import UpdateWeights as StockUpdateWeights

from rlsync.core.errors import ConfigError
from rlsync.core.plan import POLICY
from rlsync.core.trigger import Counters
from rlsync.torchrl_plugin.compat import in_place_of, present
from rlsync.torchrl_plugin.compat.distributed import Remote

_COMPONENT = "trainer_module."  #: what a Checkpoint calls a module of a trainer, before its name


@dataclass(frozen=True, slots=True)
class StockHook:
    """TorchRL's UpdateWeights hook of a trainer, and the stage where it is registered."""

    hook: StockUpdateWeights
    stage: str

    @property
    def feeds(self) -> object:
        """What it sends weights to: a sender, or a collector through ``update_policy_weights_``."""
        if self.hook.sender is None:
            return self.hook.collector
        return self.hook.sender

    @property
    def destinations(self) -> tuple[str, ...]:
        """Which destinations it sends weights to; none if a sender knows them."""
        if self.hook.sender is not None:
            return ()
        if self.hook.weight_update_map is None:
            return (POLICY,)
        return tuple(self.hook.weight_update_map)

    def __str__(self) -> str:
        hook = self.hook
        if hook.sender is not None:
            settings = f"sender={type(hook.sender).__name__}"
        elif hook.weight_update_map is not None:
            settings = ", ".join(
                f"{to} <- {source}" for to, source in hook.weight_update_map.items()
            )
        else:
            settings = type(hook.collector).__name__
        return f"TorchRL's UpdateWeights({settings}) at {self.stage}"


def stock_update_weights(trainer: Trainer) -> list[StockHook]:
    """TorchRL's UpdateWeights hooks of a trainer, at whatever stage. Until Trainer lists its operations."""
    return [
        StockHook(hook, name.removeprefix("_").removesuffix("_ops"))
        for name, ops in _operations(trainer).items()
        for op, _ in ops
        if isinstance(hook := _unwrapped(op), StockUpdateWeights)
    ]


def remove_stock_update_weights(trainer: Trainer, removed: Collection[StockHook]) -> None:
    """Remove these hooks from a trainer and its checkpoints. Until stock trainers take the hook."""
    hooks = {id(stock.hook) for stock in removed}
    for ops in _operations(trainer).values():
        ops[:] = [op for op in ops if id(_unwrapped(op[0])) not in hooks]
    for name, module in list(trainer._modules.items()):
        if id(module) in hooks:
            del trainer._modules[name]
            _components(trainer).pop(_COMPONENT + name, None)


@contextmanager
def all_or_nothing(trainer: Trainer) -> Iterator[None]:
    """Give a trainer its operations and modules back if the block raises. Until Trainer can."""
    operations = {name: list(ops) for name, ops in _operations(trainer).items()}
    attributes = dict(vars(trainer)) | {"_modules": dict(trainer._modules)}
    components = dict(_components(trainer))
    try:
        yield
    except BaseException:
        vars(trainer).clear()
        vars(trainer).update(attributes)
        for name, ops in _operations(trainer).items():
            ops[:] = operations[name]
        _put_back(trainer, components)
        raise


def asked_to_stop(trainer: Trainer) -> bool:
    """Whether ``Trainer.request_stop`` was called. Until the trainer says so itself."""
    return bool(trainer._stop_training)


def stop_reason(trainer: Trainer) -> str | None:
    """Why ``Trainer.request_stop`` was called, if it was. Until the trainer says so itself."""
    reason: str | None = trainer._stop_reason
    return reason


def saves_now(trainer: Trainer) -> bool:
    """Whether a checkpoint is due at the end of this iteration. Until the trainer says so itself."""
    return bool(trainer.collected_frames - trainer._last_save > trainer.save_trainer_interval)


class ShutdownStage:
    """The stage ``shutdown`` of a trainer, in place of its method: it runs once, however the training ends.

    After an error TorchRL 0.14 leaves the stage and the workers to the caller; 0.15 runs the one and ends the
    others before the caller is told. Made by :meth:`of`. Until 0.14 is not supported any more.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = weakref.ref(trainer)
        self._ran = False
        self.first: list[BeforeWorkersEnd] = []  #: are told of an error before
        in_place_of(trainer, "_setup_hook")(self._setup)

    @classmethod
    def of(cls, trainer: Trainer) -> ShutdownStage:
        """That of this trainer, which it has from now on."""
        stage = vars(trainer).get("_shutdown_hook")
        if not isinstance(stage, cls):
            stage = cls(trainer)
            trainer._shutdown_hook = stage
        return stage

    def __call__(self) -> None:
        """Run the stage if it has not run: the trainer calls this, or who ends it in its place."""
        self._tell(sys.exc_info()[1])
        if not self._ran:
            self._ran = True
            trainer = present(self._trainer, "trainer")
            type(trainer)._shutdown_hook(trainer)

    def _setup(self, trainer: Trainer) -> None:
        """The stage ``setup``: if it fails, TorchRL 0.15 ends the workers without the stage ``shutdown``."""
        try:
            type(trainer)._setup_hook(trainer)
        except BaseException as error:
            self._tell(error)
            raise

    def _tell(self, error: BaseException | None) -> None:
        # the innermost block is left first
        for block in reversed(self.first):
            block.tell(error)


class BeforeWorkersEnd:
    """A block around ``train()`` that calls ``call(error)`` once for the error that leaves it.

    That is before the stage ``shutdown`` runs and the workers end, whenever TorchRL does so. Blocks may be
    nested: the innermost is called first.
    """

    def __init__(self, trainer: Trainer, call: Callable[[BaseException], object]) -> None:
        self._stage = ShutdownStage.of(trainer)
        self._call = call
        self._before: BaseException | None = None
        self._told = False

    def __enter__(self) -> None:
        # an error that is being handled around the block is none of its own
        self._before = sys.exc_info()[1]
        self._stage.first.append(self)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._stage.first.remove(self)
        self.tell(error)

    def tell(self, error: BaseException | None) -> None:
        """Call once, if there is an error of this block."""
        if error is not None and error is not self._before and not self._told:
            self._told = True
            self._call(error)


def _operations(trainer: Trainer) -> dict[str, list[tuple[Any, dict[str, Any]]]]:
    """The lists in which a trainer keeps what ``register_op`` was given."""
    return {name: operations for name, operations in vars(trainer).items() if name.endswith("_ops")}


def _components(trainer: Trainer) -> dict[str, Any]:
    """What the trainer's ``Checkpoint`` writes, by name; nothing if it has none."""
    components: dict[str, Any] = (
        {} if trainer.checkpoint is None else trainer.checkpoint._components
    )
    return components


def _put_back(trainer: Trainer, components: dict[str, Any]) -> None:
    now = _components(trainer)
    now.clear()
    now.update(components)


def _unwrapped(op: Any) -> object:
    return getattr(op, "__wrapped__", op)


def planned(trainer: Trainer) -> Counters:
    """The counters at the end of the planned run, or more; what nobody can foresee is very large."""
    many = 10**15
    collector = trainer.collector
    batches = many
    counted = isinstance(collector, (Collector, MultiCollector)) and not trainer.async_collection
    if counted and not collector.split_trajs and collector.trajs_per_batch is None:
        batches = -(
            trainer.total_frames // -(collector.requested_frames_per_batch * trainer.frame_skip)
        )
    steps = many
    # None: until the batch is used up; 0: a hook paces the trainer
    if trainer.optim_steps_per_batch:
        steps_per_batch = trainer.optim_steps_per_batch * trainer.num_epochs
        # A stepper counts each optimizer's. Without one here, somebody makes the steps by a way of his own.
        steps = batches * steps_per_batch * len(optimizers(trainer)) or many
    return Counters(batches, trainer.total_frames, steps, many)


def training_now() -> Trainer | None:
    """The trainer whose ``train()`` runs the caller. Until a collector is told who iterates over it."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_name == "train":
            trainer = frame.f_locals.get("self")
        else:
            trainer = None
        if isinstance(trainer, Trainer):
            return trainer
    return None


def operations(trainer: Trainer) -> list[object]:
    """What the trainer calls, at whatever stage."""
    return [_unwrapped(op) for ops in _operations(trainer).values() for op, _ in ops]


def call_after_a_step(trainer: Trainer) -> None:
    """Call what a user registered for after an optimizer's step, without the hooks that publish or watch."""
    for op, kwargs in [*trainer._post_optim_ops, *trainer._post_steps_ops]:
        called = _unwrapped(op)
        if not is_ours(called) and not isinstance(owner_of(called), StockUpdateWeights):
            op(**kwargs)


class Reader:
    """A hook that reads, of the batch of an update, ``reads`` and what others wrote into it; nothing else."""

    reads: tuple[NestedKey, ...] = ()


def owner_of(operation: object) -> object:
    """The hook whose method a trainer's operation or a module's hook is, else the function itself."""
    function = _unwrapped(operation)
    if isinstance(function, MethodType):
        return function.__self__
    return function


def is_ours(operation: object) -> bool:
    """Whether a trainer's operation, or a module's hook, is one of rlsync."""
    return type(owner_of(operation)).__module__.partition(".")[0] == "rlsync"


def optimizer_steps(trainer: Trainer, counted: int) -> int:
    """Optimizer steps of a trainer: the count of its stepper if it has one, else ``counted``."""
    # Trainer._optim_count counts one too many for each epoch that ends by StopIteration.
    stepper = trainer.optimization_stepper
    steps = getattr(stepper, "optimizer_step_count", None)
    if steps is None:
        return counted
    return int(steps)


def optimizers(trainer: Trainer) -> list[torch.optim.Optimizer]:
    """The optimizers of a trainer, its stepper and hooks, also in containers. Until Trainer shows them."""
    hooks = [_unwrapped(op) for op, _ in getattr(trainer, "_optimizer_ops", ())]
    owners = [trainer, trainer.optimization_stepper, *trainer._modules.values(), *hooks]
    attributes = [value for owner in owners for value in getattr(owner, "__dict__", {}).values()]
    by_id: dict[int, torch.optim.Optimizer] = {}
    for attribute in attributes:
        if isinstance(attribute, dict):
            values = attribute.values()
        else:
            values = attribute
        for value in values if isinstance(attribute, (list, tuple, dict)) else (attribute,):
            if isinstance(value, torch.optim.Optimizer):
                by_id[id(value)] = value
    return list(by_id.values())


def refuse_remote_learner(trainer: Trainer) -> None:
    """Refuse a trainer whose learner is in another process: its loss module here is not trained."""
    if trainer.learner_backend != "local":
        where = f"{type(trainer).__name__}(learner_backend={trainer.learner_backend!r})"
        cure = "use learner_backend='local'; TorchRL publishes remote learners by itself"
        raise ConfigError("the weights of this trainer are trained in another process", where, cure)


def refuse_idle_shards(trainer: Trainer) -> None:
    """Refuse networks that FSDP 2 shards and no step would change.

    Its hooks find no tensors in a tensordict, and functional losses use other parameters. Until TorchRL's
    losses do neither.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    loss = trainer.loss_module
    if fsdp is None or not isinstance(loss, nn.Module):
        return
    children = dict(loss.named_children())
    networks = {
        name: net for name, net in (vars(loss) | children).items() if isinstance(net, nn.Module)
    }
    for name, network in networks.items():
        functional = isinstance(children.get(f"{name}_params"), TensorDictParams)
        for path, module in network.named_modules(prefix=f"loss_module.{name}"):
            if not isinstance(module, fsdp.FSDPModule):
                continue
            below = [
                m for m in module.modules() if m is not module and isinstance(m, fsdp.FSDPModule)
            ]
            parameters = {*module.parameters()}.difference(*(m.parameters() for m in below))
            if isinstance(module, TensorDictModuleBase) and parameters:
                problem = "fully_shard does not train a module that takes a tensordict: it gets no gradients"
                cure = "shard the modules inside it that take tensors: fully_shard(policy.module[0].module)"
            elif functional:
                problem = (
                    "a functional loss cannot compute with a module that fully_shard has sharded"
                )
                cure = "build a PPO, A2C or REINFORCE loss with functional=False, or use parallelize_module"
            else:
                continue
            raise ConfigError(
                problem, f"{path}, {type(module).__name__} in {type(loss).__name__}", cure
            )


def replace_component(checkpoint: Checkpoint, name: str, component: object) -> None:
    """Write and read ``component`` under a name that is given away. Until it can be registered anew."""
    checkpoint._components.pop(name, None)
    checkpoint.register(name, component)


def registered_modules(trainer: Trainer) -> list[object]:
    """The modules that the trainer keeps in its checkpoints."""
    return list(trainer._modules.values())


def free_name(trainer: Trainer, name: str) -> str:
    """``name``, or the first of ``name_2``, ``name_3``, ... that no module of the trainer has."""
    names = chain([name], (f"{name}_{number}" for number in count(2)))
    return next(free for free in names if free not in trainer._modules)


def let_it_be_absent(trainer: Trainer, hook: TrainerHookBase) -> None:
    """Let checkpoints lack ``hook``, which then loads an empty dict. Until a module may be absent."""
    loading = getattr(vars(trainer).get("load_state_dict"), "__self__", None)
    if not isinstance(loading, _Loading):
        loading = _Loading(trainer)
        trainer.load_state_dict = loading.load_state_dict
        trainer.load_from_file = loading.load_from_file
    loading.may_be_absent.add(hook)


class _Loading:
    """How a trainer loads a checkpoint that may lack some of its modules."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = weakref.ref(trainer)
        self.may_be_absent: weakref.WeakSet[TrainerHookBase] = weakref.WeakSet()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        trainer = present(self._trainer, "trainer")
        with self._without_absent(trainer, state_dict):
            type(trainer).load_state_dict(trainer, state_dict)

    def load_from_file(self, file: str | Path, **kwargs: Any) -> Trainer:
        trainer = present(self._trainer, "trainer")
        if not Checkpoint.is_checkpoint(file):  # the other formats go through load_state_dict
            return type(trainer).load_from_file(trainer, file, **kwargs)
        components = Checkpoint.manifest(file)["components"]
        written = {
            name.removeprefix(_COMPONENT) for name in components if name.startswith(_COMPONENT)
        }
        with self._without_absent(trainer, written):
            return type(trainer).load_from_file(trainer, file, **kwargs)

    @contextmanager
    def _without_absent(self, trainer: Trainer, written: Collection[str]) -> Iterator[None]:
        modules = trainer._modules
        absent = {n: m for n, m in modules.items() if n not in written and m in self.may_be_absent}
        components = dict(_components(trainer))
        trainer._modules = {name: module for name, module in modules.items() if name not in absent}
        for name in absent:
            _components(trainer).pop(_COMPONENT + name, None)
        try:
            yield
        finally:
            trainer._modules = modules
            _put_back(trainer, components)
        for module in absent.values():
            module.load_state_dict({})


def bridge_for_trainer(collector: object) -> None:
    """Give a collector what ``Trainer.train`` asks for and its class lacks. Until its class has it."""
    if isinstance(collector, AsyncBatchedCollector):
        # The learner learns from the first batch on; workers that act at random count these frames alone.
        vars(collector).setdefault("init_random_frames", 0)
        if "getattr_rb" not in vars(collector):
            in_place_of(collector, "getattr_rb")(
                lambda self, attr: getattr(self.replay_buffer, attr)
            )
    elif isinstance(collector, Remote):
        shares = [
            arguments.get("init_random_frames", 0) for arguments in collector.collector_kwargs
        ]
        vars(collector).setdefault("init_random_frames", sum(max(0, share) for share in shares))
