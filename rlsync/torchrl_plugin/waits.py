"""Where a learner waits for worker processes in TorchRL, and how these ended."""

from __future__ import annotations

import math
import signal
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from multiprocessing.process import BaseProcess
from queue import Empty
from typing import Any

from tensordict import TensorDictBase

from rlsync.core.errors import AdoptionTimeout, WorkerLost
from rlsync.torchrl_plugin import compat

#: ``wait(step, timeout_s)`` calls ``step(seconds)``, which waits so long, until it is true or time is up.
Wait = Callable[[Callable[[float], bool], float | None], bool]
Enter = Callable[[], AbstractContextManager[object]]

#: How long the exit of a dead process may take to be collected.
_REAPED_WITHIN_S = 1.0

_LOOK_EVERY_S = 0.1


def worker_ends(collector: compat.MultiCollector, dead: Collection[int] = ()) -> dict[int, str | None]:
    """How each worker process ended, by its number; ``None`` while it lives.

    Workers that TorchRL has ended by itself, because another one had died, are left out: it closes those.

    Args:
        collector: the collector.
        dead: workers known to be dead; their exit may not have been collected yet.
    """
    found: dict[int, str | None] = {}
    for worker, process in enumerate(collector.procs):
        try:
            if worker in dead:
                process.join(_REAPED_WITHIN_S)
            found[worker] = None if process.exitcode is None else ending(process.exitcode)
        except ValueError:  # closed
            continue
    return found


def ending(exit_code: int) -> str:
    """An exit code of :mod:`multiprocessing`, in words.

    Example:
        >>> ending(-9), ending(-40), ending(1)
        ('killed by SIGKILL', 'killed by signal 40', 'exited with status 1')
    """
    if exit_code >= 0:
        return f"exited with status {exit_code}"
    names = {int(known): known.name for known in signal.Signals}
    return f"killed by {names.get(-exit_code, f'signal {-exit_code}')}"


def await_start(collector: compat.MultiCollector, timeout_s: float | None) -> None:
    """Wait until every worker process has said that it stands, or why it does not; TorchRL reads that.

    TorchRL 0.14 waits for each of them 20 s, does not look whether that helped, and reads for ever.

    Args:
        collector: a collector under construction, its processes started.
        timeout_s: see :func:`await_standing`.

    Raises:
        WorkerLost: a worker ended without a word.
        AdoptionTimeout: a worker says nothing.
    """
    await_standing(collector.procs, lambda worker, seconds: collector.pipes[worker].poll(seconds), timeout_s)


def await_standing(
    processes: Sequence[BaseProcess],
    stands: Callable[[int, float], bool],
    timeout_s: float | None,
    last_words: Callable[[int], str] = lambda _: "",
) -> None:
    """Wait until every worker process has said that it stands.

    Args:
        processes: by the numbers of the workers, started.
        stands: ``stands(worker, seconds)`` waits so long at most, and says whether the worker stands.
        timeout_s: for all of them together; ``None`` waits for ever for those that live.
        last_words: what a worker that has ended had to say.

    Raises:
        WorkerLost: a worker ended before it stood.
        AdoptionTimeout: a worker does not stand in time.
    """
    deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
    for worker, process in enumerate(processes):
        while not stands(worker, _LOOK_EVERY_S):
            if process.exitcode is not None and not stands(worker, 0.0):
                words = last_words(worker)
                raise WorkerLost(
                    f"worker {worker} (pid {process.pid}, {ending(process.exitcode)}) ended before it stood"
                    + (f": {words}" if words else ""),
                    "starting the workers of a collector",
                    "look for the worker's own error above: its environment or its policy ended the process",
                )
            if time.monotonic() >= deadline:
                raise AdoptionTimeout(
                    f"worker {worker} (pid {process.pid}) does not stand after {timeout_s:g} s",
                    "starting the workers of a collector",
                    "look where its environment or its policy hangs while it is made (py-spy dump --pid "
                    f"{process.pid}), or give a longer start_timeout_s",
                )


def around_requests(collector: compat.MultiCollector, enter: Enter) -> None:
    """Run every iteration over the batches of ``collector``, and every send to a worker, in ``enter()``."""
    ref = weakref.ref(collector)

    def iterator() -> Iterator[TensorDictBase]:
        self = _present(ref)
        with enter():
            yield from type(self).iterator(self)

    collector.iterator = iterator
    for pipe in collector.pipes:
        _send_in(enter, pipe)


def _send_in(enter: Enter, pipe: Any) -> None:
    ref = weakref.ref(pipe)

    def send(message: object) -> None:
        there: Any = ref()
        with enter():
            type(there).send(there, message)

    pipe.send = send


def around_waits(collector: compat.MultiCollector, wait: Wait, came: Callable[[int], None]) -> None:
    """Let ``wait`` do the learner's waiting for the workers of ``collector``.

    That is: for batches, for answers, for the lock of a shared replay buffer, and for frames in a buffer
    that free-running workers fill, which Trainer awaits by reading ``getattr_rb("write_count")`` again and
    again. In TorchRL 0.14 each of these goes on for ever when a worker is stopped.

    Args:
        collector: the collector, its workers started.
        wait: see :data:`Wait`; what it raises passes through TorchRL.
        came: called with the number of a worker when its batch has come.
    """
    ref, queue_ref = weakref.ref(collector), weakref.ref(collector.queue_out)

    def get(block: bool = True, timeout: float | None = None) -> Any:
        taken: list[Any] = []
        queue: Any = queue_ref()

        def step(seconds: float) -> bool:
            try:
                taken.append(type(queue).get(queue, True, seconds))
            except Empty:
                return False
            return True

        if not wait(step, timeout if block else 0.0):
            raise Empty
        data = taken[0][0]  # the worker's number, or (batch, number)
        came(data if isinstance(data, int) else data[1])
        return taken[0]

    def getattr_rb(attr: str) -> Any:
        self = _present(ref)
        if compat.runs_free(self):
            wait(lambda _: False, 0.0)
        return type(self).getattr_rb(self, attr)

    collector.queue_out.get = get
    collector.getattr_rb = getattr_rb
    for pipe in collector.pipes:
        _poll_by(wait, pipe)
    compat.wrap_write_lock(collector, lambda lock: _WatchedLock(lock, wait))


def is_watched(collector: compat.MultiCollector) -> bool:
    """Whether :func:`around_waits` was called."""
    return "get" in vars(collector.queue_out)


def _poll_by(wait: Wait, pipe: Any) -> None:
    ref = weakref.ref(pipe)

    def poll(timeout: float | None = 0.0) -> bool:
        there: Any = ref()
        return wait(lambda seconds: bool(type(there).poll(there, seconds)), timeout)

    pipe.poll = poll


class _WatchedLock:
    """The lock of a shared replay buffer, which a worker may hold when it is stopped or dies."""

    def __init__(self, lock: Any, wait: Wait) -> None:
        self._lock = lock
        self._wait = wait

    def __enter__(self) -> bool:
        return self._wait(lambda seconds: bool(self._lock.acquire(timeout=seconds)), None)

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._lock.__reduce_ex__(protocol)  # whoever it is sent to waits by itself


def _present(ref: weakref.ref[compat.MultiCollector]) -> compat.MultiCollector:
    """The collector, which a method of its own does not keep alive."""
    collector = ref()
    if collector is None:
        raise ReferenceError("the collector is gone")
    return collector
