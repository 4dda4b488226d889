"""The old name of :mod:`rlsync.transport.contract`."""

from rlsync.core.moved import moved

__getattr__ = moved(
    "rlsync.transport.base",
    {
        "Apply": "rlsync.transport.contract:Apply",
        "Publisher": "rlsync.transport.contract:Transport",
        "Subscriber": "rlsync.transport.contract:Subscriber",
    },
)
