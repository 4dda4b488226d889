"""Worker processes end with the program, also when nobody shuts their collector down.

Python waits at its exit for every process that it started. A collector that a traceback or a global name
holds is not deleted before that, and its workers wait for their learner. So a program that ends by an
exception would hang. Here the workers are ended first.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import Protocol
from weakref import WeakSet

from rlsync.sync.workers_publisher import WorkerProcesses

#: How long the workers of all collectors together may take to leave by themselves; then they are killed.
LEAVE_WITHIN_S = 2.5

#: Above the priorities of multiprocessing's own exit functions (at most 15): workers may need what they end.
_FIRST = 100


class Closable(Protocol):
    """What collectors leave to the garbage collector."""

    def shutdown(self) -> None:
        """Let go of queues and threads; a second call does nothing."""


class _Open:
    """What is ended when this process exits."""

    def __init__(self) -> None:
        self.collectors: WeakSet[WorkerProcesses] = WeakSet()
        self.closables: WeakSet[Closable] = WeakSet()


_open: dict[int, _Open] = {}


def _of_this_process() -> _Open:
    pid = os.getpid()  # a forked child inherits the dictionary, but its parent's workers are not its own
    if pid not in _open:
        _open[pid] = _Open()
        # Not atexit: processes of multiprocessing run only these functions at their exit.
        Finalize(None, _end_all, args=(_open[pid],), exitpriority=_FIRST)
    return _open[pid]


def end_with_program(collector: WorkerProcesses) -> None:
    """End the workers of ``collector`` when this process exits, unless they have ended by then.

    It changes nothing before: the collector is deleted or shut down as ever, and an error that the program
    handles, or that leaves an interactive interpreter running, ends no worker. ``collector`` may be under
    construction, before its workers are started. A second call does nothing.
    """
    _of_this_process().collectors.add(collector)


def close_with_program(closable: Closable) -> None:
    """Shut ``closable`` down when this process exits, after the workers have ended.

    TorchRL's schemes do so only when they are deleted. If that is after Python's last thread, their queue
    waits for ever for a thread that cannot start.
    """
    _of_this_process().closables.add(closable)


def _end_all(opened: _Open) -> None:
    try:
        _end_workers(list(opened.collectors))
    finally:
        for closable in list(opened.closables):
            with suppress(Exception):  # TorchRL's schemes ignore them, too, when they are deleted
                closable.shutdown()


def _end_workers(left: list[WorkerProcesses]) -> None:
    processes = [process for collector in left for process in _processes_of(collector)]
    deadline = time.monotonic() + LEAVE_WITHIN_S
    try:
        while left:
            share_s = max(0.0, deadline - time.monotonic()) / len(left)
            left.pop().shutdown(timeout=share_s, raise_on_error=False)
    finally:  # also after Ctrl-C
        for process in processes:
            with suppress(ValueError):  # closed: it has ended
                process.kill()


def _processes_of(collector: WorkerProcesses) -> list[BaseProcess]:
    try:
        return list(collector.procs)
    except AttributeError:  # its constructor raised before it started any
        return []
