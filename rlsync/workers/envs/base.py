"""What a worker needs of its environments."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rlsync.workers.envs.actions import ActionSpec


class EnvStep(NamedTuple):
    """What N environments answer to a step. The arrays are valid until the next answer: copy what is kept.

    Args:
        observation: [N, *obs]; where an episode has ended, the first one of the next episode.
        reward: [N].
        terminated, truncated: [N] bool.
        finals: the environment's number and the last observation, for each episode that was truncated and did
            not terminate.
        game_over: [N] bool, where whole games end, for environments whose learner sees an episode end before
            the game does. None: a game is an episode.
    """

    observation: Tensor
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    finals: Sequence[tuple[int, Tensor]]
    game_over: Tensor | None = None

    @property
    def over(self) -> Tensor:
        """[N] bool, where what is reported as one return ends: a game."""
        return self.terminated | self.truncated if self.game_over is None else self.game_over


class Envs(ABC):
    """N environments that step together. One ``send`` and one ``recv`` are a step; they work in between.

    Args:
        num_envs: N.
        actions: what actions they take.
        observation_shape, observation_dtype: of one observation.
    """

    def __init__(
        self,
        num_envs: int,
        actions: ActionSpec,
        observation_shape: tuple[int, ...],
        observation_dtype: torch.dtype,
    ) -> None:
        self.num_envs = num_envs
        self.actions = actions
        self.observation_shape = observation_shape
        self.observation_dtype = observation_dtype

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
