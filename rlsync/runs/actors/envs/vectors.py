"""Environments that step together: what a worker needs of them, and gymnasium's and ale-py's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import Space
from gymnasium.vector import AutoresetMode, VectorEnv
from numpy.typing import NDArray
from torch import Tensor

from rlsync import ConfigError
from rlsync.runs.actors.envs.actions import ActionSpec, actions_of
from rlsync.runs.actors.envs.answers import CheckedEnv, CheckedVectorEnv
from rlsync.runs.actors.envs.observations import Observations, like, observations_of
from rlsync.runs.actors.envs.saving import load_state, state_of
from rlsync.seams import user_input

#: For each episode that was truncated and did not terminate, and with keep_last() for each that ended: the
#: environment, and the last observation.
Finals = Sequence[tuple[int, Tensor]]


class EnvStep(NamedTuple):
    """What N environments answer to a step. Nothing that comes later is written into these arrays."""

    observation: Tensor  # [N, *obs]; where an episode has ended, the first one of the next episode
    reward: Tensor  # [N]
    terminated: Tensor  # [N] bool
    truncated: Tensor  # [N] bool
    finals: Finals
    # [N] bool, where whole games end, if the learner sees episodes end before; None: a game is an episode
    game_over: Tensor | None = None

    @property
    def over(self) -> Tensor:
        """[N] bool, where what is reported as one return ends: a game."""
        if self.game_over is None:
            return self.terminated | self.truncated
        return self.game_over


class StepArrays(NamedTuple):
    """Where N environments write what they answer to a step."""

    observation: Tensor  # [N, *obs]
    reward: NDArray[np.float64]  # [N]
    terminated: NDArray[np.bool_]  # [N]
    truncated: NDArray[np.bool_]  # [N]


@dataclass(eq=False)
class Envs(ABC):
    """Environments that step together. One ``send`` and one ``recv`` are a step; they work in between."""

    num_envs: int
    actions: ActionSpec
    observation_shape: tuple[int, ...]
    observation_dtype: torch.dtype
    keeps_last: bool = field(default=False, init=False)  # see keep_last()
    _observations: Observations | None = field(default=None, init=False)  # None: as its shape says

    @property
    def observations(self) -> Observations:
        """What a row of an observation is made of."""
        return self._observations or like(self.observation_shape, self.observation_dtype)

    def keep_last(self) -> None:
        """From now on give the last observations of episodes that terminate, too."""
        self.keeps_last = True

    @abstractmethod
    def reset(self, seed: int | None = None) -> Tensor:
        """Begin an episode in each environment; the i-th one gets ``seed + i``. Returns [N, *obs]."""

    @abstractmethod
    def send(self, action: Tensor) -> None:
        """Begin a step with the actions [N, *action]."""

    @abstractmethod
    def recv(self) -> EnvStep:
        """Wait for the step to end, and return what came of it."""

    def recv_into(self, arrays: StepArrays) -> tuple[Finals, Tensor | None]:
        """As :meth:`recv`, into memory of the caller; returns the finals and ``game_over``."""
        answer = self.recv()
        arrays.observation.copy_(answer.observation)
        arrays.reward[:] = answer.reward.numpy()
        arrays.terminated[:] = answer.terminated.numpy()
        arrays.truncated[:] = answer.truncated.numpy()
        return answer.finals, answer.game_over

    def saved(self) -> list[Any] | None:
        """What each environment is between two steps, to be pickled before the next one.

        None: they cannot be saved.
        """
        return None

    def load(self, saved: Sequence[Any]) -> None:
        """Go on from what :meth:`saved` of environments that were made alike has returned."""
        raise TypeError(f"{type(self).__name__} cannot be saved")

    @abstractmethod
    def close(self) -> None:
        """Close the environments."""


class SpacedEnvs(Envs):
    """Environments with gymnasium's spaces; a ConfigError if players cannot act there."""

    def __init__(self, num_envs: int, observed: Space[Any], taken: Space[Any], name: str) -> None:
        row = observations_of(observed, name)
        actions = actions_of(taken, name)
        super().__init__(num_envs, actions, row.shape, row.dtype)
        self._observations = row
        self._translate = actions.translation()
        self._sent: NDArray[Any] = np.empty(0)

    def send(self, action: Tensor) -> None:
        self._sent = self._translated(action)

    def _translated(self, action: Tensor) -> NDArray[Any]:
        if action.dtype is torch.bfloat16:  # numpy has none
            action = action.float()
        # Only the environment gets the clipped action: the loss needs what the policy has drawn.
        return self._translate(action.numpy())


class ListedEnvs(SpacedEnvs):
    """Gymnasium environments that are stepped one after the other.

    They are reset in the step that ends an episode: the first time with a seed, then without. It is
    gymnasium's SyncVectorEnv without what workers do not read: infos, and copies of the answers. They share
    spaces, or are refused.
    """

    def __init__(self, make: Callable[[], CheckedEnv], num_envs: int, name: str) -> None:
        self.envs = [make() for _ in range(num_envs)]
        first = self.envs[0]
        self._space = first.observation_space
        try:
            for env in self.envs:
                if (env.observation_space, env.action_space) != (self._space, first.action_space):
                    problem = f"two environments {name!r} that are made alike have different spaces"
                    raise ConfigError(
                        problem, "environment", "let its spaces depend on its arguments alone"
                    )
            super().__init__(num_envs, self._space, first.action_space, name)
        except ConfigError:
            self.close()
            raise
        stage = self._new_stage()
        stored = self.observations.seen(stage)
        #: None where workers store observations as they are: they are written there at once.
        self._stage: NDArray[Any] | None = stage
        if stored.data_ptr() == stage.ctypes.data and stored.shape == stage.shape:
            self._stage = None

    def reset(self, seed: int | None = None) -> Tensor:
        stage = self._new_stage()
        for number, env in enumerate(self.envs):
            if seed is None:
                stage[number], _ = env.reset()
            else:
                stage[number], _ = env.reset(seed=seed + number)
        return self.observations.seen(stage)

    def recv(self) -> EnvStep:
        stage = self._new_stage()
        reward = np.empty(self.num_envs)
        terminated = np.empty(self.num_envs, np.bool_)
        truncated = np.empty(self.num_envs, np.bool_)
        finals = self._step(stage, reward, terminated, truncated)
        earned, over, cut = map(torch.from_numpy, (reward, terminated, truncated))
        return EnvStep(self.observations.seen(stage), earned, over, cut, finals)

    def recv_into(self, arrays: StepArrays) -> tuple[Finals, Tensor | None]:
        observation, reward, terminated, truncated = arrays
        if self._stage is None:
            return self._step(observation.numpy(), reward, terminated, truncated), None
        finals = self._step(self._stage, reward, terminated, truncated)
        observation.copy_(self.observations.seen(self._stage))
        return finals, None

    def saved(self) -> list[Any] | None:
        states = []
        for env in self.envs:
            state = state_of(env)
            if state is None:
                return None
            states.append(state)
        return states

    def load(self, saved: Sequence[Any]) -> None:
        for env, state in zip(self.envs, saved, strict=True):
            load_state(env, state)

    def close(self) -> None:
        for env in self.envs:
            env.close()

    def _step(
        self,
        observations: NDArray[Any],
        rewards: NDArray[np.float64],
        terminated: NDArray[np.bool_],
        truncated: NDArray[np.bool_],
    ) -> Finals:
        """Step each environment, and write what it answers into its row."""
        finals: list[tuple[int, Tensor]] = []
        for number, (env, action) in enumerate(zip(self.envs, self._sent, strict=True)):
            observation, rewards[number], over, cut, _ = env.step_uncopied(action)
            terminated[number] = over
            truncated[number] = cut
            if over or cut:
                if self.keeps_last or not over:
                    finals.append((number, self.observations.seen(np.array(observation))))
                observation, _ = env.reset()
            observations[number] = observation
        return finals

    def _new_stage(self) -> NDArray[Any]:
        """Memory for the environments' observations, in their own form."""
        return np.empty((self.num_envs, *(self._space.shape or ())), self._space.dtype)


_ONE_BY_ONE = "leave vectorized=False, so that gymnasium steps one environment after the other"


class VectorEnvs(SpacedEnvs):
    """A gymnasium vector environment that resets in the step that ends an episode; another one is refused."""

    def __init__(self, envs: VectorEnv[Any, Any, Any], name: str, cure: str = _ONE_BY_ONE) -> None:
        mode = envs.metadata.get("autoreset_mode")
        if mode is not AutoresetMode.SAME_STEP:
            envs.close()
            problem = (
                f"{name!r} does not reset in the step that ends an episode: its mode is {mode}"
            )
            raise ConfigError(problem, "environment", cure)
        try:
            super().__init__(
                envs.num_envs, envs.single_observation_space, envs.single_action_space, name
            )
        except ConfigError:
            envs.close()
            raise
        self.envs = envs

    def keep_last(self) -> None:
        super().keep_last()
        if isinstance(self.envs, CheckedVectorEnv):
            self.envs.keeps_last = True

    def reset(self, seed: int | None = None) -> Tensor:
        return self._observed(self.envs.reset(seed=seed)[0])

    def recv(self) -> EnvStep:
        return self._answer(*self.envs.step(self._sent))

    def close(self) -> None:
        self.envs.close()

    def _observed(self, array: Any) -> Tensor:
        return self.observations.seen(array)

    def _answer(
        self, observation: Any, reward: Any, terminated: Any, truncated: Any, info: Any
    ) -> EnvStep:
        hidden = terminated | truncated
        if not self.keeps_last:
            hidden &= ~terminated
        last_seen = []
        if hidden.any():
            for env in np.flatnonzero(hidden).tolist():
                last_seen.append((env, self._observed(info["final_obs"][env])))
        earned, over, cut = map(torch.from_numpy, (reward, terminated, truncated))
        return EnvStep(self._observed(observation), earned, over, cut, last_seen)


class AleEnvs(VectorEnvs):
    """A game on ale-py's threads; ``life_loss_ends_episode`` reports lost lives as ends, and games go on."""

    def __init__(
        self,
        game: str,
        num_envs: int,
        options: Mapping[str, Any],
        life_loss_ends_episode: bool = False,
    ) -> None:
        try:
            from ale_py import roms, vector_env
        except ImportError as error:
            problem = "ale-py is not installed"
            raise ConfigError(
                problem, f"AtariEnvs({game!r})", "pip install 'rlsync[atari]'"
            ) from error
        games = roms.get_all_rom_ids()
        if game not in games:
            cure = (
                user_input.did_you_mean(user_input.nearest_name(game, games))
                + "write it in snake_case: space_invaders"
            )
            raise ConfigError(f"ale-py has no game {game!r}", "AtariEnvs(game=...)", cure)
        self.ale = vector_env.AtariVectorEnv(
            game, num_envs, **options, autoreset_mode=AutoresetMode.SAME_STEP
        )
        self._life_loss_ends_episode = life_loss_ends_episode
        self._lives: Any = None
        super().__init__(self.ale, game)

    def reset(self, seed: int | None = None) -> Tensor:
        return self._observed(self.reset_pictures(seed))

    def reset_pictures(self, seed: int | None = None) -> NDArray[Any]:
        """Begin a game in each environment, as :meth:`reset`; returns ale-py's own arrays."""
        # ale-py takes 32-bit seeds, for the last environment too.
        if seed is not None:
            seed %= 2**31 - self.num_envs
        observation, info = self.ale.reset(seed=seed)
        self._lives = info["lives"].copy()
        pictures: NDArray[Any] = observation
        return pictures

    def send(self, action: Tensor) -> None:
        self.ale.send(self._translated(action))

    def recv(self) -> EnvStep:
        return self._answer(*self.ale.recv())

    def _answer(
        self, observation: Any, reward: Any, terminated: Any, truncated: Any, info: Any
    ) -> EnvStep:
        answer = super()._answer(observation, reward, terminated, truncated, info)
        if not self._life_loss_ends_episode:
            return answer
        # ale-py's own episodic_life begins a new game after a lost life, so the second life is never played.
        over = terminated | truncated
        lives = info["lives"]
        lost = (lives < self._lives) & ~over
        self._lives = lives.copy()
        ended = torch.from_numpy(terminated | lost)
        return answer._replace(terminated=ended, game_over=torch.from_numpy(over))
