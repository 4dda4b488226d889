"""How the tensors of a publish get into the slot that was locked for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlsync.core.ledger import Stamp
from rlsync.tensors.layout import Layout


@dataclass(frozen=True, slots=True)
class SlotPlace:
    """Where another process finds a slot in the board's file.

    Args:
        slot: its number, which its lock has, too.
        at: where its image begins, in bytes.
        size_bytes: how long the image is.
        layout: what it holds.
    """

    slot: int
    at: int
    size_bytes: int
    layout: Layout


#: ``fill(place, stamp, views, tensors)`` writes the tensors of a publish into the views of its slot, which no
#: worker can read meanwhile. If it raises, nothing is published.
Fill = Callable[[SlotPlace, Stamp, Sequence[Tensor], Sequence[Tensor]], None]


@dataclass(frozen=True, slots=True)
class Filling:
    """A slot that somebody else fills.

    Args:
        fill: does it.
        place: where the slot is.
        stamp: of the version.
        views: the leaves of the slot.
        tensors: what goes there.
    """

    fill: Fill
    place: SlotPlace
    stamp: Stamp
    views: Sequence[Tensor]
    tensors: Sequence[Tensor]

    def finish(self) -> None:
        """Fill it.

        Raises:
            PublishError: somebody who must help does not.
        """
        self.fill(self.place, self.stamp, self.views, self.tensors)


@torch.no_grad()
def copy(views: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Copy tensors into views, cast to their dtypes.

    Example:
        >>> view = torch.zeros(2, dtype=torch.bfloat16)
        >>> copy([view], [torch.ones(2)])
        >>> view
        tensor([1., 1.], dtype=torch.bfloat16)
    """
    if views:
        torch._foreach_copy_(list(views), list(tensors))
