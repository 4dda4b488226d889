"""Frames whose environments are stepped by threads of the learner's process: how a wait for them ends."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess
from typing import TypeVar

from torchrl.collectors import AsyncBatchedCollector, BaseCollector, Collector

from rlsync.core.errors import RlsyncError, WorkerLost
from rlsync.sync.processes import ending
from rlsync.torchrl_plugin.compat import endings

_log = logging.getLogger(__name__)

T = TypeVar("T")

#: How long the exit of a killed process may take to be seen, seconds.
_SEEN_WITHIN_S = 2.0


class FramesMadeHere:
    """A ``Collector`` or an ``AsyncBatchedCollector`` while a :class:`Stop` may end it.

    Its processes can be killed: those of a ``ParallelEnv``, of an ``AsyncEnvPool``, of an inference server.
    A thread cannot. What can be done for a learner whose own thread hangs in an environment is to say where,
    and to write its checkpoint: while it waits for a batch, nothing changes what is written.

    At a shutdown, processes and threads may take ``leave_within_s`` seconds to leave. ``asked()`` says
    whether a stop was asked for.
    """

    def __init__(
        self, collector: endings.LocalCollector, leave_within_s: float, asked: Callable[[], bool]
    ) -> None:
        self._collector = collector
        self._asked = asked
        self._lock = threading.Lock()
        self._thread: int | None = None  #: the one that waits for a batch
        self._failed: WorkerLost | None = None
        endings.waiting_in(collector, self._waiting)
        endings.shut_down_within(collector, leave_within_s, self._leaving)

    @classmethod
    def of(
        cls, collector: BaseCollector, leave_within_s: float, asked: Callable[[], bool]
    ) -> FramesMadeHere | None:
        """None for a collector whose environments are stepped by worker processes of its own."""
        if isinstance(collector, (Collector, AsyncBatchedCollector)):
            return cls(collector, leave_within_s, asked)
        return None

    def fail(self, error: WorkerLost) -> bool:
        """End the learner's wait for frames with an error, and the processes that it waits for.

        False if the wait does not end: the thread that waits is the one that makes the frames, and no process
        makes them with it.
        """
        self._failed = error
        endings.fail_frames(self._collector, error)
        processes = endings.processes_behind(self._collector)
        _kill(processes, error.where)
        background = bool(endings.threads_behind(self._collector))
        return bool(processes) or background or isinstance(self._collector, AsyncBatchedCollector)

    def while_waiting(self, thread: int, call: Callable[[], T]) -> T | None:
        """What ``call`` returns, called while this thread waits for a batch; None if it does not wait.

        The thread does not go on before the call has returned.
        """
        with self._lock:
            return call() if self._thread == thread else None

    def stacks(self, *threads: int) -> str:
        """Where these threads, and those that step environments, are now, innermost call last."""
        idents = {*threads, *(t.ident for t in endings.threads_behind(self._collector) if t.is_alive())}
        frames = sys._current_frames()
        return "\n".join(
            f"thread {ident}:\n{''.join(traceback.format_stack(frames[ident])).rstrip()}"
            for ident in sorted(ident for ident in idents if ident in frames)
        )

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        with self._lock:
            self._thread = threading.get_ident()
        try:
            yield
        except RlsyncError:
            raise
        except Exception as error:
            lost = self._lost()
            if lost is None:
                raise
            raise lost from error
        finally:
            with self._lock:
                self._thread = None

    def _lost(self) -> WorkerLost | None:
        """The error of a wait that failed after a stop was asked for, because a process is gone."""
        if self._failed is not None or not self._asked():
            return self._failed
        processes, until = endings.processes_behind(self._collector), time.monotonic() + _SEEN_WITHIN_S
        while processes:
            dead = [p for p in processes if p.exitcode not in (None, 0)]
            if dead or time.monotonic() >= until:
                break
            time.sleep(0.01)
        ended = (
            "; ".join(f"{p.name} (pid {p.pid}, {ending(p.exitcode or 0)})" for p in dead) if processes else ""
        )
        return WorkerLost(ended, "waiting for frames", "resume the run") if ended else None

    @contextmanager
    def _leaving(self, timeout_s: float) -> Iterator[None]:
        """Kill what has not left in time, so that nobody waits for it longer."""
        processes, threads = self._behind()
        timer = threading.Timer(timeout_s, _kill, [processes, f"{timeout_s:g} s after it was to leave"])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            _kill(processes, "at the end")
            for process in processes:
                with suppress(ValueError):  # closed
                    process.join(_SEEN_WITHIN_S)
            hanging = [thread for thread in threads if thread.is_alive() and thread.ident is not None]
            if hanging:
                _log.error(
                    "%d threads hang in environments of this process, and a thread cannot be ended; the "
                    "program ends with os._exit() or a signal (kill -9 %d)\n%s",
                    len(hanging),
                    os.getpid(),
                    self.stacks(*(thread.ident for thread in hanging if thread.ident is not None)),
                )

    def _behind(self) -> tuple[list[BaseProcess], list[threading.Thread]]:
        return endings.processes_behind(self._collector), endings.threads_behind(self._collector)


def _kill(processes: Sequence[BaseProcess], when: str) -> None:
    for process in processes:
        with suppress(ValueError):  # closed already
            if process.exitcode is None:
                _log.warning("process %s (%s) is killed, %s", process.pid, process.name, when)
                process.kill()
