"""Small networks, and the policy of workers whose weights have a dtype of their own."""

from __future__ import annotations

import copy

import torch
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from torchrl.modules import MLP

from rlsync.recipes.sync_settings import SyncConfig
from rlsync.tensors.layout import dtype_named


class MixedMLP(MLP):
    """An MLP that computes in the dtype of its weights and returns float32."""

    def forward(self, *inputs: Tensor) -> Tensor:
        dtype = self[0].weight.dtype  # functional calls put plain tensors in the parameters' place
        return super().forward(*(tensor.to(dtype) for tensor in inputs)).float()


def mlp(
    features: int, outputs: int, hidden: list[int], *, last_gain: float, activation: type[nn.Module] = nn.Tanh
) -> MixedMLP:
    """A network with orthogonal weights. A small ``last_gain`` makes its first outputs small."""
    net = MixedMLP(in_features=features, out_features=outputs, num_cells=hidden, activation_class=activation)
    layers = [layer for layer in net if isinstance(layer, nn.Linear)]
    for layer in layers:
        nn.init.orthogonal_(layer.weight, 2**0.5)
        nn.init.zeros_(layer.bias)
    nn.init.orthogonal_(layers[-1].weight, last_gain)
    return net


def workers_dtype(sync: SyncConfig) -> torch.dtype | None:
    """The dtype in which workers hold their networks, if the sync map declares one."""
    return next((dtype_named(route.dtype) for route in sync.map if route.dtype), None)


def workers_policy(sync: SyncConfig, policy: TensorDictModuleBase) -> TensorDictModuleBase:
    """What workers act with: ``policy``, or a copy whose networks have the dtype that the map declares."""
    dtype = workers_dtype(sync)
    if dtype is None:
        return policy
    policy = copy.deepcopy(policy)
    for module in policy.modules():
        if isinstance(module, MixedMLP):
            module.to(dtype)
    return policy
