"""RayLink: the two ends of a Ray transport, as the schemes of one RayCollector share them."""

from __future__ import annotations

from typing import Any

from rlsync.sync.workers_publisher import WorkersPublisher
from rlsync.torchrl_plugin import compat
from rlsync.torchrl_plugin.link import Link
from rlsync.transport.ray.learner import RayTransport

#: How long a version may take to all actors of a collector that waits for them, seconds.
ARRIVES_WITHIN_S = 120.0


class RayLink(Link):
    """The link of the schemes of one RayCollector.

    Args:
        workers: the actors of the collector.
    """

    def __init__(self, workers: compat.ActorWorkers) -> None:
        self.transport: RayTransport | None = RayTransport()
        self.transport.watch(workers.actors)
        self._workers: compat.ActorWorkers | None = workers
        super().__init__(self.transport.handle, WorkersPublisher(self.transport))

    def __getstate__(self) -> dict[str, Any]:
        handle = self.handle if self.transport is None else self.transport.handle  # of the newest version
        return super().__getstate__() | {"handle": handle}

    def before_batch(self) -> None:
        """Where actors wait for the learner, let the newest version come to them before they go on.

        Raises:
            WorkerLost: an actor is dead.
            AdoptionTimeout: the version does not come in time.
        """
        if self.transport is not None and self._workers is not None and not self._workers.in_flight:
            self.transport.await_arrival(ARRIVES_WITHIN_S, range(self._workers.num_workers))

    def close(self) -> None:
        """Close the transport, on the learner's side."""
        if self.transport is not None:
            self.transport.close()
