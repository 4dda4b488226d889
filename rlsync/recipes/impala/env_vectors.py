"""Vectors of environments behind one face: gymnasium's, ale-py's, TorchRL's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode, VectorEnv
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import Categorical as TorchRLCategorical
from torchrl.data import OneHot
from torchrl.envs import EnvBase, SerialEnv

from rlsync.core.errors import ConfigError
from rlsync.core.path import did_you_mean, nearest_name
from rlsync.recipes.impala.env_base import Answer, Envs, head_for, no_head
from rlsync.recipes.impala.policy_head import Categorical, DiagonalGaussian, PolicyHead


class VectorEnvs(Envs):
    """A gymnasium vector environment that resets in the step that ends an episode.

    Args:
        envs: it.
        name: how errors call it.
    """

    def __init__(self, envs: VectorEnv[Any, Any, Any], name: str) -> None:
        mode = envs.metadata.get("autoreset_mode")
        space = envs.single_observation_space
        if mode is not AutoresetMode.SAME_STEP:
            envs.close()
            raise ConfigError(
                f"{name!r} does not reset in the step that ends an episode: its mode is {mode}",
                "environment",
                "leave vectorized=False, so that gymnasium steps one environment after the other",
            )
        if not isinstance(space, Box):
            envs.close()
            raise ConfigError(
                f"{name!r} gives observations of {space}",
                "environment",
                "wrap it so that they are arrays (gymnasium.wrappers.FlattenObservation)",
            )
        # Pixels come as [H, W, C] from most, and as [C, H, W] from those that stack frames.
        self._channels_behind = (
            space.dtype == np.uint8 and len(space.shape) == 3 and space.shape[-1] <= min(4, space.shape[0])
        )
        shape = (space.shape[-1], *space.shape[:-1]) if self._channels_behind else space.shape
        dtype = torch.uint8 if space.dtype == np.uint8 else torch.float32
        super().__init__(envs.num_envs, head_for(envs.single_action_space, name), shape, dtype)
        self.envs = envs
        self._actions = envs.single_action_space
        self._sent: Any = None

    def reset(self, seed: int | None = None) -> Tensor:
        return self._observed(self.envs.reset(seed=seed)[0])

    def send(self, action: Tensor) -> None:
        self._sent = self._translated(action)

    def recv(self) -> Answer:
        return self._answer(*self.envs.step(self._sent))

    def close(self) -> None:
        self.envs.close()

    def _translated(self, action: Tensor) -> Any:
        taken = action.numpy()
        if isinstance(self._actions, Discrete):
            return taken + self._actions.start if self._actions.start else taken
        # What a Gaussian draws has no bounds; what was drawn is what the loss must see.
        return np.clip(taken, self._actions.low, self._actions.high)  # type: ignore[attr-defined]

    def _observed(self, array: Any) -> Tensor:
        seen = torch.from_numpy(array)
        return seen.movedim(-1, -3) if self._channels_behind else seen

    def _answer(self, observation: Any, reward: Any, terminated: Any, truncated: Any, info: Any) -> Answer:
        hidden = np.flatnonzero(truncated & ~terminated) if truncated.any() else ()
        return Answer(
            self._observed(observation),
            torch.from_numpy(reward),
            torch.from_numpy(terminated),
            torch.from_numpy(truncated),
            [(int(env), self._observed(info["final_obs"][env])) for env in hidden],
        )


class AleEnvs(VectorEnvs):
    """A game on ale-py's vector environment, whose threads step while the caller goes on.

    Args:
        game: the rom's name.
        num_envs: how many copies.
        options: of ``ale_py.vector_env.AtariVectorEnv``.

    Raises:
        ConfigError: ale-py is not installed, or has no such game.
    """

    def __init__(self, game: str, num_envs: int, options: Mapping[str, Any]) -> None:
        try:
            from ale_py import roms, vector_env
        except ImportError as error:
            raise ConfigError(
                "ale-py is not installed", f"AtariEnvs({game!r})", "pip install 'rlsync[atari]'"
            ) from error
        games = roms.get_all_rom_ids()
        if game not in games:
            near = nearest_name(game, games)
            raise ConfigError(
                f"ale-py has no game {game!r}",
                "AtariEnvs(game=...)",
                did_you_mean(near) + "write it in snake_case: space_invaders",
            )
        self.ale = vector_env.AtariVectorEnv(
            game, num_envs, **options, autoreset_mode=AutoresetMode.SAME_STEP
        )
        super().__init__(self.ale, game)

    def reset(self, seed: int | None = None) -> Tensor:
        # Seeds are 32-bit numbers there, the last one included.
        return super().reset(None if seed is None else seed % (2**31 - self.num_envs))

    def send(self, action: Tensor) -> None:
        self.ale.send(self._translated(action))

    def recv(self) -> Answer:
        return self._answer(*self.ale.recv())


class SerialEnvs(Envs):
    """TorchRL environments, one after the other.

    Args:
        make: makes one.
        num_envs: how many.
        observation: the key of what the network sees.
    """

    def __init__(self, make: Callable[[], EnvBase], num_envs: int, observation: str) -> None:
        self.envs = SerialEnv(num_envs, make)
        seen = self.envs.observation_spec[observation]
        actions = self.envs.action_spec_unbatched
        if isinstance(actions, (OneHot, TorchRLCategorical)):
            head: PolicyHead = Categorical(int(actions.space.n))
        elif actions.dtype.is_floating_point and len(actions.shape) == 1:
            head = DiagonalGaussian(actions.shape[0])
        else:
            raise no_head(actions, "the TorchRL environment")
        dtype = torch.uint8 if seen.dtype is torch.uint8 else torch.float32
        super().__init__(num_envs, head, tuple(seen.shape[1:]), dtype)
        self._key = observation
        self._actions = self.envs.action_spec
        self._one_hot = isinstance(actions, OneHot)
        self._now: TensorDictBase = TensorDict()

    def reset(self, seed: int | None = None) -> Tensor:
        if seed is not None:
            self.envs.set_seed(seed)
        self._now = self.envs.reset()
        return self._now.get(self._key)

    def send(self, action: Tensor) -> None:
        if self._one_hot:
            action = F.one_hot(action, self._actions.shape[-1])
        elif action.dtype.is_floating_point:
            action = self._actions.project(action)
        self._now.set("action", action.to(self._actions.dtype))

    def recv(self) -> Answer:
        stepped, self._now = self.envs.step_and_maybe_reset(self._now)
        answer = stepped.get("next")
        done = answer.get("done").view(-1)
        terminated = answer.get("terminated").view(-1)
        truncated = done & ~terminated
        last = answer.get(self._key)
        return Answer(
            self._now.get(self._key),
            answer.get("reward").view(-1),
            terminated,
            truncated,
            [(env, last[env]) for env in truncated.nonzero().view(-1).tolist()],
        )

    def close(self) -> None:
        self.envs.close()
