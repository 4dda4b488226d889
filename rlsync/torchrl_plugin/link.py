"""Link: the learner's side and a worker's side of what the schemes of one collector carry."""

from __future__ import annotations

import os
from typing import Any

from torchrl.modules.inference_server import InferenceServer

from rlsync.sync.adopter import Adopt
from rlsync.sync.starting import StartLogs
from rlsync.sync.workers_publisher import WorkersPublisher
from rlsync.torchrl_plugin.served_server import ServedServer
from rlsync.torchrl_plugin.server import ServerSync
from rlsync.torchrl_plugin.worker import WorkerSync


class Link:
    """What the schemes of one collector share: the publisher on the learner's side, the adopter in a worker.

    Pickled together with these schemes, it stays one object, and carries only the handle of what they read.
    """

    def __init__(self, publisher: WorkersPublisher) -> None:
        self.publisher: WorkersPublisher | None = publisher
        self.handle = publisher.transport.handle
        self.worker: WorkerSync | None = None
        self.server: ServerSync | None = None
        self.served: ServedServer | None = None
        self.starting: StartLogs | None = None  #: of the workers, until they stand
        self._pid = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        # A transport's handle tells its newest version, so that an actor knows what to wait for.
        handle = self.handle if self.publisher is None else self.publisher.transport.handle
        return {**dict.fromkeys(vars(self)), "handle": handle}

    def in_worker(self, worker_idx: int) -> WorkerSync:
        """The one adopter of this process."""
        if self.worker is None or self.worker.worker_idx != worker_idx:
            self.worker = WorkerSync(self.handle, worker_idx)
            self.publisher = None  # a forked process inherits the learner's
        return self.worker

    def leave(self, destination: str | None) -> None:
        """In a worker: take no more weights for ``destination``. The last one gives the reader back."""
        if self.worker is not None and self.worker.leave(destination):
            self.worker = None

    def in_server(self, destination: str, adopt: Adopt, server: InferenceServer) -> ServerSync:
        """The one adopter of an inference server, in the learner's process or in its own."""
        beside_learner = self._pid == os.getpid()
        if not beside_learner:
            self.publisher = self.served = None  # a forked process inherits the learner's
        self.server = ServerSync(self.handle, destination, adopt, server, beside_learner=beside_learner)
        return self.server

    def serve(self, holder: object, scheme: object) -> ServedServer:
        """Let the publisher serve an inference server: ``holder``, or the one that this collector has.

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
