"""The old name of :mod:`rlsync.transport.contract`."""

from rlsync.core.moved import moved

__getattr__ = moved(
    "rlsync.transport.board_format",
    {
        "ReaderStatus": "rlsync.transport.contract:ReaderStatus",
    },
)
