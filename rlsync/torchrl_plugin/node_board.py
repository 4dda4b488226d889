"""NodeBoardScheme: the board of one actor, for the worker processes of the actor's collector."""

from __future__ import annotations

from typing import Any

from rlsync.core.ledger import Ledger
from rlsync.sync.adopter import Adopt
from rlsync.torchrl_plugin.link import BoardLink
from rlsync.torchrl_plugin.scheme import BoardScheme
from rlsync.torchrl_plugin.weight_board import WeightBoard
from rlsync.torchrl_plugin.worker import AdoptAt


class NodeBoardScheme(BoardScheme):
    """A board in each actor of a RayCollector, which a RayBoardScheme supplies with the learner's versions.

    Stands in ``collector_kwargs["weight_sync_schemes"]`` of a RayCollector whose actors start worker
    processes (``collector_class="sync"`` or ``"async"``). Workers adopt and stamp as on one host, for the
    destination ``"policy"``. Each actor that gets this scheme makes a board of its own.

    Args:
        adopt, adopt_at, start_timeout_s: see :class:`BoardScheme`.

    Example:
        >>> inner = {"policy": NodeBoardScheme("copy")}
        >>> inner["policy"].adopt
        'copy'
    """

    def __init__(
        self,
        adopt: Adopt = "alias",
        *,
        adopt_at: AdoptAt = "rollout",
        start_timeout_s: float | None = 300.0,
    ) -> None:
        board = WeightBoard()
        # What the actor's own collector publishes is older than any learner's.
        board.ledger = Ledger(generation=0)
        link = BoardLink(board)
        super().__init__(adopt, adopt_at=adopt_at, start_timeout_s=start_timeout_s, _link=link)
        self._board = board

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.model_id is None and self._board is not None:
            return _unused, (self.adopt, self.adopt_at, self.start_timeout_s)
        return super().__reduce_ex__(protocol)


def _unused(adopt: Adopt, adopt_at: AdoptAt, start_timeout_s: float | None) -> NodeBoardScheme:
    return NodeBoardScheme(adopt, adopt_at=adopt_at, start_timeout_s=start_timeout_s)
