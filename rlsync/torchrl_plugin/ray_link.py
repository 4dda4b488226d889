"""RayLink: the two ends of a Ray transport, as the schemes of one RayCollector share them."""

from __future__ import annotations

import os
import uuid
from typing import Any

from rlsync.sync.workers_publisher import WorkersPublisher
from rlsync.torchrl_plugin.compat.distributed import ActorWorkers
from rlsync.torchrl_plugin.link import Link
from rlsync.transport.board.writer import BoardWriter
from rlsync.transport.ray.handle import RayHandle
from rlsync.transport.ray.learner import RayTransport
from rlsync.transport.ray.receiver import NodeReceiver

#: How long a version may take to all actors of a collector that waits for them, seconds.
ARRIVES_WITHIN_S = 120.0


class RayLink(Link):
    """The link of the schemes of one RayCollector.

    Args:
        workers: the actors of the collector.
    """

    def __init__(self, workers: ActorWorkers) -> None:
        self.transport: RayTransport | None = RayTransport()
        self.transport.watch(workers.actors)
        self._workers: ActorWorkers | None = workers
        self.receiver: NodeReceiver | None = None
        super().__init__(self.transport.handle, WorkersPublisher(self.transport))

    def __getstate__(self) -> dict[str, Any]:
        handle = self.handle if self.transport is None else self.transport.handle  # of the newest version
        return super().__getstate__() | {"handle": handle}

    def supply(self, board: BoardWriter, actor: int, workers: int) -> None:
        """In an actor, let a board have the learner's versions, and wait for the newest.

        Args:
            board: which the worker processes of the actor's collector read.
            actor: the actor's number.
            workers: how many there are in each actor.

        Raises:
            BoardClosed: the learner has closed the transport or died.
            AdoptionTimeout: the version does not come in time.
        """
        assert isinstance(self.handle, RayHandle)
        where = f"actor {actor}, process {os.getpid()}"
        name = f"{where}, {uuid.uuid4().hex[:6]}"
        numbers = range(actor * workers, (actor + 1) * workers)
        self.receiver = NodeReceiver(self.handle.mailbox, name, board, numbers=numbers)
        self.receiver.start()
        self.receiver.report_now()  # the leaves of workers that stand: the learner checks its map by them
        self.receiver.await_stamp(self.handle.newest, ARRIVES_WITHIN_S, where)

    def before_batch(self) -> None:
        """Where actors wait for the learner, let the newest version come to them before they go on.

        Raises:
            WorkerLost: an actor is dead.
            AdoptionTimeout: the version does not come in time.
        """
        if self.transport is not None and self._workers is not None and not self._workers.in_flight:
            self.transport.await_arrival(ARRIVES_WITHIN_S, range(self._workers.num_workers))

    def close(self) -> None:
        """Close the transport, on the learner's side; in an actor, receive nothing any more."""
        if self.transport is not None:
            self.transport.close()
        if self.receiver is not None:
            self.receiver.close()
