"""Links: the two ends of a board, as the schemes of one collector share them."""

from __future__ import annotations

import os
from typing import Any

from torchrl.modules.inference_server import InferenceServer

from rlsync.sync.adopter import Adopt
from rlsync.sync.numbered_board import NumberedBoard
from rlsync.sync.starting import StartLogs
from rlsync.sync.workers_publisher import WorkersPublisher
from rlsync.torchrl_plugin.served_server import ServedServer
from rlsync.torchrl_plugin.server import ServerSync
from rlsync.torchrl_plugin.worker import WorkerSync
from rlsync.transport.contract import Handle


class Link:
    """What the schemes of one collector share: the publisher on the learner's side, the adopter in a worker.

    Pickled together with the schemes of a collector, it stays one object, and carries only the handle.

    Args:
        handle: what workers read.
        publisher: publishes to them.
    """

    def __init__(self, handle: Handle, publisher: WorkersPublisher) -> None:
        self.handle = handle
        self.publisher: WorkersPublisher | None = publisher
        self.worker: WorkerSync | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**dict.fromkeys(vars(self)), "handle": self.handle}

    def in_worker(self, worker_idx: int) -> WorkerSync:
        """The one adopter of this process."""
        if self.worker is None or self.worker.worker_idx != worker_idx:
            self.worker = WorkerSync(self.handle, worker_idx)
            self.publisher = None
        return self.worker

    def leave(self, destination: str | None) -> None:
        """In a worker: take no more weights for ``destination``. The last one gives the reader back."""
        if self.worker is not None and self.worker.leave(destination):
            self.worker = None


class BoardLink(Link):
    """The link of the schemes of one board.

    Args:
        board: the board.
    """

    def __init__(self, board: NumberedBoard) -> None:
        super().__init__(board.handle, WorkersPublisher(board, board.ledger))
        self.board: NumberedBoard | None = board
        self.server: ServerSync | None = None
        self.served: ServedServer | None = None
        self.starting: StartLogs | None = None  #: of the workers, until they stand
        self._pid = os.getpid()

    def in_worker(self, worker_idx: int) -> WorkerSync:
        """The one adopter of this process."""
        worker = super().in_worker(worker_idx)
        if self.publisher is None:
            self.board = None
        return worker

    def in_server(self, destination: str, adopt: Adopt, server: InferenceServer) -> ServerSync:
        """The one adopter of an inference server, in the learner's process or in its own."""
        beside_learner = self._pid == os.getpid()
        if not beside_learner:
            self.board = self.publisher = self.served = None  # a forked process inherits the learner's
        self.server = ServerSync(self.handle, destination, adopt, server, beside_learner=beside_learner)
        return self.server

    def serve(self, holder: object, scheme: object) -> ServedServer:
        """Let the publisher serve an inference server.

        Args:
            holder: the server, or the collector that has it.
            scheme: what the server must have been given as ``weight_sync``.

        Raises:
            ConfigError: the server was given another scheme, or a board cannot serve it.
            PublishError: the publisher serves another one already.
        """
        if self.served is not None and self.served.serves(holder):
            return self.served
        served = ServedServer(holder, scheme)
        if self.publisher is not None:
            self.publisher.serve(served, served.destination)
            self.publisher.expected = served.expected
        self.served = served
        return served
