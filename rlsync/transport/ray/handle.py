"""How a worker on any node attaches by itself, with a board and a receiver of its own."""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass
from typing import Any

from rlsync.core.ledger import NOTHING, Stamp
from rlsync.transport.board.reader import BoardReader
from rlsync.transport.board.writer import BoardWriter
from rlsync.transport.contract import Apply, Note
from rlsync.transport.ray.receiver import NodeReceiver

#: How long a worker waits for its first version when it attaches, seconds.
FIRST_VERSION_WITHIN_S = 120.0


@dataclass(frozen=True, slots=True)
class RayHandle:
    """How a worker, in any process of the cluster, finds a :mod:`rlsync.transport.ray.learner`."""

    mailbox: Any
    #: The newest version when this handle was made. A worker that attaches has it, or a newer one, before it
    #: acts.
    newest: Stamp = NOTHING

    def subscribe(self, apply: Apply, reader: int | None = None) -> RaySubscriber:
        """Attach, with a board of this process's own; see :meth:`rlsync.transport.contract.Handle.subscribe`.

        ``None`` is reader 0. AdoptionTimeout if the newest version does not come in time.
        """
        subscriber = RaySubscriber(self.mailbox, apply, 0 if reader is None else reader)
        try:
            subscriber.await_stamp(self.newest, FIRST_VERSION_WITHIN_S)
        except BaseException:
            subscriber.close()
            raise
        return subscriber


class RaySubscriber:
    """A worker's end, with a board and a receiver for this process alone.

    Workers that share a node should share them, too: then each version comes to the node's memory once. See
    :class:`rlsync.transport.ray.receiver.NodeReceiver`, and :class:`rlsync.transport.contract.Subscriber`.
    """

    def __init__(self, mailbox: Any, apply: Apply, reader: int) -> None:
        self._number = reader
        self._board = BoardWriter()
        self._reader = BoardReader(self._board.handle, apply, 0)
        name = f"worker {reader}, pid {os.getpid()}, {uuid.uuid4().hex[:6]}"
        self.receiver = NodeReceiver(mailbox, name, self._board, numbers=[reader])
        self.receiver.start()

    def await_stamp(self, stamp: Stamp, timeout_s: float) -> None:
        """Wait until a version, or a newer one, has come to this process; see :class:`NodeReceiver`."""
        self.receiver.await_stamp(stamp, timeout_s, f"worker {self._number}, process {os.getpid()}")

    @property
    def version(self) -> int:
        return self._reader.version

    @property
    def stamp(self) -> Stamp:
        return self._reader.stamp

    @property
    def newest(self) -> int:
        return self._reader.newest

    @property
    def asked(self) -> int:
        return self._reader.asked

    def adopt(self) -> int:
        return self._reader.adopt()

    @property
    def closed_by_learner(self) -> bool:
        return self.receiver.closed_by_learner or self.receiver.learner_died

    @property
    def learner_died(self) -> bool:
        return self.receiver.learner_died

    @property
    def closed(self) -> bool:
        return self._reader.closed

    def leave_note(self, note: bytes, kind: Note) -> None:
        self._reader.leave_note(note, kind)
        if kind is Note.LEAVES:  # the learner asks for it as soon as the workers stand
            self.receiver.report_now()

    def forget(self) -> None:
        self._reader.forget()

    def close(self) -> None:
        self.receiver.close()
        self._reader.close()
        self._board.close()
