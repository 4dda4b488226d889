"""The devices of a run."""

from __future__ import annotations

import torch

from rlsync.recipes.settings import Config
from rlsync.workers.devices import device_named, device_of_each


def learner_device(config: Config) -> torch.device:
    """Where the networks, the loss, the optimizer and TorchRL's replay buffer are."""
    return device_named(config.learner.device, "learner.device")


def worker_devices(config: Config) -> tuple[torch.device, ...]:
    """Where each worker's policy acts."""
    return device_of_each(config.collector.device, config.collector.num_workers, "collector.device")


def evaluation_device(config: Config) -> torch.device:
    """Where ``rlsync eval`` and the evaluating process play."""
    return device_named(config.evaluation.device, "evaluation.device")
