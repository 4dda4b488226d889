"""Environments that step together: what a worker needs of them, and gymnasium's and ale-py's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from torch import Tensor

from rlsync.core.errors import ConfigError
from rlsync.core.path import did_you_mean, nearest_name
from rlsync.workers.envs.actions import ActionSpec, actions_of
from rlsync.workers.envs.observations import observations_of


class EnvStep(NamedTuple):
    """What N environments answer to a step. Nothing that comes later is written into these arrays."""

    observation: Tensor  # [N, *obs]; where an episode has ended, the first one of the next episode
    reward: Tensor  # [N]
    terminated: Tensor  # [N] bool
    truncated: Tensor  # [N] bool
    # for each episode that was truncated and did not terminate: the number, and the last observation
    finals: Sequence[tuple[int, Tensor]]
    # [N] bool, where whole games end, if the learner sees episodes end before; None: a game is an episode
    game_over: Tensor | None = None

    @property
    def over(self) -> Tensor:
        """[N] bool, where what is reported as one return ends: a game."""
        return self.terminated | self.truncated if self.game_over is None else self.game_over


@dataclass(eq=False)
class Envs(ABC):
    """Environments that step together. One ``send`` and one ``recv`` are a step; they work in between."""

    num_envs: int
    actions: ActionSpec
    observation_shape: tuple[int, ...]
    observation_dtype: torch.dtype

    @abstractmethod
    def reset(self, seed: int | None = None) -> Tensor:
        """Begin an episode in each environment; the i-th one gets ``seed + i``. Returns [N, *obs]."""

    @abstractmethod
    def send(self, action: Tensor) -> None:
        """Begin a step with the actions [N, *action]."""

    @abstractmethod
    def recv(self) -> EnvStep:
        """Wait for the step to end, and return what came of it."""

    @abstractmethod
    def close(self) -> None:
        """Close the environments."""


class VectorEnvs(Envs):
    """A gymnasium vector environment that resets in the step that ends an episode; another one is refused."""

    def __init__(self, envs: VectorEnv[Any, Any, Any], name: str) -> None:
        mode = envs.metadata.get("autoreset_mode")
        if mode is not AutoresetMode.SAME_STEP:
            envs.close()
            what = f"{name!r} does not reset in the step that ends an episode: its mode is {mode}"
            cure = "leave vectorized=False, so that gymnasium steps one environment after the other"
            raise ConfigError(what, "environment", cure)
        try:
            self.observations = observations_of(envs.single_observation_space, name)
            actions = actions_of(envs.single_action_space, name)
        except ConfigError:
            envs.close()
            raise
        super().__init__(envs.num_envs, actions, self.observations.shape, self.observations.dtype)
        self.envs = envs
        self._sent: Any = None

    def reset(self, seed: int | None = None) -> Tensor:
        return self._observed(self.envs.reset(seed=seed)[0])

    def send(self, action: Tensor) -> None:
        self._sent = self._translated(action)

    def recv(self) -> EnvStep:
        return self._answer(*self.envs.step(self._sent))

    def close(self) -> None:
        self.envs.close()

    def _translated(self, action: Tensor) -> Any:
        # Only the environment gets the clipped action: the loss needs what the policy has drawn.
        return self.actions.sent(action).numpy()

    def _observed(self, array: Any) -> Tensor:
        return self.observations.seen(array)

    def _answer(self, observation: Any, reward: Any, terminated: Any, truncated: Any, info: Any) -> EnvStep:
        hidden = np.flatnonzero(truncated & ~terminated) if truncated.any() else ()
        last_seen = [(int(env), self._observed(info["final_obs"][env])) for env in hidden]
        earned, over, cut = (torch.from_numpy(array) for array in (reward, terminated, truncated))
        return EnvStep(self._observed(observation), earned, over, cut, last_seen)


class AleEnvs(VectorEnvs):
    """A game on ale-py's threads; ``life_loss_ends_episode`` reports lost lives as ends, and games go on."""

    def __init__(
        self, game: str, num_envs: int, options: Mapping[str, Any], life_loss_ends_episode: bool = False
    ) -> None:
        try:
            from ale_py import roms, vector_env
        except ImportError as error:
            what = "ale-py is not installed"
            raise ConfigError(what, f"AtariEnvs({game!r})", "pip install 'rlsync[atari]'") from error
        games = roms.get_all_rom_ids()
        if game not in games:
            cure = did_you_mean(nearest_name(game, games)) + "write it in snake_case: space_invaders"
            raise ConfigError(f"ale-py has no game {game!r}", "AtariEnvs(game=...)", cure)
        self.ale = vector_env.AtariVectorEnv(
            game, num_envs, **options, autoreset_mode=AutoresetMode.SAME_STEP
        )
        self._life_loss_ends_episode = life_loss_ends_episode
        self._lives: Any = None
        super().__init__(self.ale, game)

    def reset(self, seed: int | None = None) -> Tensor:
        # ale-py takes 32-bit seeds, for the last environment too.
        seed = None if seed is None else seed % (2**31 - self.num_envs)
        observation, info = self.ale.reset(seed=seed)
        self._lives = info["lives"].copy()
        return self._observed(observation)

    def send(self, action: Tensor) -> None:
        self.ale.send(self._translated(action))

    def recv(self) -> EnvStep:
        return self._answer(*self.ale.recv())

    def _answer(self, observation: Any, reward: Any, terminated: Any, truncated: Any, info: Any) -> EnvStep:
        answer = super()._answer(observation, reward, terminated, truncated, info)
        if not self._life_loss_ends_episode:
            return answer
        # ale-py's own episodic_life begins a new game after a lost life, so the second life is never played.
        over, lives = terminated | truncated, info["lives"]
        lost = (lives < self._lives) & ~over
        self._lives = lives.copy()
        ended = torch.from_numpy(terminated | lost)
        return answer._replace(terminated=ended, game_over=torch.from_numpy(over))
