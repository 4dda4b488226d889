"""NumberedBoard: a board with a ledger of its own, for whoever publishes on it directly."""

from __future__ import annotations

from collections.abc import Sequence, Set

from torch import Tensor

from rlsync.core.errors import BoardClosed
from rlsync.core.ledger import Ledger, Stamp
from rlsync.transport.board.format import MAX_SLOTS
from rlsync.transport.board.writer import BoardWriter


class NumberedBoard(BoardWriter):
    """A board that draws version numbers from a ledger.

    Args:
        max_slots: see :class:`rlsync.transport.board.writer.BoardWriter`.

    Example:
        >>> import torch
        >>> from rlsync.tensors.layout import Layout, LeafSpec
        >>> board = NumberedBoard()
        >>> board.lay_out(Layout.build({"policy": [LeafSpec("w", "parameter", (2,), torch.float32)]}))
        >>> board.publish([torch.ones(2)]), board.publish([torch.ones(2)])
        (1, 2)
        >>> board.close()
    """

    def __init__(self, max_slots: int = MAX_SLOTS) -> None:
        super().__init__(max_slots)
        #: The owner of this board's version numbers.
        self.ledger = Ledger()
        self._drawn: Stamp | None = None

    @property
    def version(self) -> int:
        """The newest published version; 0 before the first."""
        return max(self.ledger.version, self.newest)

    def advance_to(self, version: int) -> None:
        """Never give out ``version`` or a lower number again: a resumed run goes on counting.

        Args:
            version: the newest version that was given out before.
        """
        self.join()
        self.ledger.advance_to(version)

    def publish(
        self, tensors: Sequence[Tensor | None], later: Set[int] = frozenset(), *, stamp: Stamp | None = None
    ) -> int | None:
        """Publish one version.

        Args:
            tensors: see :meth:`rlsync.transport.board.writer.BoardWriter.publish`.
            later: see there.
            stamp: its generation and number; by default the next of the ledger, which records it.

        Raises:
            BoardClosed: the board was closed, or nothing is laid out yet.
            LayoutMismatch: a tensor does not have the shape of its leaf.
        """
        if stamp is not None:  # drawn from the ledger by a Publisher, which records it
            return super().publish(tensors, later, stamp=stamp)
        self.join()
        stamp = self.ledger.next
        version = super().publish(tensors, later, stamp=stamp)
        if version is not None:
            self._drawn = stamp
            if not later:
                self.join()
        return version

    def newest_views(self) -> list[Tensor]:
        """The newest version's leaves under the present layout, one for each owning entry; read-only.

        Raises:
            BoardClosed: nothing was published with this layout yet, or the board was closed.
        """
        newest = self.newest_leaves()
        if newest is None or newest[0] is not self.layout:
            raise BoardClosed(
                "nothing was published with this layout yet", "WeightBoard.newest_views", "publish first"
            )
        return newest[1]

    def ask(self, lowest: int | None = None) -> int:
        """Ask all readers what they act with.

        Args:
            lowest: the lowest version that an answer may be about; by default the newest.

        Returns:
            The number of the question, which the answers carry.

        Raises:
            BoardClosed: the board was closed.
        """
        return super().ask(self.newest if lowest is None else lowest)

    def join(self) -> None:
        """Wait until a version that is still being copied is visible.

        Raises:
            PublishError: a tensor was written to before this.
        """
        drawn, self._drawn = self._drawn, None
        try:
            super().join()
        finally:
            if drawn is not None and self.newest_stamp == drawn:
                self.ledger.record(drawn)
