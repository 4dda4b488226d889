"""The replay buffer of a recipe: what is stored, and what is drawn."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from torchrl.data import MultiStep
from torchrl.data.replay_buffers import Storage
from torchrl.trainers import Trainer

from rlsync import NotFinite
from rlsync.runs.compat.replay import OwnSampler, RowBuffer, keep_common, next_row
from rlsync.runs.recipes.replay.frames import FIRST_FRAME, Frames
from rlsync.seams import trainers

_ENDS = ("done", "terminated", "truncated")  #: what says that an episode is over after a step


def with_n_step_returns(batch: TensorDictBase, gamma: float, n: int) -> TensorDictBase:
    """The same steps with rewards of up to ``n``; unlike MultiStep's, ends are those of the last step."""
    if n == 1:
        return batch
    summed = MultiStep(gamma=gamma, n_steps=n)(batch)
    time = batch.ndim - 1
    last = torch.arange(batch.shape[-1], device=batch.device) + summed["steps_to_next_obs"] - 1
    for name in _ENDS:
        end = batch.get(("next", name), None)
        if end is not None:
            summed.set(("next", name), end.gather(time, last.unsqueeze(-1).expand(end.shape)))
    return summed


class Memory(trainers.Reader, ABC):
    """Stores every batch, also those of the prefill, and draws what each optimizer step learns from.

    With ``frames`` rows have the numbers of the pictures that they show, and what is drawn has the pictures.
    """

    def __init__(self, buffer: RowBuffer, frames: Frames | None = None) -> None:
        self.buffer = buffer
        self.frames = frames
        self._stores = False  # whether it has stored a batch
        self._kept: list[NestedKey] | None = None  # what is stored of each row; None: all

    def register(self, trainer: Trainer) -> None:
        """Store and draw in this trainer, which has the buffer as its ``replay_buffer``, for checkpoints."""
        trainer.register_op("batch_process", self.store)
        trainer.register_op("process_optim_batch", self.draw)

    def store(self, batch: TensorDictBase) -> TensorDictBase:
        """Keep a batch, which itself is not changed.

        If rows that were loaded have other entries, of all rows those are kept that both have: an earlier
        rlsync stored what no update reads.
        """
        storage = self.buffer.storage
        self._look_at_loaded()
        rows = batch
        if self.frames is not None:
            rows = self.frames.stored(batch, self._first_frame_after(batch.numel()))
        rows = self.rows(rows)
        if not self._stores:
            self._stores = True
            self._kept = keep_common(storage, rows)
        self.buffer.store(rows if self._kept is None else rows.select(*self._kept))
        return batch

    def draw(self, batch: Any) -> TensorDictBase:
        self._look_at_loaded()
        drawn: TensorDictBase = self.buffer.sample()
        if self.frames is not None:
            drawn = self.frames.shown(drawn)
        return drawn

    def _look_at_loaded(self) -> None:
        """Go on without frames if a checkpoint of an earlier rlsync has brought rows with whole pictures."""
        storage = self.buffer.storage
        if self._stores or self.frames is None or not len(storage):
            return
        if not self.frames.are_read_by(storage):
            self.frames = None

    def _first_frame_after(self, count: int) -> int:
        """The lowest number of a frame that rows have which are left when so many more are stored."""
        storage = self.buffer.storage
        capacity = storage.max_size
        if not len(storage) or count >= capacity:
            return sys.maxsize
        oldest = 0
        if len(storage) + count > capacity:
            oldest = (next_row(self.buffer) + count) % capacity
        return int(storage.get(slice(oldest, oldest + 1))[FIRST_FRAME])

    @abstractmethod
    def rows(self, batch: TensorDictBase) -> TensorDictBase:
        """What is kept of a batch, of any shape."""


class StepMemory(Memory):
    """A memory of single steps with returns of ``n_step``; with ``squared_errors`` a loss writes squares."""

    def __init__(
        self,
        buffer: RowBuffer,
        gamma: float,
        n_step: int = 1,
        *,
        frames: Frames | None = None,
        squared_errors: bool = True,
    ) -> None:
        super().__init__(buffer, frames)
        self._gamma = gamma
        self._n_step = n_step
        self._squared_errors = squared_errors

    def prioritize(
        self, trainer: Trainer, sampler: PrioritizedRows, beta: tuple[float, float]
    ) -> None:
        """Give drawn frames the size of their newest error; beta goes linearly to its second number."""

        def anneal(*_: object) -> None:
            done = min(1.0, trainer.collected_frames / trainer.total_frames)
            sampler.beta = beta[0] + done * (beta[1] - beta[0])

        trainer.register_op("pre_optim_steps", anneal)
        trainer.register_op("post_optim_log", self.learned)

    def rows(self, batch: TensorDictBase) -> TensorDictBase:
        return with_n_step_returns(batch, self._gamma, self._n_step)

    def learned(self, batch: TensorDictBase) -> None:
        """An optimizer step is done: the loss has left the errors of the frames in the batch."""
        errors = batch.get(self.buffer.priority_key).detach().reshape(-1).abs()
        sizes = errors.sqrt() if self._squared_errors else errors
        self.buffer.update_priority(batch.get("index").reshape(-1), sizes)


#: What each drawn frame's loss is multiplied by; TorchRL's losses look for this key.
WEIGHT = "priority_weight"

_BLOCK = 256  #: rows whose sizes are summed
_LEAST = 1e-6  #: is added to each error, so that every frame can be drawn


class PrioritizedRows(OwnSampler):
    """Draws frame i with probability ``p_i ** alpha / sum_j p_j ** alpha``.

    p is its newest error, or the largest so far. ``priority_weight`` is ``(N P(i)) ** -beta`` over the
    largest drawn with it (Schaul et al. 2016, https://arxiv.org/abs/1511.05952).
    """

    def __init__(self, capacity: int, alpha: float, beta: float) -> None:
        # p_i ** alpha of each row, 0 where there is no frame, and their sums by block: a draw runs over the
        # blocks, and over the rows of those that it meets.
        self._sizes = np.zeros((1 + (capacity - 1) // _BLOCK, _BLOCK))
        self._capacity = capacity
        self._sums = self._sizes.sum(1)
        self._alpha = alpha
        self.beta = beta
        self._largest = 1.0

    def probabilities(self) -> Tensor:
        """``[capacity]`` float64: how likely each row is drawn next."""
        return torch.from_numpy(self._rows / self._rows.sum())

    def sample(self, storage: Storage, batch_size: int) -> tuple[Tensor, dict[str, Any]]:
        """Rows ``[batch_size]``, with replacement, and their weights."""
        sums = self._sums.cumsum()
        if sums[-1] <= 0:
            raise RuntimeError("Cannot sample from an empty storage.")  # as TorchRL's samplers do
        mass = torch.rand(batch_size, dtype=torch.float64, device="cpu").numpy() * sums[-1]
        # Rounding may make a mass the whole sum, which no running sum passes.
        mass = np.minimum(mass, np.nextafter(sums[-1], 0))
        blocks = sums.searchsorted(mass, side="right")
        # Torch sums along rows, in the same order, and looks up in them in a third of numpy's time.
        inside = torch.from_numpy(self._sizes.take(blocks, 0)).cumsum(1)
        most = np.nextafter(inside[:, -1].numpy(), 0)
        rest = np.minimum(np.maximum(mass - sums[blocks] + self._sums[blocks], 0), most)
        places = torch.searchsorted(inside, torch.from_numpy(rest[:, None]), right=True)
        rows = blocks * _BLOCK + places[:, 0].numpy()
        sizes = self._rows[rows]
        weights = (sizes / sizes.min()) ** -self.beta
        return torch.from_numpy(rows), {WEIGHT: torch.from_numpy(weights).to(torch.float32)}

    def update_priority(
        self, index: int | Tensor, priority: float | Tensor, *, storage: Storage | None = None
    ) -> None:
        """Give rows new errors, none below 0; NotFinite if one is infinite or not a number."""
        rows = torch.as_tensor(index, device="cpu").reshape(-1).numpy()
        errors = (
            torch.as_tensor(priority, device="cpu").detach().reshape(-1).double().numpy() + _LEAST
        )
        if not np.isfinite(errors).all():
            problem = f"the priority of a frame cannot be {errors[~np.isfinite(errors)][0]:g}"
            where = "PrioritizedRows.update_priority, which was given the errors of a loss"
            cure = "look at the rewards and the losses of the steps before; no priority was changed"
            raise NotFinite(problem, where, cure)
        self._largest = max(self._largest, float(errors.max()))
        self._put(rows, errors**self._alpha)

    def extend(self, index: int | Tensor) -> None:
        """New frames, which may take the rows of old ones: each is as likely as any."""
        self._put(
            torch.as_tensor(index, device="cpu").reshape(-1).numpy(), self._largest**self._alpha
        )

    add = extend

    def clear(self) -> None:
        self._sizes[:] = self._sums[:] = 0

    def state_dict(self) -> dict[str, Any]:
        return {"priorities": torch.from_numpy(self._rows.copy()), "largest": self._largest}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._largest = float(state_dict["largest"])
        self._put(np.arange(self._capacity), state_dict["priorities"].numpy())

    @property
    def _rows(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        return self._sizes.reshape(-1)[: self._capacity]

    def _put(self, rows: np.ndarray[Any, Any], sizes: np.ndarray[Any, Any] | float) -> None:
        self._rows[rows] = sizes
        blocks = np.unique(rows // _BLOCK)
        self._sums[blocks] = self._sizes[blocks].sum(1)
