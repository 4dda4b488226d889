"""Worker processes as the learner sees them: are they ready, and how did one end?"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from typing import Protocol, runtime_checkable

from rlsync.core.errors import AdoptionTimeout, RlsyncError, WorkerLost

#: A wait for processes looks this often whether they still live, seconds.
LOOK_EVERY_S = 0.1

#: What the learner does, in errors, until its workers are ready.
STARTING = "starting the workers of a collector"


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
    doing: Callable[[int], str] = lambda _: "",
) -> None:
    """Wait until every worker process has said that it is ready.

    If one ends, that is told at once, whatever the others do.

    Args:
        processes: the started processes, in the order of their worker numbers.
        ready: ``ready(worker, seconds)`` waits at most that long, and returns whether the worker is ready.
        timeout_s: seconds for all of them together; ``None`` waits without a limit for those that live.
        last_words: returns why a worker has ended, in its own words; empty if it left none.
        doing: returns what a worker does that is not ready in time; empty if that is not known.

    Raises:
        WorkerLost: a worker ended before it was ready.
        AdoptionTimeout: a worker is not ready in time.
    """
    deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
    waiting = dict(enumerate(processes))
    while waiting:
        for worker, process in list(waiting.items()):
            # Asked once more after the exit is known: its last message may have arrived in between.
            if ready(worker, LOOK_EVERY_S / len(waiting)):
                del waiting[worker]
            elif process.exitcode is not None and not ready(worker, 0.0):
                raise ended_before_ready(worker, process, ending(process.exitcode), last_words(worker))
        if waiting and time.monotonic() >= deadline:
            worker, process = next(iter(waiting.items()))
            what, told = doing(worker), ", ".join(map(str, waiting))
            raise AdoptionTimeout(
                f"worker {worker} (pid {process.pid}) is not ready after {timeout_s:g} s"
                + (f": {what}" if what else "")
                + (f"; not ready are the workers {told}" if len(waiting) > 1 else ""),
                STARTING,
                "look where its environment or its policy hangs while it is made (py-spy dump --pid "
                f"{process.pid}), or give a longer start_timeout_s",
            )


def ended_before_ready(worker: int, process: BaseProcess, how: str, words: str) -> WorkerLost:
    """The error to raise when a worker ends before it is ready.

    Args:
        worker: its number.
        process: its process.
        how: how it ended, or will end.
        words: why, in its own words; empty if it left none.
    """
    return WorkerLost(
        f"worker {worker} (pid {process.pid}, {how}) ended before it was ready"
        + (f": {words}" if words else ""),
        STARTING,
        "look for the worker's own error above: its environment or its policy ended the process",
    )
