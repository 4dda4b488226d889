"""A board for tests that publish without a publisher."""

from __future__ import annotations

from collections.abc import Sequence, Set

from torch import Tensor

from rlsync.core.errors import BoardClosed
from rlsync.core.ledger import Ledger, Stamp
from rlsync.transport.board import BoardWriter
from rlsync.transport.board.format import MAX_SLOTS


class CountedBoard(BoardWriter):
    """A publish without a stamp joins the one before, and has the next number of a ledger."""

    def __init__(self, max_slots: int = MAX_SLOTS) -> None:
        super().__init__(max_slots)
        self.ledger = Ledger()

    @property
    def version(self) -> int:
        return max(self.ledger.version, self.newest)

    def publish(
        self, tensors: Sequence[Tensor | None], later: Set[int] = frozenset(), *, stamp: Stamp | None = None
    ) -> int | None:
        if stamp is None:
            self.join()
            self.ledger.advance_to(self.newest)
            stamp = self.ledger.next
        return super().publish(tensors, later, stamp=stamp)

    def ask(self, lowest: int | None = None) -> int:
        return super().ask(self.newest if lowest is None else lowest)

    def newest_views(self) -> list[Tensor]:
        newest = self.newest_leaves()
        if newest is None or newest[0] is not self.layout:
            raise BoardClosed("nothing was published with this layout yet", "newest_views", "publish first")
        return newest[1]
