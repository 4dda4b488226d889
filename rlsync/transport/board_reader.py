"""The old name of :mod:`rlsync.transport.board`."""

from rlsync.core.moved import moved

__getattr__ = moved(
    "rlsync.transport.board_reader",
    {
        "BoardReader": "rlsync.transport.board.reader:BoardReader",
    },
)
