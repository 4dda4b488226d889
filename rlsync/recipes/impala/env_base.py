"""What a worker needs of its environments."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from gymnasium.spaces import Box, Discrete, Space
from torch import Tensor

from rlsync.core.errors import ConfigError
from rlsync.recipes.impala.policy_head import Categorical, DiagonalGaussian, PolicyHead


class Answer(NamedTuple):
    """What N environments answer; arrays that are good until the next answer.

    Args:
        observation: [N, *obs], the first of the next episode where one has ended.
        reward: [N].
        terminated, truncated: [N] bool.
        finals: number of the environment and last observation, for each episode that was truncated and did
            not terminate.
    """

    observation: Tensor
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    finals: Sequence[tuple[int, Tensor]]


class Envs(ABC):
    """N environments in step. One ``send`` and one ``recv`` make a step; between them they may be at work.

    Args:
        num_envs: N.
        head: what actions fit.
        observation_shape, observation_dtype: of one observation.
    """

    def __init__(
        self,
        num_envs: int,
        head: PolicyHead,
        observation_shape: tuple[int, ...],
        observation_dtype: torch.dtype,
    ) -> None:
        self.num_envs = num_envs
        self.head = head
        self.observation_shape = observation_shape
        self.observation_dtype = observation_dtype

    @abstractmethod
    def reset(self, seed: int | None = None) -> Tensor:
        """Begin an episode everywhere; the i-th environment has ``seed + i``. Returns [N, *obs]."""

    @abstractmethod
    def send(self, action: Tensor) -> None:
        """Begin a step: [N, *action]."""

    @abstractmethod
    def recv(self) -> Answer:
        """End it."""

    @abstractmethod
    def close(self) -> None:
        """Let go of them."""


def head_for(space: Space[Any], name: str) -> PolicyHead:
    """The policy head that fits an action space.

    Raises:
        ConfigError: there is none: the space is neither a choice nor a vector.

    Example:
        >>> head_for(Discrete(3), "a game")
        Categorical(actions=3)
    """
    match space:
        case Discrete():
            return Categorical(int(space.n))
        case Box(shape=(size,)):
            return DiagonalGaussian(int(size))
    raise no_head(space, repr(name))


def no_head(space: object, name: str) -> ConfigError:
    """What is raised for actions that no policy head fits."""
    return ConfigError(
        f"{name} takes actions of {space}",
        "environment",
        "wrap it so that an action is one of n, or a vector of numbers",
    )
