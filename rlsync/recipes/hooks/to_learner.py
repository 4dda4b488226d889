"""Frames on their way from the collector to the learner's device."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from torchrl.trainers import Trainer


class ToLearner:
    """Moves each batch of a stock collector to the learner's device, before anything computes with it.

    It is the one place where frames leave host memory. Batches that are there already are not copied.

    Example:
        >>> from tensordict import TensorDict
        >>> ToLearner(torch.device("cpu"))(TensorDict({"reward": torch.ones(2)}, [2]))["reward"].device
        device(type='cpu')
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __call__(self, batch: TensorDictBase) -> TensorDictBase:
        return batch.to(self.device)

    def register(self, trainer: Trainer) -> None:
        """Move every batch of this trainer, before the hooks of later stages."""
        trainer.register_op("batch_process", self)
