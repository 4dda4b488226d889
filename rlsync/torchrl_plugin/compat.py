"""Everything that leans on a TorchRL private, with the version it was read from and what lets it go.

All of it was written against torchrl 0.14.1 (2026-11). Nothing else in rlsync touches a name of TorchRL's
that begins with an underscore.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
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

    Private because 0.14 has no accessor; goes when collectors offer one.
    """
    held = getattr(collector, "_weight_sync_schemes", None)
    return dict(held) if held else {}


def has_own_policy_template(collector: MultiCollector) -> bool:
    """Whether the workers' policy is built from ``collector.policy`` (and not by a policy_factory)."""
    return collector.policy is not None and not any(collector.policy_factory)


def turn_on_stamps(collector: MultiCollector) -> None:
    """Make the workers write ``policy_version`` on every frame.

    Called while the collector is being constructed, before the workers start: they are told to track
    versions when the parent has a tracker.
    """
    if collector.policy_version_tracker is None:
        collector.policy_version_tracker = PolicyVersion()
    buffer = collector.replay_buffer
    if isinstance(buffer, ReplayBuffer):
        laid_out = getattr(buffer._storage, "_storage", None)
        if isinstance(laid_out, TensorDictBase):
            _make_room_for_stamps(laid_out)
            buffer._storage._storage_keys = None  # which keys it keeps: found once, and cached


def _make_room_for_stamps(laid_out: TensorDictBase) -> None:
    """Add what the storage of a replay buffer lacks to hold the stamps.

    MultiCollector lays a lazy storage out from an environment without the tracker, and the storage then
    drops the root's stamp in silence. Goes when it lays out what the workers write.
    """
    missing = [key for key in (STAMP, ("next", STAMP)) if key not in laid_out.keys(True, True)]
    like = laid_out.get(("collector", "traj_ids"), None)
    if missing and like is None:
        raise ConfigError(
            f"the replay buffer is laid out without room for {missing[0]!r}",
            "replay_buffer of the collector",
            "pass an empty lazy storage, or give it int64 fields for the stamps",
        )
    is_memmap = laid_out.is_memmap()  # unlocking makes it forget
    for key in missing:
        if is_memmap:
            laid_out.make_memmap(key, shape=like.shape, dtype=torch.int64)
        else:
            with laid_out.unlock_():
                laid_out.set(key, torch.zeros(like.shape, dtype=torch.int64).share_memory_())


def announce_version(collector: object, version: int) -> None:
    """Let ``collector.policy_version`` of the learner's side name the newest published version."""
    tracker = getattr(collector, "policy_version_tracker", None)
    if isinstance(tracker, PolicyVersion):
        tracker.version = version


def stamp(collector: Collector, version: int) -> None:
    """Make the frames of the coming rollout carry ``version``, the first one's root included.

    The tracker writes ``("next", "policy_version")``; the root of a batch's first frame was written with
    the last frame of the batch before, under the version that acted then.
    """
    tracker = collector.policy_version_tracker
    if not isinstance(tracker, PolicyVersion):
        return
    tracker.version = version
    written = collector._carrier.get(STAMP, None)
    if isinstance(written, torch.Tensor):
        collector._carrier.set(STAMP, torch.full_like(written, version))


def drop_first_weights(collector: Collector) -> None:
    """Let go of the memory that the policy of a worker's collector had when this was constructed.

    ``Collector.policy_weights`` holds it for weight updaters of the learner's side, which a worker's
    collector does not have; where a policy was pointed to other memory it would keep one copy too many.
    An empty one is what TorchRL itself sets for policies that are no modules.
    """
    collector.policy_weights = TensorDict()


def runs_compiled(collector: Collector) -> bool:
    """Whether the collector compiles its policy, or records it as a CUDA graph.

    Such code does not see a parameter whose ``.data`` was pointed elsewhere.
    """
    return bool(collector.compiled_policy or collector.cudagraphed_policy)


def collects_in_the_background(collector: object) -> bool:
    """Whether workers go on collecting while the learner has a batch in hand."""
    return isinstance(collector, MultiAsyncCollector) or bool(getattr(collector, "_running_free", False))


def is_stamped(collector: object) -> bool:
    """Whether the frames of this collector carry ``policy_version``."""
    return isinstance(getattr(collector, "policy_version_tracker", None), PolicyVersion)


def around_rollouts(
    collector: Collector, enter: Callable[[Collector], AbstractContextManager[object]]
) -> None:
    """Run every rollout of ``collector`` inside ``enter(collector)``, in the thread that acts.

    ``rollout`` and not ``pre_collect_hook``: a hook that the user sets later would take our place in
    silence. The instance holds no reference to itself, so that it still goes when the user drops it.
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

    It sends the destinations of a ``weights_dict`` one by one; inside, they become one publish or none.
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
    """Take the built-in UpdateWeights hooks off a trainer; returns the stages they stood at.

    Trainer wraps each op in a timing function that keeps it as ``__wrapped__``. Goes when stock trainers
    take the hook as an argument.
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
    """TorchRL's UpdateWeights hooks of a trainer, also those that were given to ``register_op``.

    Trainer offers no way to list its ops. Goes when it does.
    """
    ops = [*trainer._post_steps_ops, *trainer._post_optim_ops]
    return [hook for op in ops if isinstance(hook := _unwrapped(op[0]), StockUpdateWeights)]


def _unwrapped(op: Any) -> object:
    return getattr(op, "__wrapped__", op)


def optimizer_steps(trainer: Trainer, counted: int) -> int:
    """Optimizer steps of a trainer: its stepper's own count where it keeps one, else ``counted``.

    ``Trainer._optim_count`` counts one too many for each epoch that ends by StopIteration.
    """
    stepper = trainer.optimization_stepper
    own = getattr(stepper, "optimizer_step_count", None)
    return counted if own is None else int(own)


def says_a_worker_died(error: RuntimeError) -> bool:
    """Whether TorchRL raised ``error`` because it found a worker process dead."""
    return str(error).startswith("At least one process failed")


def optimizers(trainer: Trainer) -> list[torch.optim.Optimizer]:
    """The optimizers of a trainer: its own, its stepper's, and those of hooks that it knows.

    Goes when Trainer has an accessor for all of them.
    """
    owners = [trainer, trainer.optimization_stepper, *trainer._modules.values()]
    held = [value for owner in owners for value in getattr(owner, "__dict__", {}).values()]
    return list({id(o): o for o in held if isinstance(o, torch.optim.Optimizer)}.values())


def registered_modules(trainer: Trainer) -> list[object]:
    """What the trainer keeps in its checkpoints."""
    return list(trainer._modules.values())


def refuse_remote_learner(trainer: Trainer) -> None:
    """Refuse a trainer whose learner is elsewhere: its loss module here holds no trained weights."""
    if trainer.learner_backend != "local":
        raise ConfigError(
            "the weights of this trainer are trained in another process",
            f"{type(trainer).__name__}(learner_backend={trainer.learner_backend!r})",
            "use learner_backend='local'; TorchRL publishes remote learners by itself",
        )


def runs_free(collector: MultiCollector) -> bool:
    """Whether its workers fill a replay buffer by themselves, after ``start()`` and outside ``pause()``."""
    return bool(collector._running_free)


def wrap_write_lock(collector: MultiCollector, wrap: Callable[[Any], object]) -> None:
    """Put ``wrap(lock)`` in the place of the lock of a replay buffer that is shared, if there is one."""
    buffer = collector.replay_buffer
    if isinstance(buffer, ReplayBuffer) and buffer.shared:
        buffer._write_lock = wrap(buffer._write_lock)
