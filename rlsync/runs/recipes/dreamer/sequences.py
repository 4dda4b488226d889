"""The rows of an episode as Dreamer's recurrent model reads them, and the sequences that it learns from.

A row is what a step brought, with the action that led to it; the first of an episode's n + 1 has none, and is
made from what the first of TorchRL's frames began with.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data.replay_buffers import Storage

from rlsync import ConfigError
from rlsync.runs.actors.intake import RolloutId
from rlsync.runs.compat.replay import OwnSampler, RowBuffer
from rlsync.runs.recipes.impala.heads import MultiCategorical
from rlsync.runs.recipes.replay.memory import Memory
from rlsync.seams import STAMP

#: What heads read while sequences are replayed, and while steps are imagined.
REPLAYED = [("next", "state"), ("next", "belief")]
IMAGINED = ["state", "belief"]

#: Which environment a row is of, and its number there.
STREAM = "stream"
ROW = "row"


class Streams:
    """Numbers the rows of rollouts of rlsync's own workers.

    Those of an environment follow each other where one rollout of a worker follows the other. After a lost
    one, and in another life, new streams begin.
    """

    def __init__(self) -> None:
        #: The last rollout of each worker, the ids of its streams, and the numbers of their next rows, [N].
        self._last: dict[int, tuple[RolloutId, Tensor, Tensor]] = {}

    def numbered(self, batch: TensorDictBase, rollouts: Sequence[RolloutId]) -> TensorDictBase:
        """Transitions ``[B, T]``, as many of each rollout, with streams and numbers of rows."""
        begins = batch.get("is_init").reshape(batch.shape).to("cpu", torch.int64)
        streams = []
        rows = []
        for rollout, firsts in zip(rollouts, begins.chunk(len(rollouts)), strict=True):
            stream_of_rollout, row_of_rollout = self._part(rollout, firsts)
            streams.append(stream_of_rollout)
            rows.append(row_of_rollout)
        stream = torch.cat(streams).unsqueeze(-1)
        row = torch.cat(rows).unsqueeze(-1)
        after = batch.get("next").copy().update({STREAM: stream, ROW: row})
        # Where an episode begins the number before is that of its first row.
        return batch.copy().update({STREAM: stream, ROW: row - 1, "next": after})

    def _part(self, rollout: RolloutId, begins: Tensor) -> tuple[Tensor, Tensor]:
        """The streams and the numbers of the rows that steps bring, ``[N, T]``."""
        last = self._last.get(rollout.worker)
        if last is not None and last[0]._replace(number=last[0].number + 1) == rollout:
            _, streams, after = last
        else:
            streams = torch.tensor([secrets.randbits(62) for _ in begins], device="cpu")
            after = torch.zeros_like(streams)
        row = after.unsqueeze(-1) + (1 + begins).cumsum(1) - 1
        self._last[rollout.worker] = rollout, streams, row[:, -1] + 1
        return streams.unsqueeze(-1).expand_as(row), row


def as_rows(batch: TensorDictBase) -> TensorDictBase:
    """The rows that frames bring; an episode's first one has an action of zeros."""
    frames = batch.reshape(-1)
    after = frames.get("next")
    done = after.get("done").reshape(-1, 1)
    steps = TensorDict(
        {
            "action": frames.get("action").to(torch.float32),
            "is_init": torch.zeros_like(done),
            STREAM: after.get(STREAM),
            ROW: after.get(ROW),
            "next": {
                "observation": after.get("observation"),
                "reward": after.get("reward").reshape(-1, 1),
                "done": done,
                "terminated": after.get("terminated").reshape(-1, 1),
            },
        },
        frames.batch_size,
    )

    # One row more for each episode: what it began with, which no step has brought.
    begins = frames.get("is_init").reshape(-1)
    first = frames[begins]
    begun = steps[begins].apply(torch.zeros_like)
    begun["is_init"] = torch.ones_like(begun["is_init"])
    begun[STREAM] = first.get(STREAM)
    begun[ROW] = first.get(ROW)
    begun["next", "observation"] = first.get("observation")

    if STAMP in frames:
        steps[STAMP] = frames.get(STAMP)
        begun[STAMP] = first.get(STAMP)
    return torch.cat([begun, steps])


class Sequences(OwnSampler):
    """Draws sequences of ``length`` rows of one stream, wherever they are stored, all alike likely."""

    def __init__(self, length: int, *, within_episodes: bool = False) -> None:
        self.length = length
        self._within_episodes = within_episodes
        #: The rows in order, and of each the number of its sequence, which is as long as it gets.
        self._found: tuple[NDArray[np.intp], NDArray[np.intp]] | None = None

    def sample(self, storage: Storage, batch_size: int) -> tuple[Tensor, dict[str, object]]:
        """Rows ``[batch_size]``, one sequence after the other; ConfigError if none that long is stored."""
        if self._found is None:
            self._found = self._look(storage)
        order, run = self._found
        last = max(0, len(order) - self.length + 1)
        starts = np.flatnonzero(run[:last] == run[self.length - 1 :][:last])
        if not len(starts):
            if self._within_episodes:
                source = "episode"
            else:
                source = "environment"
            problem = (
                f"no {self.length} rows of one {source} follow each other in the replay buffer"
            )
            cure = "collect more frames before the first update (recipe.pace.prefill), or draw shorter ones"
            raise ConfigError(problem, f"{len(storage)} rows are stored", cure)
        count = batch_size // self.length
        chosen = starts[torch.randint(len(starts), (count,), device="cpu").numpy()]
        places = order[chosen[:, None] + np.arange(self.length)]
        return torch.from_numpy(places).reshape(-1), {}

    def _look(self, storage: Storage) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        stored = storage[: len(storage)]
        stream = stored[STREAM].reshape(-1).cpu().numpy()
        row = stored[ROW].reshape(-1).cpu().numpy()
        _, first, which = np.unique(stream, return_index=True, return_inverse=True)
        order = np.lexsort((row, first[which]))  # by where a stream begins here: its id is random
        stream = stream[order]
        row = row[order]
        torn = (stream[1:] != stream[:-1]) | (row[1:] != row[:-1] + 1)
        if self._within_episodes:
            torn |= stored["is_init"].reshape(-1).cpu().numpy()[order][1:]
        return order, np.concatenate([[0], np.cumsum(torn)])

    def clear(self, *_: object) -> None:
        """Look at the rows anew before the next draw."""
        self._found = None

    add = extend = load_state_dict = clear

    def state_dict(self) -> dict[str, object]:
        """Nothing: what is stored tells all."""
        return {}


class SequenceMemory(Memory):
    """A memory of rows, from which sequences are drawn. They begin without a state, as episodes do.

    ``choices`` is the head of actions that are several choices: rows have them one-hot, as the model sees them.
    """

    def __init__(
        self,
        buffer: RowBuffer,
        sequences: Sequences,
        state: Mapping[str, int],
        rollouts: Callable[[], Sequence[RolloutId]],
        choices: MultiCategorical | None = None,
    ) -> None:
        super().__init__(buffer)
        self._sequences = sequences
        self._state = state
        self._rollouts = rollouts  # of the batch that is stored
        self._choices = choices
        self._streams = Streams()

    def rows(self, batch: TensorDictBase) -> TensorDictBase:
        if self._choices is not None:
            batch = batch.copy().set("action", self._choices.encode(batch.get("action")))
        return as_rows(self._streams.numbered(batch, self._rollouts()))

    def draw(self, batch: Any) -> TensorDictBase:
        """The sequences ``[sequences, length]`` of the next optimizer step."""
        drawn = super().draw(batch).reshape(-1, self._sequences.length)
        drawn["is_init"][:, 0] = True
        for key, width in self._state.items():
            drawn[key] = torch.zeros(*drawn.shape, width, device=drawn.device)
        return drawn
