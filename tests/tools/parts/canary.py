"""Weights that all hold one number, the version, and parts that tell which of them acted."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import nn
from torchrl.data import Composite, Unbounded
from torchrl.envs.transforms import Transform

from tests.tools.parts.sizes import ACTIONS


class Canary(nn.Module):
    """Weights that all hold one number, the version, so that a torn read shows as low != high.

    `calls` is a buffer that every reading increments, as the statistics of a BatchNorm are.
    """

    def __init__(self, tensors: int = 40, size: int = 10_000, version: float = 0.0):
        super().__init__()
        self.weights = nn.ParameterList(torch.full((size,), float(version)) for _ in range(tensors))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    @torch.no_grad()
    def fill(self, version: float) -> None:
        for weight in self.weights:
            weight.fill_(version)

    def low_high(self) -> tuple[float, float]:
        lows, highs = zip(*(torch.aminmax(weight.detach()) for weight in self.weights), strict=True)
        self.calls += 1
        return float(min(lows)), float(max(highs))


def _write_canary(canary: Canary, tensordict: TensorDictBase, prefix: str) -> TensorDictBase:
    for name, value in zip(("min", "max"), canary.low_high(), strict=True):
        tensordict.set(f"{prefix}_{name}", torch.full(tensordict.batch_size, value))
    return tensordict


class CanaryPolicy(TensorDictModuleBase):
    """Takes the first action always; writes `canary_min` and `canary_max`, its weights' range.

    min != max is a torn read; policy_version != min is a stamp that lies. Give `first_version` in a
    policy_factory, or `fill` it on the learner.
    """

    def __init__(self, tensors: int = 40, size: int = 10_000, first_version: float = 0.0):
        super().__init__()
        self.in_keys = ["observation"]
        self.out_keys = ["action", "canary_min", "canary_max"]
        self.canary = Canary(tensors, size, first_version)

    def fill(self, version: float) -> CanaryPolicy:
        self.canary.fill(version)
        return self

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        action = torch.zeros(*tensordict.batch_size, ACTIONS, dtype=torch.int64)
        action[..., 0] = 1
        tensordict.set("action", action)
        return _write_canary(self.canary, tensordict, "canary")


class CanaryTransform(Transform):
    """Writes `transform_min`, `transform_max` of its `.module`, a Canary, on each observation."""

    def __init__(self, tensors: int = 4, size: int = 100):
        super().__init__()
        self.module = Canary(tensors, size)

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        return _write_canary(self.module, next_tensordict, "transform")

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        return self._call(tensordict_reset)

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        observation_spec["transform_min"] = Unbounded(shape=())
        observation_spec["transform_max"] = Unbounded(shape=())
        return observation_spec


class CanaryPostproc(nn.Module):
    """Writes `postproc_min` and `postproc_max` of its `.net`, a Canary, on a whole batch.

    A process collector runs its postproc in the workers only if it was given a replay buffer; else
    in the main process (MultiAsyncCollector: a deep copy of it).
    """

    def __init__(self, tensors: int = 4, size: int = 100):
        super().__init__()
        self.net = Canary(tensors, size)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        return _write_canary(self.net, tensordict, "postproc")


def make_small_canary() -> CanaryPolicy:
    """A policy_factory: each worker gets a canary of its own, version 0."""
    return CanaryPolicy(tensors=4, size=10)
