"""WatchWorkers: raises in a waiting learner when a worker is dead, stopped or hangs."""

from __future__ import annotations

import math
import os
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torchrl.collectors import AsyncBatchedCollector, BaseCollector
from torchrl.trainers import Trainer

from rlsync.core.errors import AdoptionTimeout, ConfigError, RlsyncError, WorkerLost
from rlsync.sync.processes import LOOK_EVERY_S, Silence
from rlsync.sync.workers_publisher import BoardCollector, WorkersPublisher
from rlsync.torchrl_plugin.collectors.board import BoardEndpoint
from rlsync.torchrl_plugin.collectors.choose import endpoint_of
from rlsync.torchrl_plugin.compat import collectors
from rlsync.torchrl_plugin.ending import waits
from rlsync.torchrl_plugin.ending.waits import lost_workers
from rlsync.torchrl_plugin.hooks.misuse import RegistersItself
from rlsync.transport.contract import ReaderStatus

#: Before the error is raised, the other workers get this long to end; then they are killed.
END_WITHIN_S = 5.0

_DEAD_WITHIN_S = 1.0

_WATCHED: weakref.WeakSet[WorkersPublisher] = weakref.WeakSet()


class WatchWorkers(RegistersItself):
    """Raise in the learner, instead of waiting for ever, when a worker is dead, stopped or hangs.

    The hook watches the workers of a process collector with a board, or the inference server of an
    AsyncBatchedCollector with one, wherever the trainer waits for them:

    - for a batch of the collector that it iterates over;
    - for frames in a replay buffer that the workers fill (``async_collection``), and for the lock of that
      buffer;
    - for the answer to a request (seeds, checkpoints).

    If a worker is dead, the learner raises WorkerLost at once, with the worker's pid, how it ended, and the
    version it acted with last. If TorchRL noticed first, TorchRL's error is the cause of this one. The
    worker's own error is on stderr.

    If a live worker has not begun a rollout for ``silent_timeout_s`` seconds in which the learner waited, the
    learner raises AdoptionTimeout. While other workers deliver batches, the learner is not waiting. A
    learner whose workers fill a replay buffer counts as waiting all the time.

    Before it raises, the hook ends the other workers, as TorchRL does when it finds a dead worker.

    The hook costs nothing while batches arrive. It cannot help in two short moments: when a worker is killed
    while it writes to a pipe, or while it counts the frames of a shared buffer. TorchRL waits there without a
    deadline.

    Args:
        silent_timeout_s: in seconds; longer than the longest rollout. ``None`` waits for ever for live
            workers.
        collector: whose workers; by default those of the trainer's own collector.

    Raises:
        ConfigError: the timeout is not above zero. At :meth:`register`: the collector has no workers on a
            board, or is already watched.
        WorkerLost: in the trainer's loop, when a worker is dead.
        AdoptionTimeout: in the trainer's loop, when a worker is silent for too long.

    Example:
        >>> hook = WatchWorkers(silent_timeout_s=60.0)
        >>> # hook.register(trainer)
    """

    def __init__(
        self, silent_timeout_s: float | None = 300.0, *, collector: BaseCollector | None = None
    ) -> None:
        if silent_timeout_s is not None and not silent_timeout_s > 0:
            raise ConfigError(
                f"a timeout is a number of seconds above zero, got {silent_timeout_s!r}",
                f"WatchWorkers(silent_timeout_s={silent_timeout_s!r})",
                "for example 300.0; None waits for ever",
            )
        self.silent_timeout_s = silent_timeout_s
        self.collector = collector

    def register(self, trainer: Trainer, name: str = "watch_workers") -> None:
        """Watch the workers of the collector.

        Args:
            trainer: the trainer.
            name: not used: the hook keeps nothing in checkpoints.
        """
        watched = trainer.collector if self.collector is None else self.collector
        endpoint = endpoint_of(watched)
        if not isinstance(endpoint, BoardEndpoint):
            raise ConfigError(
                "this collector has no workers on a board",
                f"WatchWorkers.register; the collector is a {type(watched).__name__}",
                "pass weight_sync_schemes={'policy': BoardScheme()} to a process collector, "
                "or weight_sync=BoardScheme() to an AsyncBatchedCollector",
            )
        collector = endpoint.publisher.collector
        if isinstance(collector, BoardCollector):
            raise ConfigError(
                "this collector watches its workers by itself",
                f"WatchWorkers.register; the collector is a {type(collector).__name__}",
                "leave WatchWorkers out",
            )
        if not isinstance(watched, (collectors.MultiCollector, AsyncBatchedCollector)):
            raise ConfigError(
                "WatchWorkers watches MultiSyncCollector, MultiAsyncCollector and AsyncBatchedCollector only",
                f"WatchWorkers.register; the collector is a {type(watched).__name__}",
                "leave it out; sync.wait() raises WorkerLost when a worker is dead",
            )
        if endpoint.publisher in _WATCHED:
            raise ConfigError("these workers are watched already", "WatchWorkers.register", "register one")
        watch = _Watch(endpoint.publisher, self.silent_timeout_s)
        if isinstance(watched, AsyncBatchedCollector):
            waits.around_server(watched, watch.wait, watch.came, watch.told)
        else:
            waits.around_waits(collector, watch.wait, watch.came)
            waits.around_requests(collector, watch.told)
        _WATCHED.add(endpoint.publisher)


class _Watch:
    """Waits for the workers of one collector and checks them meanwhile. Holds only weak references."""

    def __init__(self, publisher: WorkersPublisher, silent_timeout_s: float | None) -> None:
        self._publisher = weakref.ref(publisher)
        self._collector = weakref.ref(publisher.collector)
        self._silence = Silence(math.inf if silent_timeout_s is None else silent_timeout_s)
        self._take_turns = not collectors.collects_in_the_background(publisher.collector)
        self._pid = os.getpid()
        self._looked_at: float | None = None
        self._had_its_turn: set[int] = set()

    def wait(self, step: Callable[[float], bool], timeout_s: float | None) -> bool:
        """A :data:`~rlsync.torchrl_plugin.ending.waits.Wait` that raises for a dead or silent worker."""
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while not step(max(0.0, min(LOOK_EVERY_S, deadline - time.monotonic()))):
            self._look()
            if time.monotonic() >= deadline:
                return False
        return True

    def came(self, worker: int) -> None:
        """A batch of ``worker`` arrived, so the silence timers start again."""
        self._silence.clear()
        self._looked_at = None
        collector = self._collector()
        if self._take_turns and collector is not None:
            self._had_its_turn.add(worker)
            if len(self._had_its_turn) == collector.num_workers:
                self._had_its_turn.clear()

    @contextmanager
    def told(self) -> Iterator[None]:
        """Raise WorkerLost with the names of the dead workers in place of TorchRL's error, its cause."""
        try:
            yield
        except RlsyncError:
            raise
        except Exception as error:
            lost = self._lost_to(error)
            if lost is None:
                raise
            self._end_workers()
            raise lost from error

    def _lost_to(self, error: Exception) -> WorkerLost | None:
        # A process that ends closes its pipes a moment before it is seen to be dead.
        broken = isinstance(error, (ConnectionError, EOFError))
        until = time.monotonic() + (_DEAD_WITHIN_S if broken else 0.0)
        while (publisher := self._watched()) is not None:
            lost = lost_workers(publisher, publisher.transport.status(), "asking for a batch")
            if lost is not None or time.monotonic() >= until:
                return lost
            time.sleep(LOOK_EVERY_S / 10)
        return None

    def _watched(self) -> WorkersPublisher | None:
        """The publisher, unless its workers have been shut down or belong to another process."""
        collector = self._collector()
        ours = collector is not None and not collector.closed and os.getpid() == self._pid
        return self._publisher() if ours else None

    def _look(self) -> None:
        now = time.monotonic()
        if self._looked_at is not None and now - self._looked_at < LOOK_EVERY_S / 2:
            return
        publisher = self._watched()
        if publisher is None:
            return
        self._looked_at = now
        workers = publisher.transport.status()
        error = lost_workers(publisher, workers, "waiting for frames") or self._hanging(workers)
        if error is not None:
            self._end_workers()
            raise error

    def _hanging(self, workers: list[ReaderStatus]) -> AdoptionTimeout | None:
        over = set(self._silence.look({worker.reader: worker.heartbeat_age_s for worker in workers}))
        silent = [worker for worker in workers if worker.reader in over - self._had_its_turn]
        # A stopped worker may hold a lock that the others wait for, so it is named alone.
        named = [worker for worker in silent if worker.state == "stopped"] or silent
        if not named:
            return None
        return AdoptionTimeout(
            "; ".join(
                f"{worker} has not begun a rollout for {self._silence.timeout_s:g} s" for worker in named
            ),
            f"waiting for frames; WatchWorkers(silent_timeout_s={self._silence.timeout_s:g})",
            "find out what stopped it, or where it hangs (py-spy dump --pid PID); if its rollouts take that "
            "long, give a longer silent_timeout_s",
        )

    def _end_workers(self) -> None:
        collector = self._collector()
        if collector is not None:
            collector.shutdown(timeout=END_WITHIN_S, raise_on_error=False)
