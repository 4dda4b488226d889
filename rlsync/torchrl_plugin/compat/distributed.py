"""TorchRL's collectors whose workers may be on other hosts: torch.distributed, RPC and Ray."""

from __future__ import annotations

from torchrl.collectors.distributed import (
    DistributedCollector,
    DistributedSyncCollector,
    RayCollector,
    RPCCollector,
)

__all__ = ["DistributedCollector", "DistributedSyncCollector", "RPCCollector", "RayCollector"]
