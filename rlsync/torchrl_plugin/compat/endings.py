"""Collectors that live in the learner's process: what steps their environments, how a wait for it ends."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess
from threading import Thread
from typing import NoReturn, TypeAlias, TypeVar

from tensordict import TensorDictBase
from torchrl.collectors import AsyncBatchedCollector, Collector
from torchrl.envs import EnvBase, ParallelEnv, TransformedEnv
from torchrl.envs.async_envs import ProcessorAsyncEnvPool, ThreadingAsyncEnvPool

from rlsync.core.errors import RlsyncError, WorkerLost
from rlsync.sync.processes import ending
from rlsync.torchrl_plugin.compat import wrap_batches
from rlsync.torchrl_plugin.compat.servers import process_of, server_of

_log = logging.getLogger(__name__)

T = TypeVar("T")

#: A collector that lives in the learner's process, its environments perhaps not.
LocalCollector: TypeAlias = Collector | AsyncBatchedCollector

_SEEN_WITHIN_S = 2.0  #: how long the exit of a killed process may take to be seen, seconds


class FramesMadeHere:
    """A collector of this process while a Stop may end it.

    Its processes can be killed; a thread that hangs cannot, but meanwhile a checkpoint can be written. A
    shutdown may take ``leave_within_s``.
    """

    def __init__(
        self, collector: LocalCollector, leave_within_s: float, asked: Callable[[], bool]
    ) -> None:
        self._collector = collector
        self._asked = asked
        self._lock = threading.Lock()
        self._thread: int | None = None  #: the one that waits for a batch
        self._failed: WorkerLost | None = None
        wrap_batches(collector, self._watched)
        self._wrap_shutdown(leave_within_s)

    def fail(self, error: WorkerLost) -> bool:
        """End the learner's wait for frames with an error; False if its own thread makes the frames."""
        self._failed = error
        _fail_frames(self._collector, error)
        processes = processes_behind(self._collector)
        _kill(processes, error.where)
        background = bool(_threads_behind(self._collector))
        return bool(processes) or background or isinstance(self._collector, AsyncBatchedCollector)

    def while_waiting(self, thread: int, call: Callable[[], T]) -> T | None:
        """What ``call`` returns while this thread waits for a batch; None if it does not wait."""
        with self._lock:
            if self._thread == thread:
                return call()
            return None

    def stacks(self, *threads: int) -> str:
        """Where these threads, and those that step environments, are now, innermost call last."""
        idents = {*threads, *_living(_threads_behind(self._collector))}
        frames = sys._current_frames()
        texts = []
        for ident in sorted(idents & frames.keys()):
            stack = "".join(traceback.format_stack(frames[ident])).rstrip()
            texts.append(f"thread {ident}:\n{stack}")
        return "\n".join(texts)

    def _watched(self, batches: Iterator[TensorDictBase]) -> Iterator[TensorDictBase]:
        """Wait for each batch inside :meth:`_waiting`, in the thread that iterates."""
        while True:
            with self._waiting():
                try:
                    batch = next(batches)
                except StopIteration:
                    return
            yield batch

    def _wrap_shutdown(self, within_s: float) -> None:
        """Limit ``collector.shutdown()``. Until TorchRL joins threads within a limit."""
        ref = weakref.ref(self._collector)

        def shutdown(
            timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True
        ) -> None:
            collector = ref()
            if collector is None:
                return
            limit_s = timeout
            if limit_s is None:
                limit_s = within_s
            with self._leaving(limit_s):
                if isinstance(collector, AsyncBatchedCollector):
                    # each thread is given it, one after the other
                    limit_s /= max(1, len(collector._workers))
                    _leave_threads(collector._env_pool, limit_s)
                type(collector).shutdown(collector, limit_s, close_env, raise_on_error)

        self._collector.shutdown = shutdown

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        with self._lock:
            self._thread = threading.get_ident()
        try:
            with lost_in_place(lambda error: self._lost()):
                yield
        finally:
            with self._lock:
                self._thread = None

    def _lost(self) -> WorkerLost | None:
        """The error of a wait that failed after a stop was asked for, because a process is gone."""
        if self._failed is not None or not self._asked():
            return self._failed
        processes = processes_behind(self._collector)
        until = time.monotonic() + _SEEN_WITHIN_S
        dead: list[BaseProcess] = []
        while processes:
            dead = [p for p in processes if p.exitcode not in (None, 0)]
            if dead or time.monotonic() >= until:
                break
            time.sleep(0.01)
        if not dead:
            return None
        ended = [f"{p.name} (pid {p.pid}, {ending(p.exitcode or 0)})" for p in dead]
        return WorkerLost("; ".join(ended), "waiting for frames", "resume the run")

    @contextmanager
    def _leaving(self, timeout_s: float) -> Iterator[None]:
        """Kill what has not left in time, so that nobody waits for it longer."""
        processes = processes_behind(self._collector)
        threads = _threads_behind(self._collector)
        timer = threading.Timer(
            timeout_s, _kill, [processes, f"{timeout_s:g} s after it was to leave"]
        )
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
            hanging = _living(threads)
            if hanging:
                _log.error(
                    "%d threads hang in environments of this process, and a thread cannot be ended; the "
                    "program ends with os._exit() or a signal (kill -9 %d)\n%s",
                    len(hanging),
                    os.getpid(),
                    self.stacks(*hanging),
                )


@contextmanager
def lost_in_place(lost_to: Callable[[Exception], RlsyncError | None]) -> Iterator[None]:
    """Raise ``lost_to(error)`` in place of an error, which is its cause, if a worker was lost."""
    try:
        yield
    except Exception as error:
        if isinstance(error, RlsyncError):
            raise
        lost = lost_to(error)
        if lost is None:
            raise
        raise lost from error


def processes_behind(collector: LocalCollector) -> list[BaseProcess]:
    """The processes that were started for a collector: of its environments, and of its inference server."""
    if isinstance(collector, Collector):
        return _of_env(getattr(collector, "env", None))
    processes = [worker for worker in collector._workers if isinstance(worker, BaseProcess)]
    processes += _of_env(collector._env_pool)
    server = process_of(server_of(collector))
    if server is not None:
        processes.append(server)
    return processes


def _of_env(env: object) -> list[BaseProcess]:
    while isinstance(env, TransformedEnv):
        env = env.base_env
    if isinstance(env, ParallelEnv):
        if env.is_closed:
            return []
        return list(env._workers)
    # TorchRL calls them so
    if isinstance(env, ProcessorAsyncEnvPool):
        return list(env.threads)
    return []


def _threads_behind(collector: LocalCollector) -> list[Thread]:
    """The threads that step a collector's environments in this process, without the one that iterates."""
    if isinstance(collector, Collector):
        thread = getattr(collector, "_thread", None)
        if isinstance(thread, Thread):
            return [thread]
        return []
    pool = collector._env_pool
    if isinstance(pool, ThreadingAsyncEnvPool):
        return list(pool._pool._threads)
    return []


def _living(threads: Iterable[Thread]) -> list[int]:
    """The numbers of the threads that run."""
    return [thread.ident for thread in threads if thread.is_alive() and thread.ident is not None]


def _kill(processes: Sequence[BaseProcess], when: str) -> None:
    for process in processes:
        with suppress(ValueError):  # closed already
            if process.exitcode is None:
                _log.warning("process %s (%s) is killed, %s", process.pid, process.name, when)
                process.kill()


def _leave_threads(pool: EnvBase | None, timeout_s: float) -> None:
    """Let a pool of threads be closed although one hangs in its environment."""
    if not isinstance(pool, ThreadingAsyncEnvPool):
        return
    executor = pool._pool

    def shutdown() -> None:
        executor.shutdown(wait=False, cancel_futures=True)
        deadline = time.monotonic() + timeout_s
        for thread in executor._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    pool.shutdown = shutdown


def _fail_frames(collector: LocalCollector, error: Exception) -> None:
    """Raise ``error`` where the learner next looks for frames that others bring."""

    def fail(*_: object, **__: object) -> NoReturn:
        raise error

    if collector.replay_buffer is not None:
        with suppress(AttributeError):
            collector.getattr_rb = fail
    if isinstance(collector, AsyncBatchedCollector) and collector._result_queue is not None:
        collector._result_queue.get = fail
