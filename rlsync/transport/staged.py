"""Staged: what one publish brings to a reader in the same process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from rlsync.core.ledger import Stamp
from rlsync.tensors.device import NOTHING_QUEUED, Moment, queued_devices
from rlsync.tensors.layout import Layout, LeafSpec
from rlsync.transport.rules import keyed


@dataclass(frozen=True, slots=True)
class Staged:
    """A version that waits for the running rollout to end; its tensors are copies.

    Args:
        stamp: its generation and number.
        layout: what it was published under.
        tensors: one for each entry that owns its bytes.
        there: when they hold the version, on the accelerators that they are on.
    """

    stamp: Stamp
    layout: Layout
    tensors: list[Tensor]
    there: Moment = NOTHING_QUEUED

    @classmethod
    def of(cls, layout: Layout, tensors: Sequence[Tensor | None], stamp: Stamp) -> Staged:
        """What a publish brings, without the entries that it leaves as they are.

        Raises:
            LayoutMismatch: a tensor does not have the shape of its leaf.
        """
        layout.check_count(tensors)
        given = [tensor for tensor in tensors if tensor is not None]
        if len(given) < len(tensors):
            chosen: dict[str, list[LeafSpec]] = {}
            for entry in layout.entries:
                if tensors[entry.owner] is not None:
                    chosen.setdefault(entry.destination, []).append(entry.leaf)
            layout = Layout.build(chosen)
        layout.check(given)
        return cls(stamp, layout, given)

    def copied(self) -> Staged:
        """The same with tensors of its own."""
        tensors = [tensor.detach().clone() for tensor in self.tensors]
        return replace(self, tensors=tensors, there=Moment.now(queued_devices(tensors)))

    def over(self, older: Staged | None) -> Staged:
        """This version, with what only an older one brings that was never taken."""
        if older is None:
            return self
        mine, left = keyed(self.layout, self.tensors), keyed(older.layout, older.tensors)
        if left.keys() <= mine.keys():
            return self
        entries = [e for e in older.layout.entries if (e.destination, e.leaf.name) not in mine]
        chosen: dict[str, list[LeafSpec]] = {}
        for entry in (*entries, *self.layout.entries):
            chosen.setdefault(entry.destination, []).append(replace(entry.leaf, tie=""))
        layout = Layout.build(chosen)
        both = left | mine
        tensors = [both[e.destination, e.leaf.name] for e in layout.owned]
        older.there.order()
        return Staged(self.stamp, layout, tensors, Moment.now(queued_devices(tensors)))
