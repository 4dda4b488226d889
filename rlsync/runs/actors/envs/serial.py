"""TorchRL environments behind the same interface as the others; this file imports torchrl."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import (
    Binary,
    Bounded,
    Categorical,
    MultiCategorical,
    MultiOneHot,
    OneHot,
    TensorSpec,
)
from torchrl.envs import EnvBase, SerialEnv

from rlsync.runs.actors.envs.actions import (
    ActionSpec,
    BoxActions,
    DiscreteActions,
    MultiDiscreteActions,
    unusable_actions,
)
from rlsync.runs.actors.envs.vectors import Envs, EnvStep


class SerialEnvs(Envs):
    """TorchRL environments, one after the other; the player sees what is under the key ``observation``."""

    def __init__(self, make: Callable[[], EnvBase], num_envs: int, observation: str) -> None:
        self.envs = SerialEnv(num_envs, make)
        spec = self.envs.observation_spec[observation]
        # Bytes of pictures, or numbers, as in rlsync.runs.actors.envs.observations; bounds of bytes are not
        # told.
        dtype = torch.float32
        if spec.dtype is torch.uint8 and len(spec.shape) > 3:
            dtype = torch.uint8
        actions = _actions_of(self.envs.action_spec_unbatched)
        super().__init__(num_envs, actions, tuple(spec.shape[1:]), dtype)
        self._key = observation
        self._actions = self.envs.action_spec
        self._now: TensorDictBase = TensorDict()

    def reset(self, seed: int | None = None) -> Tensor:
        if seed is not None:
            self.envs.set_seed(seed)
        self._now = self.envs.reset()
        return self._now.get(self._key).to(self.observation_dtype)

    def send(self, action: Tensor) -> None:
        sent = self.actions.sent(action)
        if isinstance(self._actions, MultiOneHot):
            choices = zip(sent.unbind(-1), self._actions.nvec, strict=True)
            sent = torch.cat([F.one_hot(*choice) for choice in choices], -1)
        elif isinstance(self._actions, OneHot):
            sent = F.one_hot(sent, self._actions.shape[-1])
        self._now.set("action", sent.to(self._actions.dtype))

    def recv(self) -> EnvStep:
        stepped, self._now = self.envs.step_and_maybe_reset(self._now)
        answer = stepped.get("next")
        done = answer.get("done").view(-1)
        terminated = answer.get("terminated").view(-1)
        truncated = done & ~terminated
        last = answer.get(self._key).to(self.observation_dtype)
        observation = self._now.get(self._key).to(self.observation_dtype)
        hidden = truncated
        if self.keeps_last:
            hidden = done
        finals = [(env, last[env]) for env in hidden.nonzero().view(-1).tolist()]
        reward = answer.get("reward").view(-1)
        return EnvStep(observation, reward, terminated, truncated, finals)

    def close(self) -> None:
        self.envs.close(raise_if_closed=False)  # TorchRL opens them at the first reset


def _actions_of(spec: TensorSpec) -> ActionSpec:
    """What one environment with this spec takes; a ConfigError if players choose nothing like it."""
    shape = tuple(spec.shape)
    # The first match counts: MultiOneHot is a OneHot, Binary and MultiCategorical are Categoricals.
    match spec:
        case MultiOneHot() if len(shape) == 1:
            return MultiDiscreteActions(tuple(spec.nvec))
        case Binary() if shape:
            return _several((2,) * math.prod(shape), shape)
        case MultiCategorical() if shape:
            return _several(tuple(spec.nvec.flatten().tolist()), shape)
        case OneHot() if not isinstance(spec, MultiOneHot):
            if len(shape) == 1:
                return DiscreteActions(int(spec.space.n))
            return _several((int(spec.space.n),) * math.prod(shape[:-1]), shape[:-1])
        case Categorical():
            if not shape:
                return DiscreteActions(int(spec.space.n))
            return _several((int(spec.space.n),) * math.prod(shape), shape)
    if spec.dtype.is_floating_point and len(shape) == 1:
        low = ()
        high = ()
        if isinstance(spec, Bounded):
            low = tuple(spec.space.low.tolist())
            high = tuple(spec.space.high.tolist())
        return BoxActions(shape[0], low, high, str(spec.dtype).removeprefix("torch."))
    raise unusable_actions(spec, "the TorchRL environment")


def _several(nvec: tuple[int, ...], shape: tuple[int, ...]) -> MultiDiscreteActions:
    sent_shape = None
    if len(shape) > 1:
        sent_shape = shape
    return MultiDiscreteActions(nvec, sent_shape=sent_shape)
