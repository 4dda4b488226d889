"""What a node tells the learner of the workers that read its board."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rlsync.core.ledger import Stamp
from rlsync.transport.board.writer import BoardWriter
from rlsync.transport.contract import Note, ReaderStatus


@dataclass(frozen=True, slots=True)
class NodeWord:
    """What a node says.

    Args:
        node: its name.
        stamp: the newest version on its board.
        readers: the workers that read the board, under the numbers that the learner knows them by.
        notes: what each of them has left for the learner.
    """

    node: str
    stamp: Stamp
    readers: tuple[ReaderStatus, ...]
    notes: dict[tuple[int, Note], bytes]

    @classmethod
    def of(cls, node: str, board: BoardWriter, numbers: Sequence[int] | None) -> NodeWord:
        """What is to be said now.

        Args:
            node: its name.
            board: the board of the node.
            numbers: the learner's number of each reader of the board; ``None`` if they are the same.
        """
        local = board.status()
        if numbers is not None:
            local = [status for status in local if status.reader < len(numbers)]
        own = {
            status.reader: status.reader if numbers is None else numbers[status.reader] for status in local
        }
        readers = tuple(replace(status, reader=own[status.reader]) for status in local)
        notes = {(own[s.reader], kind): board.note(s.reader, kind) for s in local for kind in Note}
        left = {key: note for key, note in notes.items() if note is not None}
        return cls(node, board.newest_stamp, readers, left)

    @property
    def news(self) -> object:
        """What the learner should hear of at once when it changes: all but how long ago things were."""
        readers = [(s.reader, s.pid, s.state, s.adopted_version) for s in self.readers]
        return self.stamp, readers, self.notes

    def to_bytes(self) -> bytes:
        """For the mailbox, which does not look into it."""
        return pickle.dumps(self)

    @staticmethod
    def from_bytes(data: bytes) -> NodeWord:
        """The inverse of :meth:`to_bytes`."""
        word = pickle.loads(data)
        assert isinstance(word, NodeWord)
        return word
