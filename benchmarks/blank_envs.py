"""Environments that cost nothing, for benchmarks of what comes after them. Nodes of a cluster import this."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlsync.runs.actors.envs.actions import DiscreteActions
from rlsync.runs.actors.envs.vectors import Envs, EnvStep
from rlsync.runs.actors.players.uniform import UniformPlayer

ACTIONS = DiscreteActions(6)


@dataclass(frozen=True, slots=True)
class BlankEnvs:
    """Environments whose observations are always the same; no episode ever ends.

    Args:
        shape: of one observation.
        dtype: of its numbers.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    def envs(self, num_envs: int) -> Envs:
        return _Blank(num_envs, ACTIONS, self.shape, self.dtype)

    def player(self) -> UniformPlayer:
        """Acts there at random, without a network."""
        return UniformPlayer(ACTIONS, self.shape, self.dtype)


class _Blank(Envs):
    def reset(self, seed: int | None = None) -> Tensor:
        observation = torch.zeros(
            self.num_envs, *self.observation_shape, dtype=self.observation_dtype
        )
        zeros = torch.zeros(self.num_envs)
        never = torch.zeros(self.num_envs, dtype=torch.bool)
        self._answer = EnvStep(observation, zeros, never, never, ())
        return observation

    def send(self, action: Tensor) -> None: ...

    def recv(self) -> EnvStep:
        return self._answer

    def close(self) -> None: ...
