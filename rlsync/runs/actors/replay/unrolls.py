"""LASER's replay: whole unrolls as the workers recorded them, drawn uniformly, in memory or on disk."""

from __future__ import annotations

import shutil
import tempfile
import threading
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import LazyMemmapStorage, LazyTensorStorage

from rlsync import ConfigError
from rlsync.runs.actors import frames as keys
from rlsync.runs.actors.player import Record

#: by column: the shape in one row, and the dtype
_Form = dict[str, tuple[tuple[int, ...], torch.dtype]]
_TIME = "time"  #: the step that a final observation followed
# Columns of a stored unroll in addition to those of the contract.
_AGENT = "_agent"
_FINAL_FIRST = "_final_first"
_FINAL_COUNT = "_final_count"
_STATE_KEYS = ("contents", "agent", "generator")


class Drawn(NamedTuple):
    """What was drawn.

    Example:
        >>> Drawn(TensorDict({"reward": torch.ones(5, 2)}), torch.tensor([0, 1])).agent
        tensor([0, 1])
    """

    batch: TensorDict  #: n unrolls, as :mod:`rlsync.runs.actors.frames` says
    agent: Tensor  #: [n] int64, the number of the agent that made each one
    worker: Tensor | None = None  #: [n] int64, the worker of that agent; None where it is not known


class UnrollReplay:
    """Holds the newest unrolls, whole, and draws from them uniformly, with replacement.

    What comes out is what went in, bit by bit: every key of :mod:`rlsync.runs.actors.frames`, so also the
    log-probabilities of the policy that acted, the recurrent state and the final observations. Only
    ``replayed`` is set, to True. All unrolls have the same length and keys as the first batch. When the
    replay is full, the oldest unrolls are dropped one by one. Most unrolls have no final observations, so
    these have a store of their own; when that is full, the oldest unrolls are dropped together with theirs.

    Several agents may share one replay, from several threads of one process: each gives its number.

    Args:
        capacity_steps: how many steps are held at most. Only whole unrolls are held, so it may be less by up
            to one unroll.
        path: a folder in which a new folder for the files is made; it is deleted with the replay. None holds
            the unrolls in memory.
        seed: of the draws.
        records: what the player records under names that :mod:`rlsync.runs.actors.frames` does not list:
            ``player.records``.

    Raises:
        ConfigError: the capacity is less than one unroll, or a batch does not fit what is held.

    Source: LASER, arXiv 1909.11583; torchrl.data.LazyTensorStorage and LazyMemmapStorage hold the tensors.

    Example:
        >>> no = torch.zeros(5, 3, dtype=torch.bool)
        >>> batch = TensorDict({
        ...     "observation": torch.randn(6, 3, 4), "is_init": torch.zeros(6, 3, dtype=torch.bool),
        ...     "action": torch.zeros(5, 3, dtype=torch.int64), "reward": torch.ones(5, 3),
        ...     "behaviour_log_prob": torch.zeros(5, 3), "terminated": no, "truncated": no,
        ... })
        >>> replay = UnrollReplay(capacity_steps=1000)
        >>> replay.extend(batch)
        >>> len(replay), replay.steps, replay.draw(2).batch["observation"].shape
        (3, 15, torch.Size([6, 2, 4]))
    """

    def __init__(
        self,
        capacity_steps: int,
        *,
        path: str | Path | None = None,
        seed: int = 0,
        records: Sequence[Record] = (),
    ) -> None:
        self.capacity_steps = capacity_steps
        self.records = tuple(records)
        self.generator = torch.Generator().manual_seed(seed)
        self._folder: Path | None = None
        if path is not None:
            Path(path).mkdir(parents=True, exist_ok=True)
            self._folder = Path(tempfile.mkdtemp(prefix="replay-", dir=path))
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self._form: _Form = {}
        self._unrolls = self._finals = RowStore(0, None)
        self._first = 0  # the number of the oldest unroll
        self.full = False  #: whether unrolls were dropped already because the replay was full
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """How many unrolls are held."""
        return self._unrolls.written - self._first

    @property
    def steps(self) -> int:
        """How many steps are held."""
        if self._form:
            return len(self) * self._form[keys.REWARD][0][0]
        return 0

    def extend(self, batch: TensorDictBase, agent: int | Tensor = 0) -> None:
        """Add the unrolls of a batch; the last one is the newest.

        Args:
            batch: as :mod:`rlsync.runs.actors.frames` says, on any device.
            agent: the number of the agent that made it, or [B] of them.

        Raises:
            ConfigError: keys, shapes or dtypes are not those of what is held, or unrolls are replayed ones.
        """
        rows, finals, count = _to_rows(batch, self.records)
        form = {
            str(key): (tuple(tensor.shape[1:]), tensor.dtype)
            for key, tensor in sorted(rows.items())
        }
        with self._lock:
            if not self._form:
                self._begin(form)
            _must_fit(form, self._form)
            rows.set(_AGENT, torch.zeros_like(count) + agent)
            rows.set(_FINAL_COUNT, count)
            rows.set(_FINAL_FIRST, self._finals.written + count.cumsum(0) - count)
            self._finals.put(finals)
            self._unrolls.put(rows)
            self._evict()

    def draw(self, unrolls: int) -> Drawn:
        """Draw this many unrolls, each uniformly from all that are held.

        Args:
            unrolls: how many, one or more.

        Raises:
            ConfigError: the replay is empty, or ``unrolls`` is below one.
        """
        with self._lock:
            if not len(self) or unrolls < 1:
                problem = f"{unrolls} unrolls cannot be drawn from {len(self)}"
                cure = "extend the replay first, and ask for one or more"
                raise ConfigError(problem, "UnrollReplay.draw", cure)
            return self._read(
                torch.randint(len(self), (unrolls,), generator=self.generator, device="cpu")
            )

    def state_dict(self, contents: bool = True) -> dict[str, Any]:
        """The unrolls from old to new, the agents that made them, and the state of the random draws.

        Args:
            contents: False leaves the unrolls out: a replay that loads this begins empty. True copies all of
                them into memory, also those of a replay on disk.
        """
        with self._lock:
            state: dict[str, Any] = {"generator": self.generator.get_state()}
            if contents and len(self):
                state["contents"], state["agent"] = self._read(
                    torch.arange(len(self), device="cpu")
                )[:2]
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` returned; drop what is held now. A smaller replay keeps the newest.

        Call it before the first draw: other threads must not use the replay at the same time.

        Args:
            state_dict: what :meth:`state_dict` returned.

        Raises:
            ConfigError: it is not the state of a replay.
        """
        unknown = sorted(set(state_dict) - set(_STATE_KEYS))
        if unknown or "generator" not in state_dict:
            problem = (
                f"this is not the state of a replay: {', '.join(unknown) or 'it has no generator'}"
            )
            raise ConfigError(
                problem, "UnrollReplay.load_state_dict", "give what state_dict() returned"
            )
        self._first = self._unrolls.written
        self.full = False
        if "contents" in state_dict:
            self.extend(state_dict["contents"].exclude(keys.REPLAYED), state_dict["agent"])
        self.generator.set_state(state_dict["generator"])

    def _begin(self, form: _Form) -> None:
        length = form[keys.REWARD][0][0]
        capacity = self.capacity_steps // length
        if capacity < 1:
            problem = (
                f"a replay of {self.capacity_steps} steps has no room for an unroll of {length}"
            )
            raise ConfigError(problem, "UnrollReplay(capacity_steps=...)", f"give {length} or more")
        self._form = form
        self._unrolls = RowStore(capacity, self._folder and self._folder / "unrolls")
        self._finals = RowStore(max(capacity, length), self._folder and self._folder / "finals")

    def _evict(self) -> None:
        before = self._first
        self._first = max(self._first, self._unrolls.written - self._unrolls.capacity)
        oldest_final = self._finals.written - self._finals.capacity
        while oldest_final > 0 and len(self):
            first = torch.tensor([self._first], device="cpu")
            if int(self._unrolls.take(first)[_FINAL_FIRST]) >= oldest_final:
                break
            self._first += 1
        self.full = self.full or self._first > before

    def _read(self, positions: Tensor) -> Drawn:
        """Read the unrolls at these positions; 0 is the oldest."""
        rows = self._unrolls.take(self._first + positions)
        timed = keys.timed_keys(self.records)
        out: dict[str, Tensor] = {}
        for key in self._form:
            if key in timed:
                out[key] = rows[key].transpose(0, 1)
            else:
                out[key] = rows[key]
        out[keys.REPLAYED] = torch.ones(len(positions), dtype=torch.bool, device="cpu")
        count = rows[_FINAL_COUNT]
        if count.any():
            unroll = torch.arange(len(positions), device="cpu").repeat_interleave(count)
            before = (count.cumsum(0) - count)[unroll]
            nth = torch.arange(len(unroll), device="cpu")
            finals = self._finals.take(rows[_FINAL_FIRST][unroll] + nth - before)
            out[keys.FINAL_OBSERVATION] = finals[keys.FINAL_OBSERVATION]
            out[keys.FINAL_INDEX] = torch.stack([finals[_TIME], unroll], -1)
        return Drawn(TensorDict(out), rows[_AGENT])


class RowStore:
    """The newest ``capacity`` of the rows that were put in, numbered from 0, in a folder or in memory."""

    def __init__(self, capacity: int, folder: Path | None) -> None:
        self.capacity = capacity
        self.written = 0
        on_disk = folder is not None
        if on_disk:
            make = partial(LazyMemmapStorage, scratch_dir=str(folder))
        else:
            make = LazyTensorStorage
        self._storage = make(capacity)

    def put(self, rows: TensorDictBase) -> None:
        """Add rows; they overwrite the oldest ones."""
        before = self.written
        self.written = self.written + len(rows)
        newest = rows[-self.capacity :]
        if len(newest):
            numbers = torch.arange(
                max(before, self.written - self.capacity), self.written, device="cpu"
            )
            self._storage.set(numbers % self.capacity, newest)

    def take(self, numbers: Tensor) -> TensorDict:
        """Copy the rows with these numbers. They must still be there."""
        rows: TensorDict = self._storage.get(numbers % self.capacity)
        return rows


def _to_rows(
    batch: TensorDictBase, records: Sequence[Record]
) -> tuple[TensorDict, TensorDict, Tensor]:
    """Copies on the CPU: B unrolls as rows, final observations by unroll, and how many each has, [B]."""
    known = keys.known_keys(records)
    timed = keys.timed_keys(records)
    _check_keys(batch, known)
    columns = {}
    for key in known:
        if key in batch and key != keys.REPLAYED and key not in keys.FINAL:
            column = batch.get(key).detach()
            if key in timed:
                column = column.transpose(0, 1)
            columns[key] = column.cpu()
    rows = TensorDict(columns, columns[keys.REWARD].shape[:1])
    if keys.FINAL_INDEX not in batch:
        return rows, TensorDict({}, [0]), torch.zeros(len(rows), dtype=torch.int64, device="cpu")
    time, unroll = batch.get(keys.FINAL_INDEX).cpu().unbind(-1)
    order = unroll.argsort(stable=True)
    observations = batch.get(keys.FINAL_OBSERVATION).detach().cpu()[order]
    finals = TensorDict({keys.FINAL_OBSERVATION: observations, _TIME: time[order]}, [len(order)])
    return rows, finals, unroll.bincount(minlength=len(rows))


def _must_fit(form: _Form, held: _Form) -> None:
    """Refuse rows whose columns differ: TorchRL's storage would keep old values where a column is missing."""
    for key in sorted(form.keys() | held.keys()):
        if form.get(key) == held.get(key):
            continue
        has = _in_words(form.get(key))
        wants = _in_words(held.get(key))
        problem = f"{key!r} of an unroll is {has}; the replay holds {wants}"
        cure = "give batches of one length and with the same keys, also where agents share a replay"
        raise ConfigError(problem, "UnrollReplay.extend", cure)


def _in_words(column: tuple[tuple[int, ...], torch.dtype] | None) -> str:
    if column is None:
        return "none"
    return f"{list(column[0])} of {column[1]}"


def _check_keys(batch: TensorDictBase, known: Sequence[str]) -> None:
    needed = [*keys.REQUIRED]
    if any(key in batch for key in keys.FINAL):
        needed += keys.FINAL
    for key in needed:
        if key not in batch:
            raise keys.bad_batch(f"the batch has no {key!r}", batch, f"write {key!r}")
    keys.check_known(batch, known)
    if keys.REPLAYED in batch and bool(batch.get(keys.REPLAYED).any()):
        cure = "extend the replay with online unrolls only"
        raise keys.bad_batch("unrolls from replay would be held twice", batch, cure)
