"""The rows of an episode as Dreamer's recurrent model reads them, and the sequences that it learns from.

A row is what a step brought, with the action that led to it; the first of an episode's n + 1 has none, and is
made from what the first of TorchRL's frames began with.
"""

from __future__ import annotations

import secrets
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import Composite, TensorSpec, Unbounded
from torchrl.data.replay_buffers import Storage

from rlsync.core.errors import ConfigError
from rlsync.recipes.replay.memory import Memory
from rlsync.torchrl_plugin.compat.replay import OwnSampler, OwnTransform, RowBuffer
from rlsync.torchrl_plugin.compat.stamps import STAMP

#: What heads read while sequences are replayed, and while steps are imagined.
REPLAYED, IMAGINED = [("next", "state"), ("next", "belief")], ["state", "belief"]

#: Which environment a row is of, and its number there.
STREAM, ROW = "stream", "row"


class NumberRows(OwnTransform):
    """Writes on each observation its stream's random id and its row's number; a lost rollout leaves a gap."""

    def __init__(self) -> None:
        super().__init__()
        self._streams: Tensor | None = None
        self._rows = torch.empty(0, dtype=torch.int64, device="cpu")

    def at_reset(self, first: TensorDictBase, begins: Tensor | None) -> TensorDictBase:
        """The rows that begin now have the next numbers."""
        shape = (*first.batch_size, 1)
        if self._streams is None:
            count = max(1, first.numel())
            numbers = [secrets.randbits(62) for _ in range(count)]
            self._streams = torch.tensor(numbers, device="cpu").reshape(shape)
            self._rows = torch.full(shape, -1, device="cpu")
        self._rows += 1 if begins is None else begins.reshape(shape).to(torch.int64)
        return self._numbered(first)

    def at_step(self, after: TensorDictBase) -> TensorDictBase:
        self._rows += 1
        return self._numbered(after)

    def _numbered(self, tensordict: TensorDictBase) -> TensorDictBase:
        assert self._streams is not None
        return tensordict.set(STREAM, self._streams.clone()).set(ROW, self._rows.clone())

    def transform_observation_spec(self, observation_spec: TensorSpec) -> TensorSpec:
        assert isinstance(observation_spec, Composite)
        for key in (STREAM, ROW):
            observation_spec[key] = Unbounded((*observation_spec.shape, 1), dtype=torch.int64)
        return observation_spec


def as_rows(batch: TensorDictBase) -> TensorDictBase:
    """The rows that frames bring; an episode's first one has an action of zeros."""
    frames = batch.reshape(-1)
    after = frames.get("next")
    flags = {name: after.get(name).reshape(-1, 1) for name in ("done", "terminated")}
    brought = {"observation": after.get("observation"), "reward": after.get("reward").reshape(-1, 1)}
    steps = TensorDict(
        {
            "action": frames.get("action").to(torch.float32),
            "is_init": torch.zeros_like(flags["done"]),
            STREAM: after.get(STREAM),
            ROW: after.get(ROW),
            "next": brought | flags,
        },
        frames.batch_size,
    )
    begins = frames.get("is_init").reshape(-1)
    first = frames[begins]
    begun = steps[begins].apply(torch.zeros_like)
    begun["is_init"] = torch.ones_like(begun["is_init"])
    begun[STREAM], begun[ROW] = first.get(STREAM), first.get(ROW)
    begun["next", "observation"] = first.get("observation")
    if STAMP in frames:
        steps[STAMP], begun[STAMP] = frames.get(STAMP), first.get(STAMP)
    return torch.cat([begun, steps])


class Sequences(OwnSampler):
    """Draws sequences of ``length`` rows of one stream, wherever they are stored, all alike likely."""

    def __init__(self, length: int, *, within_episodes: bool = False) -> None:
        self.length = length
        self._within_episodes = within_episodes
        #: The rows in order, and of each the number of its sequence, which is as long as it gets.
        self._found: tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]] | None = None

    def sample(self, storage: Storage, batch_size: int) -> tuple[Tensor, dict[str, Any]]:
        """Rows ``[batch_size]``, one sequence after the other; ConfigError if none that long is stored."""
        return self.find(storage, batch_size // self.length, self.length).reshape(-1), {}

    def find(self, storage: Storage, count: int, length: int) -> Tensor:
        """The places ``[count, length]`` of sequences of any length; see :meth:`sample`."""
        if self._found is None:
            self._found = self._look(storage)
        order, run = self._found
        last = max(0, len(order) - length + 1)
        starts = np.flatnonzero(run[:last] == run[length - 1 :][:last])
        if not len(starts):
            source = "episode" if self._within_episodes else "environment"
            what = f"no {length} rows of one {source} follow each other in the replay buffer"
            cure = "collect more frames before the first update (recipe.pace.prefill), or draw shorter ones"
            raise ConfigError(what, f"{len(storage)} rows are stored", cure)
        chosen = starts[torch.randint(len(starts), (count,), device="cpu").numpy()]
        return torch.from_numpy(order[chosen[:, None] + np.arange(length)])

    def _look(self, storage: Storage) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        stored = storage[: len(storage)]
        stream, row = (stored[key].reshape(-1).cpu().numpy() for key in (STREAM, ROW))
        _, first, which = np.unique(stream, return_index=True, return_inverse=True)
        order = np.lexsort((row, first[which]))  # by where a stream begins here: its id is random
        stream, row = stream[order], row[order]
        torn = (stream[1:] != stream[:-1]) | (row[1:] != row[:-1] + 1)
        if self._within_episodes:
            torn |= stored["is_init"].reshape(-1).cpu().numpy()[order][1:]
        return order, np.concatenate([[0], np.cumsum(torn)])

    def clear(self, *_: object) -> None:
        """Look at the rows anew before the next draw."""
        self._found = None

    add = extend = load_state_dict = clear

    def state_dict(self) -> dict[str, Any]:
        """Nothing: what is stored tells all."""
        return {}


class SequenceMemory(Memory):
    """A memory of rows, from which sequences are drawn. They begin without a state, as episodes do."""

    def __init__(self, buffer: RowBuffer, sequences: Sequences, state: dict[str, int]) -> None:
        super().__init__(buffer)
        self._sequences = sequences
        self._state = state

    def rows(self, batch: TensorDictBase) -> TensorDictBase:
        return as_rows(batch)

    def draw(self, batch: Any) -> TensorDictBase:
        """The sequences ``[sequences, length]`` of the next optimizer step."""
        return self._begun(super().draw(batch).reshape(-1, self._sequences.length))

    def some(self, count: int, length: int) -> TensorDictBase:
        """So many other sequences, of any length, to look at."""
        storage = self.buffer.storage
        return self._begun(storage[self._sequences.find(storage, count, length)])

    def _begun(self, drawn: TensorDictBase) -> TensorDictBase:
        drawn["is_init"][:, 0] = True
        for key, width in self._state.items():
            drawn[key] = torch.zeros(*drawn.shape, width, device=drawn.device)
        return drawn
