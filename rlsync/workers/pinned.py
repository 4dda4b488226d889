"""Memory that other processes write to, made known to CUDA, which then reads it without the processor."""

from __future__ import annotations

import logging
from collections.abc import Collection

import torch
from torch import Tensor

_log = logging.getLogger(__name__)


class PinnedSlots:
    """Pins the slots of a ring for copies to a CUDA device; for any other device it does nothing.

    CUDA reads pinned memory by itself, so a copy with ``non_blocking=True`` returns at once. Ordinary memory
    is copied through a buffer of CUDA's, while the call waits. If CUDA refuses to pin, a line in the log says
    so and ordinary memory serves.

    Args:
        device: where copies go.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pinned: dict[int, int] = {}  # by slot, the address
        self._refused = False

    def pin(self, slot: int, arrays: Collection[Tensor]) -> None:
        """Pin the memory of a slot, from the first of these arrays to the end of the last one.

        Args:
            slot: its number; a second call for the same slot does nothing.
            arrays: neighbours in one image. Leave out those that are mostly empty: their pages would be made.
        """
        if self._device.type != "cuda" or slot in self._pinned or self._refused:
            return
        first = min(array.data_ptr() for array in arrays)
        end = max(array.data_ptr() + array.nbytes for array in arrays)
        error = int(torch.cuda.cudart().cudaHostRegister(first, end - first, 0))
        if error:
            self._refused = True
            _log.warning(
                "CUDA does not pin the slots of rollouts (error %d): copies wait for the host", error
            )
        else:
            self._pinned[slot] = first

    def forget(self) -> None:
        """Unpin all slots, before their memory is unmapped."""
        for first in self._pinned.values():
            torch.cuda.cudart().cudaHostUnregister(first)
        self._pinned = {}
