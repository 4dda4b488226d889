"""Where a learner waits for worker processes in TorchRL, and how these ended.

TorchRL's queues and pipes are polled in short pieces, by thin wrappers on the instances. So the learner's own
thread looks at the workers and raises; a thread of :class:`Watch` ends only a read that does not come back.
"""

from __future__ import annotations

import logging
import signal
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing import queues
from multiprocessing.connection import Connection
from multiprocessing.synchronize import SemLock
from queue import Empty, Queue
from typing import Any, SupportsIndex, TypeAlias, TypeVar

from torchrl.collectors import AsyncBatchedCollector, MultiAsyncCollector

from rlsync.core.errors import WorkerLost, first_line
from rlsync.sync.processes import (
    LOOK_EVERY_S,
    REAPED_WITHIN_S,
    WorkerProcesses,
    await_ready,
    ended_before_ready,
    ending,
)
from rlsync.sync.starting import StartLogs
from rlsync.sync.workers_publisher import WorkersPublisher
from rlsync.torchrl_plugin.compat import (
    around_calls,
    collectors,
    in_place_of,
    present_method,
    servers,
)
from rlsync.transport.contract import ReaderStatus
from rlsync.transport.rules import worker_lost

_log = logging.getLogger(__name__)

T = TypeVar("T")

#: ``wait(step, timeout_s)`` calls ``step(seconds)``, which waits so long, until it is true or time is up.
Wait = Callable[[Callable[[float], bool], float | None], bool]
Enter = Callable[[], AbstractContextManager[object]]
#: What comes through the queue of a collector: (batch, worker) and a count, or a worker and "paused".
Message: TypeAlias = tuple[tuple[object, int] | int, object]


def worker_ends(collector: WorkerProcesses, dead: Collection[int] = ()) -> dict[int, str | None]:
    """How each worker process ended, by its number; None while it lives. Closed ones are left out."""
    ends: dict[int, str | None] = {}
    for worker, process in enumerate(collector.procs):
        try:
            if worker in dead:
                process.join(REAPED_WITHIN_S)
            if process.exitcode is None:
                ends[worker] = None
            else:
                ends[worker] = ending(process.exitcode)
        except ValueError:  # closed
            continue
    return ends


def lost_workers(
    publisher: WorkersPublisher, workers: Iterable[ReaderStatus], where: str
) -> WorkerLost | None:
    """The error for the workers that are dead now, with how they ended; ``None`` while all live."""
    known: dict[int, ReaderStatus] = {}
    unlocked: set[int] = set()
    for status in workers:
        known[status.reader] = status
        if not status.alive:
            unlocked.add(status.reader)
    dead: list[ReaderStatus] = []
    for worker, end in worker_ends(publisher.collector, unlocked).items():
        if worker in known and (end or worker in unlocked):
            dead.append(replace(known[worker], alive=False, state=end or "dead"))
    # TorchRL ends the others when it has found a dead worker, and forgets them only if they are quick to end.
    first = [status for status in dead if status.state != ending(-signal.SIGTERM)]
    if dead:
        return worker_lost(first or dead, where)
    return None


def await_newest(publisher: WorkersPublisher, timeout_s: float) -> None:
    """Wait until all workers act with the newest version; WorkerLost, AdoptionTimeout."""
    publisher.join()
    try:
        publisher.transport.wait(
            publisher.version, timeout_s, range(publisher.collector.num_workers)
        )
    except WorkerLost as lost:  # the board does not know how its readers ended
        raise lost_workers(publisher, publisher.transport.status(), lost.where) or lost from None


def await_start(
    collector: collectors.MultiCollector,
    timeout_s: float | None,
    logs: StartLogs,
    stand: Callable[[], object],
) -> None:
    """Wait until every worker process is ready, see :func:`await_ready`, where TorchRL 0.14 reads for ever.

    What TorchRL reads afterwards was read here; then ``stand()`` is called.
    """
    # TorchRL reads what was read here, from each pipe once. After the last one, all workers stand.
    unread = list(collector.pipes)

    def read() -> None:
        unread.pop()
        if not unread:
            stand()

    # A worker says that it is ready, or why it cannot be, or ends without a word.
    def ready(worker: int, seconds: float) -> bool:
        pipe = collector.pipes[worker]
        process = collector.procs[worker]
        if not pipe.poll(seconds):
            return False
        try:
            message = pipe.recv()
        except EOFError:  # the process is about to end
            process.join(seconds)
            return False
        failure = collectors.why_not_ready(message)
        if failure is not None:
            error, traceback = failure
            _log.error("the error of worker %d:\n%s", worker, traceback.rstrip())
            words = f"{type(error).__name__}: {first_line(error)}"
            raise error from ended_before_ready(
                worker, process, "its collector could not be made", words
            )
        _hand_back(pipe, message, read)
        return True

    def last_words(worker: int) -> str:
        logs.show(worker)
        return ""

    await_ready(collector.procs, ready, timeout_s, last_words, logs.doing)


def have_started(collector: collectors.MultiCollector) -> bool:
    """Whether :func:`await_start` has waited, and TorchRL has not read what it handed back."""
    return all("poll" in vars(pipe) for pipe in collector.pipes)


def _hand_back(pipe: Any, message: object, read: Callable[[], object]) -> None:
    """Let the next ``recv`` of this pipe return a message that was taken from it, and call ``read()``."""

    def recv() -> object:
        del pipe.recv, pipe.poll
        read()
        return message

    pipe.recv = recv
    pipe.poll = lambda timeout=0.0: True


def around_requests(collector: collectors.MultiCollector, enter: Enter) -> None:
    """Run all talk to a worker inside ``enter()``: one that dies before it answers closes its pipe.

    What TorchRL asks all workers for, it asks after a look for dead ones that may raise a ValueError.
    """
    for method in ("set_seed", "reset", "getattr_policy", "getattr_env"):
        around_calls(collector, method, enter)
    for pipe in collector.pipes:
        around_calls(pipe, "send", enter)
        around_calls(pipe, "recv", enter)


def around_pauses(collector: collectors.MultiCollector, enter: Enter) -> None:
    """Begin each ``collector.pause()`` inside ``enter()``: it swallows what a wait for its workers raises."""
    inner = present_method(collector, "pause")

    @contextmanager
    def pause() -> Iterator[None]:
        with ExitStack() as paused:
            with enter():
                paused.enter_context(inner())
            yield

    collector.pause = pause


def around_waits(
    collector: collectors.MultiCollector, wait: Wait, came: Callable[[int], None]
) -> None:
    """Use ``wait`` wherever the learner waits for workers, in TorchRL 0.14 for ever.

    For batches, answers, the lock of a shared buffer and its frames. Updates of workers that fill one look,
    too: a loop may do nothing else with its collector. ``came(worker)`` is called when its batch arrives.
    """
    inner = present_method(collector.queue_out, "get")

    def get(block: bool = True, timeout: float | None = None) -> Message:
        if not block:
            timeout = 0.0
        message: Message = _received(inner, wait, timeout)
        came(_sender(message))
        return message

    collector.queue_out.get = get
    _look_before(collector, "getattr_rb", wait)
    _look_before(collector, "update_policy_weights_", wait)

    def poll(pipe: Connection, timeout: float | None = 0.0) -> bool:
        return wait(partial(type(pipe).poll, pipe), timeout)

    for pipe in collector.pipes:
        in_place_of(pipe, "poll")(poll)
    collectors.wrap_write_lock(collector, lambda lock: _WatchedLock(lock, wait))


def _sender(message: Message) -> int:
    batch_or_worker = message[0]
    if isinstance(batch_or_worker, int):
        return batch_or_worker
    return batch_or_worker[1]


def _look_before(collector: collectors.MultiCollector, method: str, wait: Wait) -> None:
    """Let ``collector.method(...)`` look first at workers that fill a replay buffer by themselves."""
    inner = present_method(collector, method)

    @in_place_of(collector, method)
    def call(self: collectors.MultiCollector, *args: object, **kwargs: object) -> object:
        if collectors.runs_free(self):
            wait(lambda _: False, 0.0)
        return inner(*args, **kwargs)


def around_server(
    collector: AsyncBatchedCollector, wait: Wait, came: Callable[[int], None]
) -> None:
    """Wait for a server's frames by ``wait``; ``came(0)`` tells of frames."""

    def get(queue: Queue[T], block: bool = True, timeout: float | None = None) -> T:
        inner = partial(type(queue).get, queue)
        if not block:
            return inner(False)
        frames = _received(inner, wait, timeout)
        came(0)
        return frames

    servers.around_results(collector, lambda queue: in_place_of(queue, "get")(get))


def _received(get: Callable[[bool, float], T], wait: Wait, timeout: float | None) -> T:
    """What ``get(True, seconds)`` of a queue returns within ``timeout``, or Empty."""
    received: list[T] = []

    def step(seconds: float) -> bool:
        try:
            received.append(get(True, seconds))
        except Empty:
            return False
        return True

    if not wait(step, timeout):
        raise Empty
    return received[0]


class _WatchedLock:
    """The lock of a shared replay buffer, which a worker may hold when it is stopped or dies."""

    def __init__(self, lock: SemLock, wait: Wait) -> None:
        self._lock = lock
        self._wait = wait

    def __enter__(self) -> bool:
        return self._wait(lambda seconds: self._lock.acquire(timeout=seconds), None)

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[Any, ...]:
        return self._lock.__reduce_ex__(protocol)  # the receiving process gets the plain lock


#: Words after which a worker collects one rollout and sends it.
_COLLECT = frozenset({"continue", "continue_random"})
#: Words that may cost a rollout: the workers end, begin anew, or fill a replay buffer by themselves.
_DO_NOT_WAIT = frozenset({"close", "reset", "run_free", "pause", "restart"})


class KeptRollouts:
    """Which workers owe a rollout, and those that came unasked; nothing here keeps the collector alive.

    A worker of TorchRL 0.14's MultiAsyncCollector that finds a message after its rollout drops the rollout,
    answers, and waits for the word that the learner sends only when a rollout arrives. So each checkpoint,
    which asks all workers for their state, would lose some. Here a question waits for the rollout.
    """

    def __init__(self, collector: MultiAsyncCollector) -> None:
        self.owing: set[int] = set()
        self._kept: deque[Message] = deque()
        self._collector = weakref.ref(collector)

    def sent(self, worker: int, word: str) -> None:
        if word in _COLLECT:
            self.owing.add(worker)
        elif word == "run_free":
            self.owing.clear()

    def got(self, message: Message) -> Message:
        """Note what came through the queue."""
        self.owing.discard(_sender(message))
        return message

    def next(self) -> Message | None:
        if self._kept:
            return self._kept.popleft()
        return None

    def wait_for(self, worker: int) -> None:
        """Keep what the queue's own ``get``, which is watched, brings before the rollout of ``worker``."""
        collector = self._collector()
        if collector is None or worker not in self.owing:
            return
        # so that get() does not return them to us
        messages = self._kept
        self._kept = deque()
        try:
            while worker in self.owing and collector.procs[worker].is_alive():
                try:
                    messages.append(collector.queue_out.get(True, LOOK_EVERY_S))
                except Empty:
                    continue
        finally:
            self._kept = messages


def keep_rollouts(collector: MultiAsyncCollector) -> None:
    """Let every question to a worker wait for the rollout that it owes; once, before :func:`around_waits`."""
    rollouts = KeptRollouts(collector)

    @in_place_of(collector.queue_out, "get")
    def get(
        queue: queues.Queue[Message], block: bool = True, timeout: float | None = None
    ) -> Message:
        message = rollouts.next()
        if message is None:
            return rollouts.got(type(queue).get(queue, block, timeout))
        return message

    for worker, pipe in enumerate(collector.pipes):
        _ask_after_the_rollout(rollouts, worker, pipe)


def _ask_after_the_rollout(rollouts: KeptRollouts, worker: int, pipe: Connection) -> None:
    @in_place_of(pipe, "send")
    def send(self: Connection, message: tuple[object, str]) -> None:
        word = message[1]
        if word not in _COLLECT and word not in _DO_NOT_WAIT:
            rollouts.wait_for(worker)
        type(self).send(self, message)
        rollouts.sent(worker, word)
