"""How a replay stores unrolls: one row each in a TorchRL storage, under numbers that are never used again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import LazyMemmapStorage, LazyTensorStorage

from rlsync.core.errors import ConfigError
from rlsync.core.path import nearest_name
from rlsync.workers import frames as keys
from rlsync.workers.player import Record

#: By column: the shape in one row, and the dtype.
Form = dict[str, tuple[tuple[int, ...], torch.dtype]]
#: The step that a final observation followed.
TIME = "time"


class FinalRows(NamedTuple):
    """The final observations of a batch, unroll by unroll, and how many each of the B unrolls has, [B]."""

    rows: TensorDict
    counts: Tensor


class Ring:
    """Keeps the newest ``capacity`` of the rows that were put in. Rows are numbered from 0.

    Args:
        capacity: how many rows are kept.
        folder: for the files of a memory-mapped storage; None keeps the rows in memory.

    Example:
        >>> ring = Ring(2, None)
        >>> ring.put(TensorDict({"a": torch.arange(3)}, [3]))
        >>> ring.written, ring.take(torch.tensor([2, 1]))["a"]
        (3, tensor([2, 1]))
    """

    def __init__(self, capacity: int, folder: Path | None) -> None:
        self.capacity = capacity
        self.written = 0
        self._storage = (
            LazyTensorStorage(capacity)
            if folder is None
            else LazyMemmapStorage(capacity, scratch_dir=str(folder))
        )

    def put(self, rows: TensorDictBase) -> None:
        """Add rows; they overwrite the oldest ones."""
        before, self.written = self.written, self.written + len(rows)
        kept = rows[-self.capacity :]
        if len(kept):
            numbers = torch.arange(max(before, self.written - self.capacity), self.written)
            self._storage.set(numbers % self.capacity, kept)

    def take(self, numbers: Tensor) -> TensorDict:
        """Copy the rows with these numbers. They must still be there."""
        rows: TensorDict = self._storage.get(numbers % self.capacity)
        return rows


def to_rows(batch: TensorDictBase, records: Sequence[Record] = ()) -> tuple[TensorDict, FinalRows]:
    """The unrolls of a batch as rows, and its final observations, both on the CPU.

    Args:
        batch: which is copied.
        records: what the player records under names that the contract does not have.

    Raises:
        ConfigError: a key is not in the contract, a required key is missing, or unrolls were replayed.
    """
    known, timed = keys.known_keys(records), keys.timed_keys(records)
    _check_keys(batch, known)
    columns = {}
    for key in known:
        if key in batch and key != keys.REPLAYED and key not in keys.FINAL:
            tensor = batch.get(key).detach()
            columns[key] = (tensor.transpose(0, 1) if key in timed else tensor).cpu()
    rows = TensorDict(columns, columns[keys.REWARD].shape[:1])
    return rows, _final_rows(batch, len(rows))


def _final_rows(batch: TensorDictBase, unrolls: int) -> FinalRows:
    if keys.FINAL_INDEX not in batch:
        return FinalRows(TensorDict({}, [0]), torch.zeros(unrolls, dtype=torch.int64))
    time, unroll = batch.get(keys.FINAL_INDEX).cpu().unbind(-1)
    order = unroll.argsort(stable=True)
    observations = batch.get(keys.FINAL_OBSERVATION).detach().cpu()[order]
    rows = TensorDict({keys.FINAL_OBSERVATION: observations, TIME: time[order]}, [len(order)])
    return FinalRows(rows, unroll.bincount(minlength=unrolls))


def form_of(rows: TensorDict) -> Form:
    """The shapes and dtypes that all rows of one replay must have."""
    return {str(key): (tuple(tensor.shape[1:]), tensor.dtype) for key, tensor in sorted(rows.items())}


def must_fit(form: Form, held: Form) -> None:
    """Refuse rows whose columns differ: TorchRL's storage would keep old values in columns that are missing.

    Raises:
        ConfigError: names the first column that differs.
    """
    for key in sorted(form.keys() | held.keys()):
        if form.get(key) == held.get(key):
            continue
        has, wants = (_in_words(one.get(key)) for one in (form, held))
        raise ConfigError(
            f"{key!r} of an unroll is {has}; the replay holds {wants}",
            "UnrollReplay.extend",
            "give batches of one length and with the same keys, also where agents share a replay",
        )


def _in_words(column: tuple[tuple[int, ...], torch.dtype] | None) -> str:
    return "none" if column is None else f"{list(column[0])} of {column[1]}"


def _check_keys(batch: TensorDictBase, known: Sequence[str]) -> None:
    has = sorted(map(str, batch.keys()))
    where = f"batch; it has: {', '.join(has) or 'nothing'}"
    needed = [*keys.REQUIRED, *(keys.FINAL if any(key in batch for key in keys.FINAL) else ())]
    for key in needed:
        if key not in batch:
            raise ConfigError(f"the batch has no {key!r}", where, f"write {key!r}")
    for key in has:
        if key not in known:
            near = nearest_name(key, known)
            cure = f"did you mean {near!r}?" if near else "drop it; rlsync.workers.frames lists the keys"
            raise ConfigError(f"no batch has {key!r}", where, cure)
    if keys.REPLAYED in batch and bool(batch.get(keys.REPLAYED).any()):
        raise ConfigError(
            "unrolls from replay would be held twice", where, "extend the replay with online unrolls only"
        )
