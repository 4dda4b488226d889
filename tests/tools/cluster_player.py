"""A player whose weights are their version. Nodes of a cluster import it, so it loads little."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Generator, Tensor, nn

from rlsync.runs.actors.envs.actions import ActionSpec, DiscreteActions
from rlsync.runs.actors.player import Acted, Player, Record, State


class Weights(nn.Module):
    """All weights hold one number, the version, so that a torn read shows as low != high."""

    def __init__(self, tensors: int = 20, size: int = 2_000) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.full((size,), 1.0) for _ in range(tensors))

    @torch.no_grad()
    def fill(self, version: int) -> None:
        for weight in self.weights:
            weight.fill_(version)


class CanaryPlayer(Player):
    """Takes the first action always, and records the range of its weights at each step."""

    def __init__(self) -> None:
        self.weights = Weights()

    @property
    def modules(self) -> Mapping[str, nn.Module]:
        return {"policy": self.weights}

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
        return Record("canary_min", (), torch.float32), Record("canary_max", (), torch.float32)

    def begin(self, num_envs: int, generator: Generator, worker: int = 0, num_workers: int = 1) -> State:
        return {}

    def act(
        self, observation: Tensor, is_init: Tensor, reward: Tensor, state: State, generator: Generator
    ) -> Acted:
        ranges = [torch.aminmax(weight) for weight in self.weights.weights]
        low, high = min(float(r.min) for r in ranges), max(float(r.max) for r in ranges)
        count = len(observation)
        said = {"canary_min": torch.full((count,), low), "canary_max": torch.full((count,), high)}
        return Acted(torch.zeros(count, dtype=torch.int64), said, state)
