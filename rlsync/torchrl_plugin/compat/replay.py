"""TorchRL's replay buffers, and the base class of transforms that add to what is stored."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import ReplayBuffer, TensorDictReplayBuffer
from torchrl.data.replay_buffers import Storage
from torchrl.data.replay_buffers.samplers import Sampler
from torchrl.envs import Transform

_FILE = "sampler.pt"


class OwnSampler(Sampler):
    """A sampler that is saved and loaded as its state dict. Until ``_empty`` has a public name."""

    @abstractmethod
    def clear(self) -> None:
        """Forget all frames."""

    def dumps(self, path: Path | str) -> None:
        Path(path).mkdir(parents=True, exist_ok=True)
        with (Path(path) / _FILE).open(
            "wb"
        ) as file:  # of a path, torch does not tell what the machine refused
            torch.save(self.state_dict(), file)

    def loads(self, path: Path | str) -> None:
        state: dict[str, Any] = torch.load(Path(path) / _FILE, map_location="cpu", weights_only=True)
        self.load_state_dict(state)

    def _empty(self) -> None:
        self.clear()


def rows_given(buffer: ReplayBuffer) -> int | None:
    """How many rows a buffer was given; None if two counts contradict. Until the cursor has a public name."""
    given, capacity = int(buffer.write_count), buffer.storage.max_size
    holds = given >= len(buffer) and given % capacity == buffer.writer._cursor
    return given if holds else None


def forget_rows(storage: Storage) -> None:
    """Let a storage hold no row. Until a storage can be emptied without its buffer."""
    storage._empty()


class RowBuffer(TensorDictReplayBuffer):
    """A buffer of rows ``[N]`` that gathers what it draws tensor by tensor: TorchRL 0.14 takes five times as
    long (eight draws in one would save a fifth more, and draw other numbers). It has no transforms and no
    prefetching. Until a draw costs what its gathers cost.
    """

    def sample(
        self, batch_size: int | None = None, return_info: bool = False, include_info: bool | None = None
    ) -> Any:
        size = self.batch_size if batch_size is None else batch_size
        index, info = self.sampler.sample(self.storage, size)
        stored, info = self.storage._storage, {**info, "index": index}
        drawn = _rows(stored, index.to(stored.device), info)
        return (drawn, info) if return_info else drawn


def _rows(stored: TensorDictBase, index: Tensor, more: dict[str, Tensor]) -> TensorDict:
    """The rows of a tensordict, and more of each, in a new one whose entries nobody has to check."""
    rows = {
        key: value.index_select(0, index) if isinstance(value, Tensor) else _rows(value, index, {})
        for key, value in stored.items()
    }
    rows |= {key: value.to(stored.device) for key, value in more.items()}
    return TensorDict._new_unsafe(source=rows, batch_size=index.shape, device=stored.device)


class OwnTransform(Transform):
    """A transform that is told of resets and of steps. Until ``_reset`` and ``_step`` are public."""

    @abstractmethod
    def at_reset(self, first: TensorDictBase, begins: Tensor | None) -> TensorDictBase:
        """Environments in ``begins`` (bool ``[*batch, 1]``; None: all) begin an episode at ``first``."""

    @abstractmethod
    def at_step(self, after: TensorDictBase) -> TensorDictBase:
        """All environments made a step; ``after`` is what it led to."""

    def _reset(self, tensordict: TensorDictBase | None, tensordict_reset: TensorDictBase) -> TensorDictBase:
        begins = None if tensordict is None else tensordict.get("_reset", None)
        return self.at_reset(tensordict_reset, begins)

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        return self.at_step(next_tensordict)
