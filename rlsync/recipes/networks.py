"""Small networks, policies that call them with plain tensors, and workers' policies of another dtype."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictModuleBase, TensorDictSequential, skip_existing
from torch import Tensor, nn
from torchrl import modules
from torchrl.envs.utils import ExplorationType, exploration_type
from torchrl.modules.distributions.utils import safetanh_noeps

from rlsync.recipes.sync_settings import SyncConfig
from rlsync.tensors.layout import dtype_named


class MixedMLP(modules.MLP):
    """An MLP that computes in the dtype of its weights and returns float32."""

    def forward(self, *inputs: Tensor) -> Tensor:
        dtype = self[0].weight.dtype  # functional calls put plain tensors in the parameters' place
        return super().forward(*(tensor.to(dtype) for tensor in inputs)).float()


class NormedLinear(nn.Sequential):
    """A linear layer behind a batch normalisation, with the numbers of CrossQ's authors."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = True) -> None:
        norm = nn.BatchNorm1d(inputs, eps=1e-3, momentum=0.01)
        norm.num_batches_tracked = None  # it counts for nothing beside a momentum
        super().__init__(norm, nn.Linear(inputs, outputs, bias))

    @property
    def weight(self) -> Any:
        return self[1].weight


def mlp(
    features: int,
    outputs: int,
    hidden: list[int],
    *,
    last_gain: float,
    activation: type[nn.Module] = nn.Tanh,
    **options: Any,
) -> MixedMLP:
    """A network with orthogonal weights. A small ``last_gain`` makes its first outputs small."""
    net = MixedMLP(features, outputs, num_cells=hidden, activation_class=activation, **options)
    layers = [layer for layer in net.modules() if isinstance(layer, nn.Linear)]
    for layer in layers:
        nn.init.orthogonal_(layer.weight, 2**0.5)
        nn.init.zeros_(layer.bias)
    nn.init.orthogonal_(layers[-1].weight, last_gain)
    return net


class _Plain(TensorDictModuleBase):
    """Computes in workers what the TorchRL class beside it does, unchecked: docs/results/off_policy.md."""

    def forward(self, tensordict: TensorDictBase, *args: Any, **kwargs: Any) -> TensorDictBase:
        acts = exploration_type() is ExplorationType.RANDOM and isinstance(tensordict, TensorDictBase)
        if acts and not args and not kwargs and not skip_existing():
            self.act(tensordict)
            return tensordict
        return super().forward(tensordict, *args, **kwargs)  # type: ignore[no-any-return]

    def act(self, tensordict: TensorDictBase) -> None:
        """Write the outputs: by default, those of parts that act one after the other."""
        for part in self.module:
            part(tensordict)


class PlainModule(_Plain, TensorDictModule):
    def act(self, tensordict: TensorDictBase) -> None:
        outputs = self.module(*map(tensordict.get, self.in_keys))
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        for key, output in zip(self.out_keys, outputs, strict=True):
            tensordict.set(key, output)


class PlainDraw(_Plain, modules.SafeProbabilisticModule):
    """Draws an action by a OneHotCategorical, with its log probability, or by a TanhNormal, without."""

    def act(self, tensordict: TensorDictBase) -> None:
        parameters = map(tensordict.get, self.in_keys)
        if self.distribution_class is modules.OneHotCategorical:
            (logits,) = parameters
            logits = logits - logits.logsumexp(-1, keepdim=True)
            probabilities = logits.softmax(-1).reshape(-1, logits.shape[-1])
            drawn = torch.multinomial(probabilities, 1, True).reshape(*logits.shape[:-1], 1)
            tensordict.set("action", F.one_hot(drawn.squeeze(-1), logits.shape[-1]))
            tensordict.set("action_log_prob", logits.gather(-1, drawn).squeeze(-1))
            return
        loc, scale = parameters
        low, high = (self.distribution_kwargs[name].to(loc.device) for name in ("low", "high"))
        noise = torch.normal(torch.zeros_like(loc), torch.ones_like(loc))
        action = safetanh_noeps(loc + noise * scale)
        tensordict.set("action", (high + low) / 2 + (high - low) / 2 * action)


class PlainSequential(_Plain, TensorDictSequential):
    """Parts that act one after the other."""


class PlainActor(_Plain, modules.SafeProbabilisticTensorDictSequential):
    """A PlainModule and a PlainDraw."""


class PlainQActor(_Plain, modules.QValueActor):
    """The Q network, a PlainModule, and TorchRL's choice of the best action."""


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
