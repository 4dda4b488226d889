"""The settings of devices: where the learner learns, where workers act, where evaluations play."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlsync.core.errors import ConfigError, RlsyncError
from rlsync.recipes.bounds import caught
from rlsync.workers.devices import device_named, device_of_each

if TYPE_CHECKING:
    import torch

    from rlsync.recipes.config import Config

#: What OmegaConf has no type for: the name of a device, or a list of names.
DeviceOrList = Any


@dataclass
class DeviceConfig:
    """The device on which a part of a run computes: ``cpu``, or an accelerator such as ``cuda:1``."""

    device: str = "cpu"


def learner_device(config: Config) -> torch.device:
    """Where the networks, the loss, the optimizer and TorchRL's replay buffer are.

    Raises:
        ConfigError: this machine does not have the device.

    Example:
        >>> from rlsync.recipes.config import Config
        >>> learner_device(Config())
        device(type='cpu')
    """
    return device_named(config.learner.device, "learner.device")


def worker_devices(config: Config) -> tuple[torch.device, ...]:
    """Where each worker's policy acts.

    Raises:
        ConfigError: this machine does not have one of the devices, or there is not one for each worker.

    Example:
        >>> from rlsync.recipes.config import Config
        >>> worker_devices(Config())
        (device(type='cpu'), device(type='cpu'))
    """
    collector = config.collector
    return device_of_each(collector.device, collector.num_workers, "collector.device")


def evaluation_device(config: Config) -> torch.device:
    """Where ``rlsync eval`` and the evaluating process play.

    Raises:
        ConfigError: this machine does not have the device.

    Example:
        >>> from rlsync.recipes.config import Config
        >>> evaluation_device(Config())
        device(type='cpu')
    """
    return device_named(config.evaluation.device, "evaluation.device")


def stock_device_errors(config: Config) -> Iterator[RlsyncError]:
    """One error for each device on which a policy of TorchRL's own collectors cannot act.

    What :func:`device_errors` finds is not told again.
    """
    if any(device_errors(config)) or {device.type for device in worker_devices(config)} == {"cpu"}:
        return
    from rlsync.torchrl_plugin.compat.collectors import takes_policies_on  # takes seconds to import

    for device in dict.fromkeys(worker_devices(config)):
        if not takes_policies_on(device):
            yield ConfigError(
                f"TorchRL's collectors cannot act on {str(device)!r}",
                "collector.device",
                "give cpu or a CUDA device; the workers of recipe=impala act on any device",
            )


def device_errors(config: Config) -> Iterator[RlsyncError]:
    """One error for each key whose device this machine lacks, or whose list does not fit the workers."""
    yield from caught(lambda: learner_device(config))
    yield from caught(lambda: worker_devices(config))
    yield from caught(lambda: evaluation_device(config))
