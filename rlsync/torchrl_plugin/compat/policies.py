"""The policies of TorchRL's collectors, and what holds their weights."""

from __future__ import annotations

import inspect
from functools import partial
from types import FunctionType

from torch import Tensor, nn
from torchrl.collectors._multi_base import MultiCollector
from torchrl.data.utils import CloudpickleWrapper
from torchrl.modules import RandomPolicy

from rlsync.torchrl_plugin.compat.collectors import has_own_policy_template

#: Stands for a policy that holds no weights.
_WITHOUT_WEIGHTS = nn.Module()


def weights_of(policy: object) -> object:
    """What holds the weights of a policy: itself, or a module without leaves if it has none.

    TorchRL's random policy has none, and a worker that is given no policy acts with one, although its
    collector's ``policy`` is ``None``. A function has none if it refers to no module and to no tensor.
    """
    if isinstance(policy, CloudpickleWrapper):
        return weights_of(policy.fn)
    random = policy is None or isinstance(policy, RandomPolicy)
    return _WITHOUT_WEIGHTS if random or _is_plain_function(policy) else policy


def send_whole_if_no_module(collector: MultiCollector) -> None:
    """Let workers receive a policy that is no module, such as a RandomPolicy, as it is.

    With a scheme, TorchRL sends the workers a policy without its memory, and fails for want of parameters if
    the policy is no ``nn.Module``. Call this before the workers start. Written against torchrl 0.14.1. Remove
    it when ``_make_meta_policy_cm`` takes any policy.
    """
    if has_own_policy_template(collector) and not isinstance(collector.policy, nn.Module):
        collector.policy_factory = [partial(_given, collector.policy)] * collector.num_workers


def _given(policy: object) -> object:
    return policy


def _is_plain_function(policy: object) -> bool:
    if not isinstance(policy, FunctionType):
        return False
    used = inspect.getclosurevars(policy)
    return not any(
        isinstance(value, nn.Module | Tensor) for value in (*used.nonlocals.values(), *used.globals.values())
    )
