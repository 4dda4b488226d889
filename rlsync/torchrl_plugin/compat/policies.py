"""The policies of TorchRL's collectors, and what holds their weights."""

from __future__ import annotations

import inspect
from functools import partial
from types import FunctionType, MethodType

from torch import Tensor, nn
from torchrl.collectors._multi_base import MultiCollector
from torchrl.data.utils import CloudpickleWrapper
from torchrl.envs import EnvBase
from torchrl.modules import RandomPolicy

from rlsync.torchrl_plugin.compat.collectors import has_own_policy_template

#: Stands for a policy that holds no weights.
_WITHOUT_WEIGHTS = nn.Module()


def weights_of(policy: object) -> object:
    """What holds the weights of a policy: itself, or a module without leaves if it has none.

    TorchRL's random policy has none, and a worker that is given no policy acts with one, although its
    collector's ``policy`` is ``None``. A function has none if it refers to no module and to no tensor, and a
    method of an environment, such as ``env.rand_action``, has none.
    """
    if isinstance(policy, CloudpickleWrapper):
        return weights_of(policy.fn)
    random = policy is None or isinstance(policy, RandomPolicy)
    return _WITHOUT_WEIGHTS if random or _holds_none(policy) else policy


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


def _holds_none(policy: object) -> bool:
    """Whether ``policy`` is a function, or a method of an environment, that refers to no weights."""
    if isinstance(policy, MethodType):
        return isinstance(policy.__self__, EnvBase)
    if not isinstance(policy, FunctionType):
        return False
    used = inspect.getclosurevars(policy)
    values = (*used.nonlocals.values(), *used.globals.values())
    return not any(isinstance(value, nn.Module | Tensor) for value in values)
