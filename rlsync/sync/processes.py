"""Worker processes as the learner sees them: are they ready, do they give signs of life, how did one end?

And they end with the program, also when nobody shuts their collector down. Python waits at its exit for every
process that it started. A collector that a traceback or a global name holds is not deleted before that, and
its workers wait for their learner. So a program that ends by an exception would hang. Here the workers are
ended first.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from threading import Thread
from typing import Protocol, TypeVar, runtime_checkable
from weakref import WeakSet

from torch import nn

from rlsync.core.errors import AdoptionTimeout, RlsyncError, WorkerLost
from rlsync.sync.families import UNKNOWN, end_group
from rlsync.transport.board.format import process_state as process_state

T = TypeVar("T")

LOOK_EVERY_S = 0.1  #: a wait for processes looks this often whether they still live, seconds

#: How long the exit of a dead process may take to be known: a fork server may tell it late.
REAPED_WITHIN_S = 10.0

#: What the learner does, in errors, until its workers are ready.
STARTING = "starting the workers of a collector"


class WorkerProcesses(Protocol):
    """A collector whose workers read a transport."""

    num_workers: int

    @property
    def procs(self) -> list[BaseProcess]:
        """The worker processes, by their numbers."""

    @property
    def closed(self) -> bool:
        """Whether the workers were ended."""

    def get_model(self, model_id: str) -> nn.Module:
        """The learner's module for a destination."""

    def shutdown(self, timeout: float | None = None, *, raise_on_error: bool = True) -> None:
        """End the workers."""


@runtime_checkable
class StopsWaiting(Protocol):
    """A collector that starts lost workers again, and has to be told when they are waited for no longer."""

    def stop_waiting(self, error: RlsyncError) -> None:
        """Raise this error where the learner waits for frames, now or next."""


def ending(exit_code: int) -> str:
    """An exit code of :mod:`multiprocessing`, in words: -9 is "killed by SIGKILL"."""
    if exit_code == UNKNOWN:
        return "ended, or lost its fork server"
    if exit_code >= 0:
        return f"exited with status {exit_code}"
    names = {int(known): known.name for known in signal.Signals}
    return f"killed by {names.get(-exit_code, f'signal {-exit_code}')}"


def has_ended(process: BaseProcess, *, dying: bool = False) -> bool:
    """Whether a child has ended: asked before it is called silent or late, for a death is told as a death.

    Its exit is waited for if it is dead, and if it is ``dying``: it has told why it fails, and may still
    print its traceback, or it has let go of its locks.
    """
    if dying or process_state(process.pid or 0) in (None, "dead"):
        process.join(REAPED_WITHIN_S)
    return process.exitcode is not None


def await_ready(
    processes: Sequence[BaseProcess],
    ready: Callable[[int, float], bool],
    timeout_s: float | None,
    last_words: Callable[[int], str] = lambda _: "",
    doing: Callable[[int], str] = lambda _: "",
) -> None:
    """Wait until ``ready(worker, seconds)`` is true for every process.

    WorkerLost at once if one ends, with its ``last_words``. AdoptionTimeout, with what one is ``doing``,
    after ``timeout_s`` for all; None: no limit.
    """
    deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
    waiting = dict(enumerate(processes))
    while waiting:
        for worker, process in list(waiting.items()):
            # Asked once more after the exit is known: its last message may have arrived in between.
            if ready(worker, LOOK_EVERY_S / len(waiting)):
                del waiting[worker]
            elif process.exitcode is not None and not ready(worker, 0.0):
                raise ended_before_ready(
                    worker, process, ending(process.exitcode), last_words(worker)
                )
        if waiting and time.monotonic() >= deadline:
            for worker, process in waiting.items():
                if has_ended(process):
                    raise ended_before_ready(
                        worker, process, ending(process.exitcode or 0), last_words(worker)
                    )
            worker, process = next(iter(waiting.items()))
            problem = doing(worker)
            others = ", ".join(map(str, waiting))
            raise AdoptionTimeout(
                f"worker {worker} (pid {process.pid}) is not ready after {timeout_s:g} s"
                + (f": {problem}" if problem else "")
                + (f"; not ready are the workers {others}" if len(waiting) > 1 else ""),
                STARTING,
                "look where its environment or its policy hangs while it is made (py-spy dump --pid "
                f"{process.pid}), or give a longer start_timeout_s",
            )


def ended_before_ready(worker: int, process: BaseProcess, how: str, words: str) -> WorkerLost:
    """The error to raise when a worker ends before it is ready: how it ended, and why in its own words."""
    why = f": {words}" if words else ""
    problem = f"worker {worker} (pid {process.pid}, {how}) ended before it was ready{why}"
    cure = "look for the worker's own error above: of environment, policy, or a script without a main guard"
    return WorkerLost(problem, STARTING, cure)


def tried(call: Callable[[], T], timeout_s: float, name: str) -> Future[T]:
    """Call in a thread, which is abandoned if that takes too long: then the future is not done."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001 - whatever it is, who asks is told
            future.set_exception(error)

    Thread(target=run, name=name, daemon=True).start()
    wait([future], timeout_s)
    return future


#: Silence counts for at most this part of the timeout between two looks: a learner that was suspended
#: together with its workers, and then looks at them once, has not seen them silent all that time.
_COUNTED_BETWEEN_LOOKS = 0.25


class Silence:
    """Counts for how long workers were seen to give no sign of life."""

    def __init__(self, timeout_s: float | None) -> None:
        self.timeout_s = math.inf if timeout_s is None else timeout_s
        self._looked_at: float | None = None
        self._silent_s: dict[int, float] = {}

    def look(self, ages_s: Mapping[int, float]) -> list[int]:
        """Workers silent for too long. ``ages_s``: seconds since a sign of life; others are forgotten."""
        now = time.monotonic()
        since_s = 0.0 if self._looked_at is None else now - self._looked_at
        counted_s = min(since_s, self.timeout_s * _COUNTED_BETWEEN_LOOKS)
        self._looked_at = now
        before = self._silent_s
        self._silent_s = {
            worker: min(before[worker] + counted_s if worker in before else 0.0, age_s)
            for worker, age_s in ages_s.items()
        }
        return [worker for worker, silent_s in self._silent_s.items() if silent_s > self.timeout_s]

    def clear(self) -> None:
        self._looked_at = None
        self._silent_s = {}


#: How long the workers of all collectors together may take to leave by themselves; then they are killed.
LEAVE_WITHIN_S = 2.5

#: Above the priorities of multiprocessing's own exit functions (at most 15): workers may need what they end.
_FIRST = 100


class Closable(Protocol):
    """What collectors leave to the garbage collector."""

    def shutdown(self) -> None:
        """Let go of queues and threads; a second call does nothing."""


#: By process: what is ended when it exits, workers and then the rest.
_open: dict[int, tuple[WeakSet[WorkerProcesses], WeakSet[Closable]]] = {}


def _of_this_process() -> tuple[WeakSet[WorkerProcesses], WeakSet[Closable]]:
    # a forked child inherits the dictionary, but its parent's workers are not its own
    pid = os.getpid()
    if pid not in _open:
        _open[pid] = WeakSet(), WeakSet()
        # Not atexit: processes of multiprocessing run only these functions at their exit.
        Finalize(None, _end_all, args=_open[pid], exitpriority=_FIRST)
    return _open[pid]


def end_with_program(collector: WorkerProcesses) -> None:
    """End the workers of ``collector``, which may be under construction, when this process exits."""
    _of_this_process()[0].add(collector)


def close_with_program(closable: Closable) -> None:
    """Shut ``closable`` down at exit, after the workers: a TorchRL scheme deleted later waits for ever."""
    _of_this_process()[1].add(closable)


def _end_all(collectors: WeakSet[WorkerProcesses], closables: WeakSet[Closable]) -> None:
    try:
        with suppress(KeyboardInterrupt):  # a second Ctrl-C: they have been killed
            _end_workers(list(collectors))
    finally:
        for closable in list(closables):
            with suppress(Exception):  # TorchRL's schemes ignore them, too, when they are deleted
                closable.shutdown()


def _end_workers(left: list[WorkerProcesses]) -> None:
    # A collector whose constructor raised before it started any has no list.
    processes = [process for collector in left for process in getattr(collector, "procs", ())]
    deadline = time.monotonic() + LEAVE_WITHIN_S
    try:
        while left:
            share_s = max(0.0, deadline - time.monotonic()) / len(left)
            left.pop().shutdown(timeout=share_s, raise_on_error=False)
    finally:  # also after Ctrl-C
        for process in processes:
            with suppress(ValueError):  # closed: it has ended
                if process.pid is not None:  # else its start has failed
                    end_group(process)
