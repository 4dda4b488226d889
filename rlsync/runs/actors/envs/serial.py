"""TorchRL environments behind the same interface as the others; this file imports torchrl."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from gymnasium.spaces import Box
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

from rlsync import ConfigError
from rlsync.runs.actors.envs.actions import (
    ActionSpec,
    BoxActions,
    DiscreteActions,
    MultiDiscreteActions,
    several_axes,
    unusable_actions,
)
from rlsync.runs.actors.envs.observations import Observations, observations_of
from rlsync.runs.actors.envs.vectors import Envs, EnvStep


class SerialEnvs(Envs):
    """TorchRL environments, one after the other; the player sees what is under the key ``observation``."""

    def __init__(
        self,
        make: Callable[[], EnvBase],
        num_envs: int,
        observation: str,
        name: str = "the TorchRL environment",
    ) -> None:
        self.envs = SerialEnv(num_envs, make)
        try:
            row = self._observed(observation, name)
            actions = _actions_of(self.envs.action_spec_unbatched, name)
        except ConfigError:
            self.close()
            raise
        super().__init__(num_envs, actions, row.shape, row.dtype)
        self._observations = row
        self._key = observation
        self._actions = self.envs.action_spec
        self._now: TensorDictBase = TensorDict()

    def _observed(self, key: str, name: str) -> Observations:
        """What players see under a key: bytes of pictures, or numbers; bounds of bytes are not told."""
        spec = self.envs.observation_spec
        keys = list(spec.keys())
        if key not in keys:
            problem = (
                f"{name} observes nothing under {key!r}: its keys are {', '.join(map(str, keys))}"
            )
            cure = "rename one to it, or join several: torchrl.envs.transforms.RenameTransform, CatTensors"
            raise ConfigError(problem, "the observation_spec of the environment", cure)
        shape = tuple(spec[key].shape[1:])
        if spec[key].dtype is torch.uint8 and len(shape) >= 3:
            return observations_of(Box(0, 255, shape, np.uint8), name)
        return observations_of(Box(-np.inf, np.inf, shape, np.float32), name)

    def reset(self, seed: int | None = None) -> Tensor:
        if seed is not None:
            self.envs.set_seed(seed)
        self._now = self.envs.reset()
        return self._shown(self._now)

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
        last = self._shown(answer)
        observation = self._shown(self._now)
        hidden = truncated
        if self.keeps_last:
            hidden = done
        finals = [(env, last[env]) for env in hidden.nonzero().view(-1).tolist()]
        reward = answer.get("reward").view(-1)
        return EnvStep(observation, reward, terminated, truncated, finals)

    def _shown(self, answer: TensorDictBase) -> Tensor:
        return self.observations.seen(answer.get(self._key))

    def close(self) -> None:
        self.envs.close(raise_if_closed=False)  # TorchRL opens them at the first reset


def _actions_of(spec: TensorSpec, name: str) -> ActionSpec:
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
    raise unusable_actions(spec, name)


def _several(nvec: tuple[int, ...], shape: tuple[int, ...]) -> MultiDiscreteActions:
    return MultiDiscreteActions(nvec, sent_shape=several_axes(shape))
