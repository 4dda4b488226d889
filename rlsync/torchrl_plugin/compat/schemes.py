"""TorchRL's weight-sync schemes, the updates that go through them, and what holds the weights of a policy."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn
from torchrl.collectors import BaseCollector
from torchrl.collectors._multi_base import MultiCollector
from torchrl.data.utils import CloudpickleWrapper
from torchrl.envs import EnvBase
from torchrl.modules import RandomPolicy
from torchrl.weight_update import WeightSyncScheme

from rlsync.tensors.leaves import Leaves
from rlsync.torchrl_plugin.compat import in_place_of
from rlsync.torchrl_plugin.compat.collectors import has_own_policy_template
from rlsync.torchrl_plugin.compat.distributed import PolicyByValue


def schemes_of(collector: object) -> dict[str, WeightSyncScheme]:
    """The sender schemes of a collector by destination. Until collectors show them."""
    schemes: dict[str, WeightSyncScheme] | None = getattr(collector, "_weight_sync_schemes", None)
    return dict(schemes or {})


def forget_sender(scheme: WeightSyncScheme) -> None:
    """Let a scheme that a forked worker inherited be a receiver. Until ``init_on_receiver`` resets this."""
    scheme._initialized_on_sender = scheme._synchronized_on_sender = False
    scheme._context_ref = scheme._model_ref = None


def set_context(scheme: WeightSyncScheme, collector: object) -> None:
    """Set ``scheme.context`` as TorchRL does, for a subclass that overrides the property."""
    WeightSyncScheme.context.fset(scheme, collector)


def around_updates(
    collector: BaseCollector,
    enter: Callable[[Iterable[str], object], AbstractContextManager[object]],
) -> None:
    """Run ``update_policy_weights_`` inside ``enter(destinations, worker_ids)``: TorchRL sends one by one."""

    @in_place_of(collector, "_weight_update_impl")
    def update(self: BaseCollector, *args: Any, **kwargs: Any) -> object:
        with enter(kwargs.get("weights_dict") or (), kwargs.get("worker_ids")):
            return type(self)._weight_update_impl(self, *args, **kwargs)


_WITHOUT_WEIGHTS = nn.Module()  #: stands for a policy that holds no weights


def weights_of(policy: object) -> object:
    """What holds a policy's weights: itself, or a module without leaves if it can have none."""
    if isinstance(policy, CloudpickleWrapper):
        return weights_of(policy.fn)
    random = policy is None or isinstance(policy, RandomPolicy)
    if random or _holds_none(policy):
        return _WITHOUT_WEIGHTS
    return policy


def send_whole_if_meta_changes_it(collector: MultiCollector) -> None:
    """Send a policy as it is, before the start, where the meta device would change it.

    If it is no module, or if a weight is of a class of which the meta device may make a plain tensor. Until
    ``_make_meta_policy_cm`` does.
    """
    policy = collector.policy
    if not has_own_policy_template(collector):
        return
    if not isinstance(policy, nn.Module):
        collector.policy_factory = [partial(_given, policy)] * collector.num_workers
    elif Leaves(policy, "the collector's policy").has_parts:
        collector.policy_factory = [PolicyByValue(policy)] * collector.num_workers


def _given(policy: object) -> object:
    return policy


def _holds_none(policy: object) -> bool:
    """Whether ``policy`` is a function, or a method of an environment, that refers to no weights."""
    if isinstance(policy, MethodType):
        return isinstance(policy.__self__, EnvBase)
    if not isinstance(policy, FunctionType):
        return False
    used = inspect.getclosurevars(policy)
    for value in (*used.nonlocals.values(), *used.globals.values()):
        if isinstance(value, nn.Module | Tensor):
            return False
    return True
