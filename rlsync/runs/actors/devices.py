"""Devices by name: whether this machine has one, and which worker acts on which."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rlsync import ConfigError

CPU: torch.device = torch.device("cpu")


def device_named(name: str | torch.device, where: str) -> torch.device:
    """The device of this name, an accelerator with its number; ConfigError if this machine has none."""
    try:
        device = torch.device(name)
        if device.type == "cpu":
            count = 1
        else:
            count = int(torch.get_device_module(device).device_count())
    except (RuntimeError, TypeError) as error:  # TypeError: not a name at all
        problem = f"no device is called {str(name)!r}"
        raise ConfigError(
            problem, where, "give cpu, or an accelerator, for example cuda or cuda:1"
        ) from error
    number = device.index or 0
    if number >= count:
        devices = f"{count or 'no'} {device.type.upper()} device{'s' * (count > 1)}"
        problem = f"no device {str(device)!r}: this machine has {devices}"
        raise ConfigError(problem, where, _cure(device, count))
    if device.type == "cpu":
        return CPU
    return torch.device(device.type, number)


def device_of_each(
    names: str | torch.device | Sequence[str | torch.device], workers: int, where: str
) -> tuple[torch.device, ...]:
    """The device on which each worker acts: one name for all workers, or one for each."""
    if workers > 1 << 16:  # a tuple of their devices might not fit into memory
        raise ConfigError(
            f"{workers} workers are more than a machine runs", where, "give fewer workers"
        )
    if isinstance(names, str | torch.device):
        return (device_named(names, where),) * workers
    if not isinstance(names, Sequence):
        problem = f"{names!r} is neither a device nor a list of devices"
        raise ConfigError(problem, where, "give one, for example cpu")
    if len(names) != workers:
        problem = f"{len(names)} device{'s' * (len(names) != 1)} for {workers} worker{'s' * (workers != 1)}"
        cure = f"give one device for all workers, or a list of {workers}, one for each"
        raise ConfigError(problem, where, cure)
    return tuple(device_named(name, f"{where}, entry {entry}") for entry, name in enumerate(names))


def _cure(device: torch.device, count: int) -> str:
    if not count:
        return f"give cpu; {device.type} needs such a device, and a torch that was built for it"
    if device.type == "cpu":
        return "give cpu"
    names = [f"{device.type}:{number}" for number in range(count)]
    return f"give cpu, or one of {', '.join(names)}"
