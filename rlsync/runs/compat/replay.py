"""TorchRL's replay buffers, and the base class of transforms that add to what is stored."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import ReplayBuffer, TensorDictReplayBuffer
from torchrl.data.replay_buffers import Storage
from torchrl.data.replay_buffers.samplers import Sampler
from torchrl.data.replay_buffers.writers import TensorDictRoundRobinWriter

_FILE = "sampler.pt"
_INDEX = "index"  #: a buffer gives each row its own


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
        state: dict[str, Any] = torch.load(
            Path(path) / _FILE, map_location="cpu", weights_only=True
        )
        self.load_state_dict(state)

    def _empty(self) -> None:
        self.clear()


def rows_given(buffer: ReplayBuffer) -> int | None:
    """How many rows a buffer was given; None if two counts contradict."""
    rows = int(buffer.write_count)
    capacity = buffer.storage.max_size
    holds = rows >= len(buffer) and rows % capacity == next_row(buffer)
    if holds:
        return rows
    return None


def next_row(buffer: ReplayBuffer) -> int:
    """The place of the next row. Until the cursor has a public name."""
    place: int = buffer.writer._cursor
    return place


def forget_rows(storage: Storage) -> None:
    """Let a storage hold no row. Until a storage can be emptied without its buffer."""
    storage._empty()


def keep_common(storage: Storage, rows: TensorDictBase) -> list[NestedKey] | None:
    """Let a storage forget the entries that new rows lack, and say which of theirs it has.

    None: both have the same. The rows of a checkpoint may have other entries than those of now. Until a
    storage takes such rows.
    """
    stored = getattr(storage, "_storage", None)
    if not isinstance(stored, TensorDictBase):
        return None
    old, new = (set(each.keys(include_nested=True, leaves_only=True)) for each in (stored, rows))
    old.discard(_INDEX)
    if old == new - {_INDEX}:
        return None
    common: list[NestedKey] = [key for key in new if key in old]
    storage._storage = stored.select(*common, _INDEX, strict=False)
    return common


class RowBuffer(TensorDictReplayBuffer):
    """A buffer of rows ``[N]`` that stores and draws tensor by tensor.

    TorchRL 0.14 takes five times as long (eight draws in one would save a fifth more, and draw other
    numbers). It has no transforms and no prefetching. Until a draw costs what its gathers cost, and a store
    what its copies cost.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        #: Which of the stored fields are drawn, beside what the sampler adds; None: all.
        self.fields: Fields | None = None

    def sample(
        self,
        batch_size: int | None = None,
        return_info: bool = False,
        include_info: bool | None = None,
    ) -> Any:
        size = self.batch_size if batch_size is None else batch_size
        index, info = self.sampler.sample(self.storage, size)
        stored = self.storage._storage
        info = {**info, "index": index}
        drawn = _rows(stored, index.to(stored.device), self.fields)
        for name, value in info.items():
            drawn._tensordict[name] = value.to(stored.device)
        if return_info:
            return (drawn, info)
        return drawn

    def store(self, batch: TensorDictBase) -> None:
        """Extend the buffer by the rows of a batch ``[*B]``, which is not changed."""
        if self._copied(batch) is None:
            super().extend(batch.reshape(-1))

    def extend(self, tensordicts: TensorDictBase, *, update_priority: bool | None = None) -> Tensor:
        index = self._copied(tensordicts) if tensordicts.ndim == 1 else None
        if index is None:
            return super().extend(tensordicts, update_priority=update_priority)
        return index

    def _copied(self, batch: TensorDictBase) -> Tensor | None:
        """Do what TorchRL's ``extend`` does, and return the rows' numbers; else do nothing.

        It does so if ``extend`` only copied fields that are stored already into rows that follow each other.
        """
        storage = self.storage
        writer = self.writer
        count = batch.numel()
        if not (storage.initialized and type(writer) is TensorDictRoundRobinWriter):
            return None
        with self._replay_lock, self._write_lock:
            first = writer._cursor
            capacity = storage.max_size
            end = first + count
            if not first < end <= capacity or self.priority_key in batch:
                return None
            index = torch.arange(first, end, device=batch.device or "cpu")
            pairs: list[tuple[Tensor, Tensor]] = []
            more = {"index": index}
            place = slice(first, end)
            if not _paired(storage._storage, batch, place, pairs, shape=batch.shape, more=more):
                return None
            writer._cursor = end % capacity
            writer._write_count += count
            storage._set_last_cursor(index)
            storage._len = min(len(storage) + count, capacity)
            rows, new = zip(*pairs, strict=True)
            torch._foreach_copy_(rows, new)
            storage._bump_mutation_revision()
            writer._bump_generation(index, batch)
            writer._mark_update_entities(index)
            self.sampler.extend(index)
        return index


def _paired(
    stored: TensorDictBase,
    batch: TensorDictBase,
    place: slice,
    pairs: list[tuple[Tensor, Tensor]],
    *,
    shape: torch.Size,
    more: Mapping[str, Tensor],
) -> bool:
    """Pair the rows of a place, in the shape of a batch, with those of the batch; False if they do not fit.

    ``more`` has what is stored beside the batch.
    """
    if not (type(stored) is type(batch) is TensorDict):
        return False
    entries = batch._tensordict
    if len(entries) + sum(name not in entries for name in more) != len(stored._tensordict):
        return False
    for name, whole in stored._tensordict.items():
        value = more.get(name, entries.get(name))
        if isinstance(whole, Tensor):
            rows = whole[place]
            if name not in more:
                # A batch of several rollouts is transposed: to make it flat would copy it once more.
                rows = rows.unflatten(0, shape)
            if (
                not isinstance(value, Tensor)
                or rows.shape != value.shape
                or rows.dtype != value.dtype
            ):
                return False
            pairs.append((rows, value))
        else:
            inner = isinstance(value, TensorDict)
            if not (inner and _paired(whole, value, place, pairs, shape=shape, more={})):
                return False
    return True


#: Fields by name: None is a field, or all that is below it; else it is what is below.
Fields = Mapping[str, "Fields | None"]


def by_name(keys: Iterable[NestedKey]) -> Fields:
    """These fields, for ``RowBuffer.fields``."""
    fields: dict[str, Any] = {}
    for key in keys:
        *above, last = (key,) if isinstance(key, str) else key
        at: dict[str, Any] | None = fields
        for name in above:
            at = None if at is None else at.setdefault(name, {})
        if at is not None:
            at[last] = None
    return fields


def _rows(stored: TensorDictBase, index: Tensor, fields: Fields | None) -> TensorDict:
    """Rows of a tensordict, with those fields that it has, in a new one whose entries nobody has to check."""
    rows: dict[str, Any] = {}
    entries = stored._tensordict
    for name in entries if fields is None else fields:
        value = entries.get(name)
        if isinstance(value, Tensor):
            rows[name] = value.index_select(0, index)
        elif value is not None:
            rows[name] = _rows(value, index, None if fields is None else fields[name])
    return TensorDict._new_unsafe(source=rows, batch_size=index.shape, device=stored.device)
