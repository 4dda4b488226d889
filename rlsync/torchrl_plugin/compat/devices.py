"""The devices that TorchRL's collectors know."""

from __future__ import annotations

import torch
from torchrl.collectors import Collector


def takes_policies_on(device: torch.device) -> bool:
    """Whether a policy of TorchRL's collectors can act on a device; read from 0.14.1.

    A collector looks for a function that waits for the device, and has one for CUDA, MPS and NPU only. Remove
    this function when it has one for every device.
    """
    try:
        Collector._get_sync_fn(None, device)
    except RuntimeError:
        return False
    return True
