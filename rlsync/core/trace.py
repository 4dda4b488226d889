"""``RLSYNC_TRACE=FILE``: one JSON line for each publish, adoption, rollout, stamp and take, of all processes.

    {"time_s": 1796029441.0123, "pid": 4711, "who": "worker 3", "event": "adopt", "version": 12}

``publish`` has ``took_s``, from its beginning until the version was visible. ``begin`` is a rollout that
begins to act with a version, ``stamp`` the version that its frames get. ``take`` is a rollout that the
learner takes, with ``worker``, ``life`` and ``number``; of a TorchRL collector a version in a batch, with
the number of its ``frames``. An evaluator is the worker of the highest number. A line is written by one
call, so lines of several processes do not mix. Without the variable nothing is opened, and a place that
would write asks :data:`ON`.
"""

from __future__ import annotations

import json
import os
import time

_FILE = os.environ.get("RLSYNC_TRACE", "")

#: whether somebody wants to know; the variable is read once, when rlsync is imported
ON = bool(_FILE)

LEARNER = "learner"


def worker(number: int) -> str:
    """What a worker of this number is called in a trace."""
    return f"worker {number}"


def write(
    who: str,
    event: str,
    version: int,
    *,
    took_s: float | None = None,
    worker: int | None = None,
    life: int | None = None,
    number: int | None = None,
    frames: int | None = None,
) -> None:
    """Append a line.

    Args:
        who: :data:`LEARNER`, or :func:`worker`.
        event: one of the five above.
        version: the one that it is about.
        took_s: of a publish.
        worker: whose rollout was taken.
        life: of that worker.
        number: of that rollout in the worker's life.
        frames: how many of a batch have the version.

    Raises:
        OSError: the file cannot be written.
    """
    line: dict[str, object] = {
        "time_s": time.time(),
        "pid": os.getpid(),
        "who": who,
        "event": event,
        "version": version,
    }
    facts = {"took_s": took_s, "worker": worker, "life": life, "number": number, "frames": frames}
    for name, fact in facts.items():
        if fact is not None:
            line[name] = fact
    descriptor = os.open(_FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        os.write(descriptor, json.dumps(line).encode() + b"\n")
    finally:
        os.close(descriptor)
