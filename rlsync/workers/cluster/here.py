"""A board on the learner's machine with the versions that the nodes get, for readers that are no workers."""

from __future__ import annotations

import time
from typing import Any

from rlsync.core.errors import AdoptionTimeout
from rlsync.core.ledger import NOTHING
from rlsync.transport.board.handle import BoardHandle
from rlsync.transport.board.writer import BoardWriter
from rlsync.transport.ray.receiver import NodeReceiver

_LOOK_S = 0.01


class BoardHere:
    """Receives every version as a node does, under the same stamp, in a thread of the learner's process.

    Its readers are not told to the learner: it waits for none of them.

    Args:
        mailbox: see :class:`NodeReceiver`.
        timeout_s: how long the first version may take, seconds.

    Raises:
        AdoptionTimeout: it did not come in time.
    """

    def __init__(self, mailbox: Any, timeout_s: float = 60.0) -> None:
        self._board = BoardWriter()
        self._receiver = NodeReceiver(mailbox, "the learner's machine", self._board, numbers=())
        self._receiver.start()
        deadline = time.monotonic() + timeout_s
        while self._receiver.stamp == NOTHING:
            if time.monotonic() >= deadline or self._receiver.failure is not None:
                failure = self._receiver.failure
                self.close()
                raise AdoptionTimeout(
                    f"no version of the weights came to the learner's own machine within {timeout_s:g} s",
                    "starting the evaluating process of a run on a cluster",
                    "look whether Ray's object store has room, or evaluate after the run: rlsync eval RUN",
                ) from failure
            time.sleep(_LOOK_S)

    @property
    def handle(self) -> BoardHandle:
        """What a process of this machine attaches with."""
        return self._board.handle

    def close(self) -> None:
        """Stop receiving, and close the board. A second call does nothing."""
        self._receiver.close()
        self._board.close()
