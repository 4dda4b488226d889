"""The old name of :mod:`rlsync.transport.board`."""

from rlsync.core.moved import moved

__getattr__ = moved(
    "rlsync.transport.board_handle",
    {
        "BoardHandle": "rlsync.transport.board.handle:BoardHandle",
    },
)
