"""All uses of TorchRL's private names: what each is for, and when it can be removed.

All of it was written against torchrl 0.14.1 (2026-11). No other module of rlsync reads or writes an attribute
of TorchRL whose name begins with an underscore; tests/test_torchrl_privates.py looks for them. The one
exception is TorchRL's interface for weight-sync schemes, which has such names: BoardScheme overrides
_init_on_sender_impl, _init_on_receiver_impl, _setup_connection_and_weights_on_sender_impl and
_setup_connection_and_weights_on_receiver_impl.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.checkpoint import Checkpoint
from torchrl.collectors import Collector, MultiAsyncCollector
from torchrl.collectors._multi_base import MultiCollector
from torchrl.data import ReplayBuffer
from torchrl.envs.llm.transforms.policy_version import PolicyVersion
from torchrl.trainers import Trainer
from torchrl.trainers import UpdateWeights as StockUpdateWeights
from torchrl.weight_update import WeightSyncScheme

from rlsync.core.errors import ConfigError

__all__ = ["Collector", "MultiCollector", "StockUpdateWeights", "Trainer", "WeightSyncScheme"]

STAMP = "policy_version"


def schemes_of(collector: object) -> dict[str, WeightSyncScheme]:
    """The sender schemes of a collector by destination.

    TorchRL 0.14 has no public accessor. Remove this function when collectors have one.
    """
    held = getattr(collector, "_weight_sync_schemes", None)
    return dict(held) if held else {}


def forget_sender(scheme: WeightSyncScheme) -> None:
    """Reset a scheme that a forked worker inherited from the learner, so that it can be a receiver.

    Pickled schemes arrive without this state. Goes when ``init_on_receiver`` resets it in all cases.
    """
    scheme._initialized_on_sender = scheme._synchronized_on_sender = False
    scheme._context_ref = scheme._model_ref = None


def set_context(scheme: WeightSyncScheme, collector: object) -> None:
    """Set ``scheme.context`` as TorchRL does, for a subclass that overrides the property."""
    WeightSyncScheme.context.fset(scheme, collector)


def has_own_policy_template(collector: MultiCollector) -> bool:
    """Whether the workers' policy is built from ``collector.policy``, and not by a policy_factory."""
    return collector.policy is not None and not any(collector.policy_factory)


def turn_on_stamps(collector: MultiCollector) -> None:
    """Make the workers write ``policy_version`` on every frame.

    Call this while the collector is being constructed, before its workers start. The workers track versions
    if the learner's collector has a tracker.
    """
    if collector.policy_version_tracker is None:
        collector.policy_version_tracker = PolicyVersion()
    buffer = collector.replay_buffer
    if isinstance(buffer, ReplayBuffer):
        laid_out = getattr(buffer._storage, "_storage", None)
        if isinstance(laid_out, TensorDictBase):
            _make_room_for_stamps(laid_out)
            buffer._storage._storage_keys = None  # TorchRL's cache of the keys that the storage keeps


def _make_room_for_stamps(laid_out: TensorDictBase) -> None:
    """Add the fields for the stamps to the storage of a replay buffer.

    MultiCollector lays out a lazy storage from an environment without the tracker. The storage then drops
    the root's stamp without an error. Remove this when TorchRL lays out what the workers write.
    """
    missing = [key for key in (STAMP, ("next", STAMP)) if key not in laid_out.keys(True, True)]
    like = laid_out.get(("collector", "traj_ids"), None)
    if missing and like is None:
        raise ConfigError(
            f"the replay buffer is laid out without room for {missing[0]!r}",
            "replay_buffer of the collector",
            "pass an empty lazy storage, or give it int64 fields for the stamps",
        )
    is_memmap = laid_out.is_memmap()  # ask now: after unlocking, it says no
    for key in missing:
        if is_memmap:
            laid_out.make_memmap(key, shape=like.shape, dtype=torch.int64)
        else:
            with laid_out.unlock_():
                laid_out.set(key, torch.zeros(like.shape, dtype=torch.int64).share_memory_())


def announce_version(collector: object, version: int) -> None:
    """Set ``collector.policy_version`` in the learner's process to the newest published version."""
    tracker = getattr(collector, "policy_version_tracker", None)
    if isinstance(tracker, PolicyVersion):
        tracker.version = version


def stamp(collector: Collector, version: int) -> None:
    """Make all frames of the next rollout carry ``version``, including the root of the first frame.

    The tracker writes only ``("next", "policy_version")``. The root of a batch's first frame was written with
    the last frame of the batch before. So it still holds the version that acted then.
    """
    tracker = collector.policy_version_tracker
    if not isinstance(tracker, PolicyVersion):
        return
    tracker.version = version
    written = collector._carrier.get(STAMP, None)
    if isinstance(written, torch.Tensor):
        collector._carrier.set(STAMP, torch.full_like(written, version))


def drop_first_weights(collector: Collector) -> None:
    """Release the first memory of the policy of a worker's collector.

    ``Collector.policy_weights`` refers to this memory, for weight updaters that only the learner's collector
    has. In a worker whose policy now points to the board, it would keep an extra copy of the weights alive.
    TorchRL itself sets an empty TensorDict for policies that are not modules.
    """
    collector.policy_weights = TensorDict()


def runs_compiled(collector: Collector) -> bool:
    """Whether the collector compiles its policy, or records it as a CUDA graph.

    Such code does not see a parameter whose ``.data`` was pointed to other memory.
    """
    return bool(collector.compiled_policy or collector.cudagraphed_policy)


def collects_in_the_background(collector: object) -> bool:
    """Whether the workers collect while the learner uses a batch."""
    return isinstance(collector, MultiAsyncCollector) or bool(getattr(collector, "_running_free", False))


def is_stamped(collector: object) -> bool:
    """Whether the frames of this collector carry ``policy_version``."""
    return isinstance(getattr(collector, "policy_version_tracker", None), PolicyVersion)


def around_rollouts(
    collector: Collector, enter: Callable[[Collector], AbstractContextManager[object]]
) -> None:
    """Run every rollout of ``collector`` inside ``enter(collector)``, in the thread that acts.

    This wraps ``rollout`` and does not use ``pre_collect_hook``, because a hook that the user sets later
    would replace ours without an error. The wrapper holds only a weak reference to the collector, so that
    the collector is freed when the user drops it.
    """
    ref = weakref.ref(collector)

    def rollout() -> Any:
        self = ref()
        if self is None:
            raise ReferenceError("the collector is gone")
        with enter(self):
            return type(self).rollout(self)

    collector.rollout = rollout


def around_updates(
    collector: MultiCollector, enter: Callable[[Iterable[str]], AbstractContextManager[object]]
) -> None:
    """Run every ``update_policy_weights_`` of ``collector`` inside ``enter(destinations)``.

    TorchRL sends the destinations of a ``weights_dict`` one by one. Inside ``enter``, they become one
    publish, or none.
    """
    ref = weakref.ref(collector)

    def update(*args: Any, **kwargs: Any) -> Any:
        self = ref()
        if self is None:
            raise ReferenceError("the collector is gone")
        with enter(kwargs.get("weights_dict") or ()):
            return type(self)._weight_update_impl(self, *args, **kwargs)

    collector._weight_update_impl = update


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


def says_a_worker_died(error: RuntimeError) -> bool:
    """Whether TorchRL raised ``error`` because it found a worker process dead."""
    return str(error).startswith("At least one process failed")


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


def runs_free(collector: MultiCollector) -> bool:
    """Whether its workers fill a replay buffer now: after ``start()``, and not inside ``pause()``."""
    return bool(collector._running_free)


def wrap_write_lock(collector: MultiCollector, wrap: Callable[[Any], object]) -> None:
    """Replace the lock of a shared replay buffer, if there is one, by ``wrap(lock)``."""
    buffer = collector.replay_buffer
    if isinstance(buffer, ReplayBuffer) and buffer.shared:
        buffer._write_lock = wrap(buffer._write_lock)
