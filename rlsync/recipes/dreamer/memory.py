"""The replay buffer of a Dreamer recipe, as hooks of TorchRL's Trainer."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.data import TensorDictReplayBuffer
from torchrl.trainers import Trainer

from rlsync.recipes.dreamer.rows import as_rows
from rlsync.recipes.dreamer.sequences import Sequences


class SequenceMemory:
    """Puts the rows of every batch into a replay buffer, and draws the sequences of each optimizer step.

    A sequence begins without a state, as an episode does: the recurrent model reads no action in its first
    row, and makes the state from the observations that follow.

    Args:
        buffer: the trainer's ``replay_buffer``.
        sequences: its sampler.
        state: widths of what the recurrent model carries from row to row, by name.
    """

    def __init__(self, buffer: TensorDictReplayBuffer, sequences: Sequences, state: dict[str, int]) -> None:
        self.buffer = buffer
        self._sequences = sequences
        self._state = state

    def register(self, trainer: Trainer) -> None:
        """Store and draw in this trainer, which has the buffer as its ``replay_buffer``, for checkpoints."""
        trainer.register_op("batch_process", self.store)
        trainer.register_op("process_optim_batch", self.draw)

    def store(self, batch: TensorDictBase) -> TensorDictBase:
        """Keep the rows of a batch, which itself is not changed."""
        self.buffer.extend(as_rows(batch))
        return batch

    def draw(self, batch: Any) -> TensorDictBase:
        """The sequences ``[sequences, length]`` of the next optimizer step."""
        return self._begun(self.buffer.sample().reshape(-1, self._sequences.length))

    def some(self, count: int, length: int) -> TensorDictBase:
        """So many other sequences, of any length, to look at."""
        storage = self.buffer.storage
        return self._begun(storage[self._sequences.find(storage, count, length)])

    def _begun(self, drawn: TensorDictBase) -> TensorDictBase:
        drawn["is_init"][:, 0] = True
        for key, width in self._state.items():
            drawn[key] = torch.zeros(*drawn.shape, width, device=drawn.device)
        return drawn
