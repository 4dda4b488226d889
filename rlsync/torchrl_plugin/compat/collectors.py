"""TorchRL's collectors: how they act, what they hold, and the devices that they know."""

from __future__ import annotations

import os
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from importlib import import_module
from typing import Any, NoReturn, Protocol

from tensordict import TensorDictBase
from torch import nn
from torchrl._utils import _get_mp_ctx
from torchrl.collectors import Collector, MultiAsyncCollector
from torchrl.collectors._multi_base import MultiCollector
from torchrl.data import ReplayBuffer
from torchrl.envs import EnvBase, EnvCreator, ExplorationType, set_exploration_type

from rlsync.core.errors import BoardClosed
from rlsync.sync.families import end_group, lead_group
from rlsync.torchrl_plugin.compat import distributed, in_place_of, present_method
from rlsync.torchrl_plugin.compat.frames import FramesWatch


def has_own_policy_template(collector: MultiCollector) -> bool:
    """Whether the workers' policy is built from ``collector.policy``, and not by a policy_factory."""
    return collector.policy is not None and not any(collector.policy_factory)


def start_method() -> str:
    """How the next process collector starts its workers."""
    method: str = _get_mp_ctx().get_start_method()
    return method


def runs_compiled(collector: Collector) -> bool:
    """Whether the policy is compiled, or a CUDA graph: such code does not see a parameter's new memory."""
    return bool(collector.compiled_policy or collector.cudagraphed_policy)


def freezes_weights(collector: Collector) -> bool:
    """Whether the compiler writes the present weights into the policy's code: inductor's ``freezing``."""
    chosen = collector.compiled_policy_kwargs
    if not collector.compiled_policy or chosen.get("backend", "inductor") != "inductor":
        return False
    loaded = sys.modules.get("torch._inductor.config")  # seconds, where nobody has compiled
    if loaded is None:
        freezes = os.environ.get("TORCHINDUCTOR_FREEZING") == "1"
    else:
        freezes = loaded.freezing
    return bool((chosen.get("options") or {}).get("freezing", freezes))


def collects_in_the_background(collector: object) -> bool:
    """Whether the workers collect while the learner uses a batch."""
    if isinstance(collector, distributed.ActorWorkers):
        return collector.in_flight
    if isinstance(collector, distributed.DistributedWorkers):
        collector = collector.collector
    if isinstance(collector, distributed.Remote):
        return not distributed.waits_for_learner(collector)
    if isinstance(collector, MultiAsyncCollector):
        return True
    return isinstance(collector, MultiCollector) and runs_free(collector)


def around_rollouts(
    collector: Collector, enter: Callable[[Collector], AbstractContextManager[object]]
) -> None:
    """Run every rollout inside ``enter(collector)``, in the thread that acts.

    Not by ``pre_collect_hook``, which a hook of the user's would replace. An LLMCollector's ``rollout`` is a
    property, which returns one of several methods: that one is wrapped. ConfigError in the first ones, if
    frames change later.
    """
    frames = FramesWatch()
    if isinstance(type(collector).rollout, property):
        name = collector.rollout.__name__
    else:
        name = "rollout"

    @in_place_of(collector, name)
    def rollout(self: Collector) -> object:
        with enter(self), frames.rollout(self):
            return getattr(type(self), name)(self)


def acts_ahead(collector: Collector) -> bool:
    """Whether the first actions of a rollout are computed in the one before: an LLMCollector's async pool."""
    return bool(getattr(collector, "async_envs", False))


def around_policy_calls(
    collector: Collector,
    before: Callable[[Collector], None],
    after: Callable[[TensorDictBase], TensorDictBase],
) -> None:
    """Call ``before(collector)`` and ``after(result)`` around each policy call. Until there is a hook."""
    policy = collector._wrapped_policy

    # Around the policy that was compiled, not inside it, so that compiled code is not traced anew.
    @in_place_of(collector, "_wrapped_policy_maybe_compiled")
    def call(self: Collector, tensordict: TensorDictBase) -> TensorDictBase:
        before(self)
        return after(policy(tensordict))


def around_arrivals(
    collector: MultiAsyncCollector, call: Callable[[int, TensorDictBase], object]
) -> None:
    """Call ``call(worker, frames)`` for each rollout that arrives. Until batches name their worker."""
    inner = present_method(collector, "_get_from_queue")

    def get(timeout: float | None = None) -> tuple[int, int, TensorDictBase]:
        arrived: tuple[int, int, TensorDictBase] = inner(timeout=timeout)
        worker, _, frames = arrived
        call(worker, frames)
        return arrived

    collector._get_from_queue = get


def let_arrive(collector: MultiCollector, order: Iterable[int]) -> None:
    """Let asynchronous rollouts arrive in this order; early ones wait. After the last one: BoardClosed."""
    workers = iter(order)
    early = defaultdict[int, deque[tuple[int, int, TensorDictBase]]](deque)
    expected = next(workers, None)

    @in_place_of(collector, "_get_from_queue")
    def get(self: MultiCollector, timeout: float | None = None) -> tuple[int, int, TensorDictBase]:
        nonlocal expected
        if expected is None:
            raise BoardClosed(
                "the recorded rollouts are used up", "rerun", "it ends where the record ends"
            )
        while not early[expected]:
            arrived = type(self)._get_from_queue(self, timeout=timeout)
            early[arrived[0]].append(arrived)
        first = early[expected].popleft()
        expected = next(workers, None)
        return first


def policy_of(collector: object) -> nn.Module | None:
    """The module that a collector of this process calls in each step, not compiled; None if there is none."""
    if isinstance(collector, Collector):
        policy = collector._wrapped_policy_uncompiled
    else:
        policy = None
    if isinstance(policy, nn.Module):
        return policy
    return None


Change = Callable[[TensorDictBase], TensorDictBase]


class PolicyCall(Protocol):
    def __call__(
        self, change: Change, *, explores: bool = False
    ) -> tuple[TensorDictBase, TensorDictBase]:
        """Call a policy on its next input, as ``change`` changes it. Returns the input and the output."""


def policy_call(collector: Collector) -> PolicyCall | str:
    """What calls the policy on a copy of the next rollout's first observation, or why nobody can.

    Without exploration or as rollouts explore. Call it before the policy's calls are wrapped. For torchrl
    0.14.1.
    """
    if isinstance(type(collector).rollout, property):
        return "a call of a language model generates a whole answer"
    if collector.cudagraphed_policy:
        return "the policy is recorded as a CUDA graph"
    policy = collector._wrapped_policy

    def call(change: Change, *, explores: bool = False) -> tuple[TensorDictBase, TensorDictBase]:
        policy_input = change(collector._carrier.clone())
        if collector._cast_to_policy_device and collector.policy_device is not None:
            policy_input = policy_input.to(collector.policy_device)
        if explores:
            exploration = collector.exploration_type
        else:
            exploration = ExplorationType.DETERMINISTIC
        with set_exploration_type(exploration):
            return policy_input, policy(policy_input.copy())

    return call


@contextmanager
def before_policy_calls(collector: Collector, call: Callable[[], None]) -> Iterator[None]:
    """Call ``call()`` before each call of the policy in the block."""
    policy = collector._wrapped_policy

    def after(tensordict: TensorDictBase) -> TensorDictBase:
        call()
        return policy(tensordict)

    collector._wrapped_policy_maybe_compiled = after
    try:
        yield
    finally:
        collector._wrapped_policy_maybe_compiled = policy


def before_state_dict(collector: Collector, call: Callable[[Collector], None]) -> None:
    """Call ``call(collector)`` before each ``state_dict()`` of ``collector``."""

    @in_place_of(collector, "state_dict")
    def state_dict(self: Collector) -> object:
        call(self)
        return type(self).state_dict(self)


def after_load_state_dict(
    collector: MultiCollector, call: Callable[[Mapping[str, Any]], None]
) -> None:
    """Call ``call(state_dict)`` after ``collector`` has loaded a state dict into its workers."""

    @in_place_of(collector, "load_state_dict")
    def load_state_dict(self: MultiCollector, state_dict: Mapping[str, Any]) -> None:
        type(self).load_state_dict(self, state_dict)
        call(state_dict)


def runs_free(collector: MultiCollector) -> bool:
    """Whether its workers fill a replay buffer now: after ``start()``, and not inside ``pause()``."""
    return bool(collector._running_free)


def fail_free_run(collector: MultiCollector, error: Exception) -> None:
    """Raise ``error`` where Trainer asks again and again how many frames free-running workers wrote."""

    def getattr_rb(attr: str) -> NoReturn:
        raise error

    if runs_free(collector):
        collector.getattr_rb = getattr_rb


def wrap_write_lock(collector: MultiCollector, wrap: Callable[[Any], object]) -> None:
    """Replace the lock of a shared replay buffer, if there is one, by ``wrap(lock)``."""
    buffer = collector.replay_buffer
    if isinstance(buffer, ReplayBuffer) and buffer.shared:
        buffer._write_lock = wrap(buffer._write_lock)


#: How TorchRL's errors about dead processes begin: those of process collectors, then AsyncBatchedCollector's.
_DEATHS = (
    "At least one process failed",
    "The inference server died",
    "An environment worker process exited",
    "Environment worker process exited",
    "All collector workers exited",
)


def says_a_worker_died(error: RuntimeError) -> bool:
    """Whether TorchRL raised ``error`` because it found a worker process dead."""
    return str(error).startswith(_DEATHS)


def around_env_makers(
    collector: MultiCollector, wrap: Callable[[int, Callable[..., Any]], Callable[..., Any]]
) -> None:
    """Let workers, which have not started, make environments by ``wrap(worker, make)``."""
    makers = []
    for worker, make in enumerate(collector.create_env_fn):
        # TorchRL looks into an environment, and into an EnvCreator
        if isinstance(make, (EnvBase, EnvCreator)):
            makers.append(make)
        else:
            makers.append(wrap(worker, make))
    collector.create_env_fn = makers


def lead_groups(collector: MultiCollector) -> None:
    """Let each worker lead a process group of its own. Call this before its workers start."""
    collector._worker_init_fn = partial(_lead_and_then, collector._worker_init_fn)


def _lead_and_then(users: Callable[[], None] | None) -> None:
    lead_group()
    if users is not None:
        users()


def end_groups(collector: MultiCollector) -> None:
    """Let what workers start end with them, when a shutdown closes the queue. Until TorchRL does so."""
    workers = list(collector.procs)
    queue = collector.queue_out
    ours = os.getpid()
    close_it = queue.close

    def close() -> None:
        del queue.close  # a cycle
        try:
            close_it()
        finally:
            while workers and os.getpid() == ours:
                end_group(workers.pop())

    queue.close = close


def why_not_ready(message: object) -> tuple[Exception, str] | None:
    """The error in a worker's first ``message``; None if it is ready, or TorchRL raises the error again."""
    if (
        not isinstance(message, dict)
        or str(message["exception_module"]).partition(".")[0] == "rlsync"
    ):
        return None
    name = str(message["exception_type"])
    text = str(message["exception_msg"])
    error: object = None
    with suppress(Exception):  # the class may be one of a function, or take other arguments
        error = getattr(import_module(message["exception_module"]), name)(text)
    if not isinstance(error, Exception):
        error = RuntimeError(f"{name}: {text}")
    return error, str(message["traceback"])
