"""The replay buffer of a recipe, as hooks of TorchRL's Trainer."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.data import MultiStep, TensorDictReplayBuffer
from torchrl.trainers import Trainer

#: What says that an episode is over after a step.
_ENDS = ("done", "terminated", "truncated")


def with_n_step_returns(batch: TensorDictBase, gamma: float, n: int) -> TensorDictBase:
    """The same steps with rewards summed over up to ``n`` of them, and the observation after these.

    A sum ends where the episode or the batch, ``[*, time]`` of one rollout, ends. TorchRL 0.14's MultiStep
    leaves ``done`` and ``terminated`` as they were after one step, so that a loss would add the value of a
    terminal state. Here they are those of the last step of the sum. The result has ``steps_to_next_obs``
    besides.
    """
    if n == 1:
        return batch
    summed = MultiStep(gamma=gamma, n_steps=n)(batch)
    time = batch.ndim - 1
    last = torch.arange(batch.shape[-1], device=batch.device) + summed["steps_to_next_obs"] - 1
    for name in _ENDS:
        end = batch.get(("next", name), None)
        if end is not None:
            index = last.unsqueeze(-1).expand(end.shape)
            summed.set(("next", name), end.gather(time, index))
    return summed


class Memory:
    """Puts every batch into a replay buffer, and draws what each optimizer step learns from.

    TorchRL's own hooks store a batch only when the trainer learns from it, so the prefill would be lost.
    ``squared_errors`` says whether the loss writes the squares of its errors, or their absolute values.
    """

    def __init__(
        self, buffer: TensorDictReplayBuffer, gamma: float, n_step: int = 1, *, squared_errors: bool = True
    ) -> None:
        self.buffer = buffer
        self._gamma = gamma
        self._n_step = n_step
        self._squared_errors = squared_errors

    def register(self, trainer: Trainer) -> None:
        """Store and draw in this trainer, which has the buffer as its ``replay_buffer``, for checkpoints."""
        trainer.register_op("batch_process", self.store)
        trainer.register_op("process_optim_batch", self.draw)

    def prioritize(self, trainer: Trainer) -> None:
        """Give drawn frames the size of their newest error as their priority."""
        trainer.register_op("post_optim_log", self.learned)

    def store(self, batch: TensorDictBase) -> TensorDictBase:
        """Keep a batch, which itself is not changed."""
        self.buffer.extend(with_n_step_returns(batch, self._gamma, self._n_step).reshape(-1))
        return batch

    def draw(self, batch: Any) -> TensorDictBase:
        """The batch of the next optimizer step."""
        return self.buffer.sample()

    def learned(self, batch: TensorDictBase) -> None:
        """An optimizer step is done: the loss has left the errors of the frames in the batch."""
        errors = batch.get(self.buffer.priority_key).detach().reshape(-1).abs()
        sizes = errors.sqrt() if self._squared_errors else errors
        self.buffer.update_priority(batch.get("index").reshape(-1), sizes)
