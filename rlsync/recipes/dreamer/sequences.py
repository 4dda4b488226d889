"""Draws sequences of rows that follow each other, whatever order they were stored in."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchrl.data.replay_buffers import Storage

from rlsync.core.errors import ConfigError
from rlsync.recipes.dreamer.rows import ROW, STREAM
from rlsync.torchrl_plugin.compat.replay import OwnSampler


class Sequences(OwnSampler):
    """Draws sequences of ``length`` rows of one stream, all alike likely.

    TorchRL's SliceSampler finds sequences that lie one behind the other in the storage, so rollouts of
    several environments, of any length, would have to be stored apart.

    Where rows follow each other is read from their numbers, after rows were stored; checkpoints keep nothing
    of it. Sequences ``within_episodes`` cross no end: an episode with fewer rows is never drawn from.
    """

    def __init__(self, length: int, *, within_episodes: bool = False) -> None:
        self.length = length
        self._within_episodes = within_episodes
        self._order: np.ndarray[Any, Any] | None = None
        self._run = np.empty(0, dtype=np.int64)  # equal numbers: one sequence, as long as it gets

    def sample(self, storage: Storage, batch_size: int) -> tuple[Tensor, dict[str, Any]]:
        """Rows ``[batch_size]``, one sequence after the other; ConfigError if none that long is stored."""
        return self.find(storage, batch_size // self.length, self.length).reshape(-1), {}

    def find(self, storage: Storage, count: int, length: int) -> Tensor:
        """The places ``[count, length]`` of sequences of any length; see :meth:`sample`."""
        if self._order is None:
            self._look(storage)
        assert self._order is not None
        last = max(0, len(self._order) - length + 1)
        starts = np.flatnonzero(self._run[:last] == self._run[length - 1 :][:last])
        if not len(starts):
            source = "episode" if self._within_episodes else "environment"
            raise ConfigError(
                f"no {length} rows of one {source} follow each other in the replay buffer",
                f"{len(storage)} rows are stored",
                "collect more frames before the first update (recipe.pace.prefill), or draw shorter ones",
            )
        chosen = starts[torch.randint(len(starts), (count,)).numpy()]
        return torch.from_numpy(self._order[chosen[:, None] + np.arange(length)])

    def _look(self, storage: Storage) -> None:
        stored = storage[: len(storage)]
        stream, row = (stored[key].reshape(-1).cpu().numpy() for key in (STREAM, ROW))
        order = np.lexsort((row, stream))
        stream, row = stream[order], row[order]
        torn = (stream[1:] != stream[:-1]) | (row[1:] != row[:-1] + 1)
        if self._within_episodes:
            torn |= stored["is_init"].reshape(-1).cpu().numpy()[order][1:]
        self._order, self._run = order, np.concatenate([[0], np.cumsum(torn)])

    def add(self, index: int | Tensor) -> None:
        self._order = None

    def extend(self, index: Tensor) -> None:
        self._order = None

    def clear(self) -> None:
        self._order = None

    def state_dict(self) -> dict[str, Any]:
        """Nothing: what is stored tells all."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._order = None
