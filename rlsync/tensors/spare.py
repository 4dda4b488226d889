"""The spare set: a version arrives on an accelerator while the version before it still acts there."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlsync.tensors.device import Lanes, Moment, queued_devices


class Spare:
    """A second set of tensors for parameters on accelerators: a version goes into the set that does not act.

    Work that is still queued from the last rollout reads the set that acts, so the new version need not wait
    for it. Then the two sets change places.

    Args:
        live: the parameters that act, eager, on devices with queues.
        owners: for each, the number of the one whose memory it has; its own number, if it is not tied.
    """

    def __init__(self, live: Sequence[Tensor], owners: Sequence[int]) -> None:
        self._live = live
        self._owners = owners
        self._own = sorted(set(owners))
        self._devices = queued_devices(live)
        self._lanes = Lanes()
        self._set = {i: torch.empty_like(live[i].data) for i in self._own}
        self._unread = Moment.now(
            self._devices
        )  # nothing that was queued before it reads the spare set later

    def swap_in(self, views: Sequence[Tensor]) -> None:
        """Copy ``views`` into the spare set and point the parameters at it.

        When this returns, ``views`` are not read any more, and what is queued from now on reads the new set.

        Args:
            views: one for each parameter, in host memory.
        """
        arrived = self._lanes.copy(
            [self._set[i] for i in self._own], [views[i] for i in self._own], self._unread
        )
        arrived.wait()
        acted = {i: self._live[i].data for i in self._own}
        for tensor, owner in zip(self._live, self._owners, strict=True):
            tensor.data = self._set[owner]
        self._set = acted
        self._unread = Moment.now(self._devices)
