"""BoardLink: the two ends of a board, as the schemes of one collector share them."""

from __future__ import annotations

from typing import Any

from rlsync.sync.numbered_board import NumberedBoard
from rlsync.sync.workers_publisher import WorkersPublisher
from rlsync.torchrl_plugin.worker import WorkerSync
from rlsync.transport.board.handle import BoardHandle


class BoardLink:
    """What the schemes of one board share: the publisher on the learner's side, the adopter in a worker.

    Pickled together with the schemes of a collector, it stays one object, and carries only the handle.
    """

    def __init__(self, board: NumberedBoard) -> None:
        self.handle: BoardHandle = board.handle
        self.board: NumberedBoard | None = board
        self.publisher: WorkersPublisher | None = WorkersPublisher(board, board.ledger)
        self.worker: WorkerSync | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"handle": self.handle, "board": None, "publisher": None, "worker": None}

    def in_worker(self, worker_idx: int) -> WorkerSync:
        """The one adopter of this process."""
        if self.worker is None or self.worker.worker_idx != worker_idx:
            self.worker = WorkerSync(self.handle, worker_idx)
            self.board = self.publisher = None
        return self.worker
