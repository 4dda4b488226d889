"""WeightBoard: a board for several destinations."""

from __future__ import annotations

import weakref

from rlsync.sync.adopter import Adopt
from rlsync.sync.numbered_board import NumberedBoard
from rlsync.torchrl_plugin.link import BoardLink
from rlsync.torchrl_plugin.scheme import BoardScheme
from rlsync.torchrl_plugin.worker import AdoptAt
from rlsync.transport.board.format import MAX_SLOTS


class WeightBoard(NumberedBoard):
    """A board that hands out TorchRL schemes, one for each destination; all are published as one version.

    Args:
        max_slots: upper bound of slots in memory. When all are leased, a publish is coalesced. The default
            never coalesces.

    Raises:
        ConfigError: ``max_slots`` is out of range.
        BoardClosed: a method is called that needs an open board, and it was closed.

    Example:
        >>> board = WeightBoard()
        >>> schemes = {"policy": board.scheme(), "env.transform[0].module": board.scheme("copy")}
        >>> board.close()
    """

    def __init__(self, max_slots: int = MAX_SLOTS) -> None:
        super().__init__(max_slots)
        self._link: weakref.ref[BoardLink] | None = None  # the link holds the board, not the reverse

    def scheme(self, adopt: Adopt = "alias", *, adopt_at: AdoptAt = "rollout") -> BoardScheme:
        """A scheme for one destination on this board.

        Args:
            adopt: see :class:`BoardScheme`.
            adopt_at: see :class:`BoardScheme`; the same for all destinations of a board.

        Raises:
            ConfigError: there is no such mode.
        """
        link = None if self._link is None else self._link()
        if link is None:
            link = BoardLink(self)
            self._link = weakref.ref(link)
        return BoardScheme(adopt, adopt_at=adopt_at, _link=link)
