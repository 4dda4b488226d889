"""The side of an inference server: adopt between two batches, and stamp the answers."""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager
from typing import NoReturn

from torchrl.modules.inference_server import InferenceServer

from rlsync.core.errors import PublishError
from rlsync.sync.adopter import Adopt, Adopter, Destination
from rlsync.torchrl_plugin.compat import servers
from rlsync.transport.contract import Handle


class ServerSync:
    """Brings the policy of an inference server up to date, between two of its batches.

    The server is one reader, number 0. Its own loop calls :meth:`between_batches`, in the thread that
    computes and under the lock that a forward pass takes.

    Args:
        handle: what the server reads.
        destination: the name of its policy.
        adopt: how the policy adopts.
        server: the server's loop, in this process.
        beside_learner: whether this is the learner's process. Such a server gets a policy of its own.

    Raises:
        BoardClosed: the learner has closed the board or died.
        PublishError: another living server reads this board.
    """

    def __init__(
        self,
        handle: Handle,
        destination: str,
        adopt: Adopt,
        server: InferenceServer,
        *,
        beside_learner: bool,
    ) -> None:
        if beside_learner:
            servers.give_own_policy(server)
        self._server = weakref.ref(server)
        self._batches: AbstractContextManager[int] | None = None
        self._adopter = Adopter(handle, 0)
        if not beside_learner:
            self._adopter.end_with_the_learner()
        recorded = servers.records_a_graph(server)
        self._adopter.place({destination: Destination(self._policy, "copy" if recorded else adopt)})
        self._adopter.tell()
        servers.refuse_updates(server, _refuse_update)

    def between_batches(self) -> None:
        """Answer the learner's question about the batches before, adopt the newest version, and stamp."""
        server = self._server()
        if server is None:
            return
        if self._batches is not None:
            if self._adopter.settled():
                return
            self._batches.__exit__(None, None, None)
        self._batches = self._adopter.acting()
        servers.serve_version(server, self._batches.__enter__())

    def _policy(self) -> object:
        server = self._server()
        return None if server is None else server.model


def _refuse_update(*_: object, **__: object) -> NoReturn:
    raise PublishError(
        "the weights of this inference server come from a board",
        "the server's update_model, or update_policy_weights_ of a collector that was not told of its board",
        "call scheme.init_on_sender(model_id='policy', context=server_or_collector) once, then scheme.send()",
    )
