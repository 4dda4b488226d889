"""What TorchRL's collector does while it is built in a worker, where that and a version on each frame clash.

A worker is a process of TorchRL's own. Both functions change TorchRL in this process alone, and only once.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

from torch import nn
from torchrl.collectors import Collector, _single
from torchrl.data import Composite
from torchrl.envs import TransformedEnv, utils
from torchrl.envs.batched_envs import BatchedEnvBase

from rlsync.torchrl_plugin.compat.stamps import STAMP

_stock_tracking = Collector._setup_policy_version_tracking


def make_room_for_the_stamp() -> None:
    """Let a collector of this process carry stamps with any policy and any environment.

    Call this in a worker, before its collector has wrapped its policy.
    """
    if Collector._setup_policy_version_tracking is _stock_tracking:
        _call_policies_without_the_stamp()
        _track_versions_of_batched_envs()


def _call_policies_without_the_stamp() -> None:
    """Do not call a plain ``nn.Module`` with ``policy_version`` when a collector wraps it.

    The collector calls such a policy once, with every observation as a keyword. The stamp is an observation,
    too, and a ``forward`` that does not know it would end the worker. Written against torchrl 0.14.1. Remove
    this when ``_make_compatible_policy`` gives a policy the arguments that its signature names.
    """
    stock = utils._make_compatible_policy

    @functools.wraps(stock)
    def without_the_stamp(policy: Any, observation_spec: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(observation_spec, Composite) and not _takes_the_stamp(policy):
            shape, device = observation_spec.shape, observation_spec.device
            named = {key: spec for key, spec in observation_spec.items() if key != STAMP}
            observation_spec = Composite(named, shape=shape, device=device)
        return stock(policy, observation_spec, *args, **kwargs)

    _single._make_compatible_policy = without_the_stamp


def _takes_the_stamp(policy: object) -> bool:
    return isinstance(policy, nn.Module) and STAMP in inspect.signature(policy.forward).parameters


def _track_versions_of_batched_envs() -> None:
    """Wrap a ParallelEnv or a SerialEnv, so that the tracker of versions can be appended to it.

    TorchRL refuses to track versions on them. On a TransformedEnv around one it does. Written against torchrl
    0.14.1. Remove this when it tracks versions on both.
    """

    @functools.wraps(_stock_tracking)
    def track(self: Collector, track_policy_version: Any) -> None:
        if track_policy_version and isinstance(self.env, BatchedEnvBase):
            self.env = TransformedEnv(self.env)
        _stock_tracking(self, track_policy_version)

    Collector._setup_policy_version_tracking = track
