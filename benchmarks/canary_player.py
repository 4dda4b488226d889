"""A player whose weights all hold their version. Nodes of a cluster import it, so it loads little."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Generator, Tensor, nn

from rlsync.runs.actors.envs.actions import ActionSpec, DiscreteActions
from rlsync.runs.actors.player import Acted, Player, Record, State

TENSORS, SIZE = 16, 4096


class CanaryPlayer(Player):
    """Takes the first action of CartPole always, and records the range of its weights at each step.

    Args:
        destinations: how many modules have weights. All of them are one version.
    """

    def __init__(self, destinations: int = 1) -> None:
        self._weights = {
            f"module_{number}": nn.ParameterList(torch.full((SIZE,), 1.0) for _ in range(TENSORS))
            for number in range(destinations)
        }

    @torch.no_grad()
    def fill(self, version: int) -> None:
        """Write a version into all weights."""
        for weights in self._weights.values():
            for weight in weights:
                weight.fill_(version)

    @property
    def modules(self) -> Mapping[str, nn.Module]:
        return self._weights

    @property
    def actions(self) -> ActionSpec:
        return DiscreteActions(2)

    @property
    def observation_shape(self) -> tuple[int, ...]:
        return (4,)

    @property
    def observation_dtype(self) -> torch.dtype:
        return torch.float32

    @property
    def records(self) -> Sequence[Record]:
        return Record("low", (), torch.float32), Record("high", (), torch.float32)

    def begin(
        self, num_envs: int, generator: Generator, worker: int = 0, num_workers: int = 1
    ) -> State:
        return {}

    def act(
        self,
        observation: Tensor,
        is_init: Tensor,
        reward: Tensor,
        state: State,
        generator: Generator,
    ) -> Acted:
        ranges = [torch.aminmax(weight) for weights in self._weights.values() for weight in weights]
        low, high = min(float(r.min) for r in ranges), max(float(r.max) for r in ranges)
        count = len(observation)
        said = {"low": torch.full((count,), low), "high": torch.full((count,), high)}
        return Acted(torch.zeros(count, dtype=torch.int64), said, state)
