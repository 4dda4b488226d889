"""The old name of :mod:`rlsync.workers.frames`."""

from rlsync.core.moved import moved

__getattr__ = moved(
    "rlsync.recipes.impala.batch",
    {
        "check_batch": "rlsync.workers.frames:check_batch",
        "concatenate": "rlsync.workers.frames:concatenate",
    },
)
