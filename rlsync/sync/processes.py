"""Worker processes as the learner sees them: are they ready, and how did one end?"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from typing import Protocol, runtime_checkable

from rlsync.core.errors import AdoptionTimeout, RlsyncError, WorkerLost

_LOOK_EVERY_S = 0.1


@runtime_checkable
class StopsWaiting(Protocol):
    """A collector that starts lost workers again, and has to be told when they are waited for no longer."""

    def stop_waiting(self, error: RlsyncError) -> None:
        """Raise this error where the learner waits for frames, now or next."""


def ending(exit_code: int) -> str:
    """An exit code of :mod:`multiprocessing`, in words.

    Args:
        exit_code: of a process that has ended; a negative one is the number of the signal that killed it.

    Example:
        >>> ending(-9), ending(-40), ending(1)
        ('killed by SIGKILL', 'killed by signal 40', 'exited with status 1')
    """
    if exit_code >= 0:
        return f"exited with status {exit_code}"
    names = {int(known): known.name for known in signal.Signals}
    return f"killed by {names.get(-exit_code, f'signal {-exit_code}')}"


def await_ready(
    processes: Sequence[BaseProcess],
    ready: Callable[[int, float], bool],
    timeout_s: float | None,
    last_words: Callable[[int], str] = lambda _: "",
) -> None:
    """Wait until every worker process has said that it is ready.

    Args:
        processes: the started processes, in the order of their worker numbers.
        ready: ``ready(worker, seconds)`` waits at most that long, and returns whether the worker is ready.
        timeout_s: seconds for all of them together; ``None`` waits without a limit for those that live.
        last_words: returns why a worker has ended, in its own words; empty if it left none.

    Raises:
        WorkerLost: a worker ended before it was ready.
        AdoptionTimeout: a worker is not ready in time.
    """
    deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
    for worker, process in enumerate(processes):
        while not ready(worker, _LOOK_EVERY_S):
            # Asked once more after the exit is known: its last message may have arrived in between.
            if process.exitcode is not None and not ready(worker, 0.0):
                words = last_words(worker)
                raise WorkerLost(
                    f"worker {worker} (pid {process.pid}, {ending(process.exitcode)}) ended before it was "
                    "ready" + (f": {words}" if words else ""),
                    "starting the workers of a collector",
                    "look for the worker's own error above: its environment or its policy ended the process",
                )
            if time.monotonic() >= deadline:
                raise AdoptionTimeout(
                    f"worker {worker} (pid {process.pid}) is not ready after {timeout_s:g} s",
                    "starting the workers of a collector",
                    "look where its environment or its policy hangs while it is made (py-spy dump --pid "
                    f"{process.pid}), or give a longer start_timeout_s",
                )
