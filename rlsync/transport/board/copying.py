"""How a version gets into a slot: straight from host memory, or from an accelerator through pinned memory.

An accelerator copies its leaves into pinned memory by itself, on a stream of its own, while the learner goes
on. From there they are copied into the slot. The slot itself is not pinned: torch pins only what it
allocates, and a slot is a mapping that workers share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlsync.core.ledger import Stamp
from rlsync.tensors.device import NOTHING_QUEUED, Lanes, Moment, all_on_cpu, is_queued, pinned
from rlsync.tensors.layout import Layout


@dataclass(frozen=True, slots=True)
class SlotPlace:
    """Where another process finds a slot, which has the lock of its number, in the board's file."""

    slot: int
    at: int
    size_bytes: int
    layout: Layout


#: ``fill(place, stamp, views, tensors)`` writes the tensors of a publish into the views of its slot, which no
#: worker can read meanwhile. If it raises, nothing is published.
Fill = Callable[[SlotPlace, Stamp, Sequence[Tensor], Sequence[Tensor]], None]


@dataclass(frozen=True, slots=True)
class Filling:
    """A slot that somebody else fills."""

    fill: Fill
    place: SlotPlace
    stamp: Stamp
    views: Sequence[Tensor]
    tensors: Sequence[Tensor]

    def finish(self) -> None:
        """Fill it; raises what ``fill`` raises."""
        self.fill(self.place, self.stamp, self.views, self.tensors)


@torch.no_grad()
def copy(views: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Copy tensors into views, cast to their dtypes."""
    if views:
        torch._foreach_copy_(list(views), list(tensors))


@dataclass(frozen=True, slots=True)
class SlotCopy:
    """Leaves on their way into a slot."""

    into: Sequence[Tensor]  #: the slot's leaves
    tensors: Sequence[Tensor]  #: the learner's, or pinned ones in place of those on an accelerator
    sources: Sequence[Tensor]  #: the learner's; kept here, or their memory would be reused while it is read
    soon: Moment = NOTHING_QUEUED  #: what the learner may write to now has left the accelerators
    late: Moment = NOTHING_QUEUED  #: the rest has

    def finish(self) -> None:
        """Copy. It waits for the accelerators, and for nothing else."""
        self.soon.wait()
        self.late.wait()
        copy(self.into, self.tensors)

    def begin(self, later: Set[int]) -> SlotCopy:
        """Make sure of all leaves but those of ``later``, so that the learner may write to them; returns the
        rest.

        What is in host memory is copied now. An accelerator does the learner's coming work after its copy,
        and the host does not wait for it.
        """
        self.soon.order()
        pairs = enumerate(zip(self.tensors, self.sources, strict=True))
        now = [i for i, (tensor, source) in pairs if tensor is source and i not in later]
        done = set(now)
        self._part(now).finish()
        left = self._part([i for i in range(len(self.into)) if i not in done])
        return replace(left, soon=self.soon, late=self.late)

    def _part(self, which: Sequence[int]) -> SlotCopy:
        into, tensors = [self.into[i] for i in which], [self.tensors[i] for i in which]
        return SlotCopy(into, tensors, [self.sources[i] for i in which])


class Staging:
    """Brings leaves into slots, one version after the other."""

    def __init__(self) -> None:
        self._lanes = Lanes()
        self._layout: Layout | None = None
        self._pinned: list[Tensor] = []

    def copy(
        self, layout: Layout, into: Sequence[Tensor], tensors: Sequence[Tensor], later: Set[int] = frozenset()
    ) -> SlotCopy:
        """Begin to bring ``tensors`` into a slot. The copy before this one must be finished."""
        if all_on_cpu(tensors):
            return SlotCopy(into, tensors, tensors)
        queued = [i for i, tensor in enumerate(tensors) if is_queued(tensor.device)]
        if queued and layout is not self._layout:
            self._layout, self._pinned = layout, layout.owned_views(pinned(layout.image_bytes))
        staged = list(tensors)
        for i in queued:
            staged[i] = self._pinned[i]
        soon, late = ([i for i in queued if (i in later) is put_off] for put_off in (False, True))
        return SlotCopy(into, staged, tensors, self._gather(soon, tensors), self._gather(late, tensors))

    def _gather(self, which: Sequence[int], tensors: Sequence[Tensor]) -> Moment:
        return self._lanes.copy([self._pinned[i] for i in which], [tensors[i].detach() for i in which])
