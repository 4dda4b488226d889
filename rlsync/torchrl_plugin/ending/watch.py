"""What looks at the workers while a learner waits for them."""

from __future__ import annotations

import math
import os
import time
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from threading import Thread

from tensordict import TensorDictBase
from torchrl.collectors import AsyncBatchedCollector

from rlsync.core.errors import AdoptionTimeout, ConfigError, RlsyncError
from rlsync.sync.families import end_group
from rlsync.sync.processes import LOOK_EVERY_S, Silence
from rlsync.sync.workers_publisher import WorkersPublisher
from rlsync.torchrl_plugin.compat import collectors, wrap_batches
from rlsync.torchrl_plugin.compat.endings import lost_in_place
from rlsync.torchrl_plugin.ending import waits
from rlsync.torchrl_plugin.ending.waits import lost_workers
from rlsync.transport.board.format import process_state
from rlsync.transport.contract import ReaderStatus

#: Before the error is raised, workers that are not stopped get this long to end; then they are killed.
END_WITHIN_S = 5.0

_DEAD_WITHIN_S = 1.0

_watches: weakref.WeakKeyDictionary[WorkersPublisher, Watch] = weakref.WeakKeyDictionary()


class Watch:
    """Waits for the workers of one collector and checks them meanwhile. Holds only weak references."""

    asked = False  #: whether a WatchWorkers has set the timeout

    def __init__(
        self,
        publisher: WorkersPublisher,
        watched: collectors.MultiCollector | AsyncBatchedCollector,
        silent_timeout_s: float | None = None,
    ) -> None:
        self._publisher = weakref.ref(publisher)
        self._collector = weakref.ref(publisher.collector)
        self.silence = Silence(silent_timeout_s)
        self._take_turns = not collectors.collects_in_the_background(publisher.collector)
        self._pid = os.getpid()
        self._looked_at: float | None = None
        self._had_its_turn: set[int] = set()
        self.read: object | None = None
        self._looks_at_reads = False
        self._held_by: AdoptionTimeout | None = None
        self._raised: RlsyncError | None = None  #: the error after which it has ended the workers
        if isinstance(watched, AsyncBatchedCollector):
            waits.around_server(watched, self.wait, self.came)
        else:
            waits.around_waits(watched, self.wait, self.came)
            waits.around_requests(watched, self._asking)
            waits.around_pauses(watched, self.told)
        wrap_batches(watched, self._told_of)
        _watches[publisher] = self

    @classmethod
    def of(
        cls, publisher: WorkersPublisher, watched: collectors.MultiCollector | AsyncBatchedCollector
    ) -> Watch:
        """The watch of these workers, which begins now if there is none."""
        return _watches.get(publisher) or cls(publisher, watched)

    def ask(self, silent_timeout_s: float | None) -> None:
        """Give up after so many seconds from now on. ConfigError if this was asked before."""
        if self.asked:
            raise ConfigError(
                "these workers are watched already", "WatchWorkers.register", "register one"
            )
        self.asked = True
        self.silence = Silence(silent_timeout_s)

    def wait(self, step: Callable[[float], bool], timeout_s: float | None) -> bool:
        """A :data:`~rlsync.torchrl_plugin.ending.waits.Wait` that raises for a dead or silent worker."""
        if timeout_s is None:
            deadline = math.inf
        else:
            deadline = time.monotonic() + timeout_s
        while True:
            with self._reading():
                if step(max(0.0, min(LOOK_EVERY_S, deadline - time.monotonic()))):
                    return True
            self._look()
            if time.monotonic() >= deadline:
                return False

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Around a read of what workers sent: it asks the sender for tensors, and waits without a limit."""
        self.read = object()
        if not self._looks_at_reads:
            self._looks_at_reads = True
            Thread(target=_end_long_reads, args=[weakref.ref(self)], daemon=True).start()
        try:
            yield
        except (EOFError, OSError) as error:
            if self._held_by is None:
                raise
            self._end_workers()
            self._raised = self._held_by
            raise self._held_by from error
        finally:
            self.read = None

    def end_read(self, publisher: WorkersPublisher) -> None:
        """End the workers that may keep the learner in a read; it raises there. Called by another thread."""
        workers = publisher.transport.status()
        limit_s = self.silence.timeout_s
        silent = {worker.reader for worker in workers if worker.heartbeat_age_s > limit_s}
        named = self._named(workers, silent)
        if named:
            living = [worker for worker in named if worker.alive]
            # a lost one is told by told()
            if living:
                self._held_by = self._late(living)
            else:
                self._held_by = None
            self._kill({worker.reader for worker in named})

    @contextmanager
    def _asking(self) -> Iterator[None]:
        with self.told(), self._reading():
            yield

    def came(self, worker: int) -> None:
        """A batch of ``worker`` arrived. The silence timers start again, unless the others collect on."""
        if not self._take_turns:
            self._look()  # a queue that another worker keeps full is never waited for
            return
        self.silence.clear()
        self._looked_at = None
        collector = self._collector()
        if collector is not None:
            self._had_its_turn.add(worker)
            if len(self._had_its_turn) == collector.num_workers:
                self._had_its_turn.clear()

    def told(self) -> AbstractContextManager[None]:
        """Raise WorkerLost with the names of the dead workers in place of TorchRL's error, its cause.

        If TorchRL has swallowed the error after which the workers were ended, raise that one.
        """
        return lost_in_place(self._lost_to)

    def _told_of(self, batches: Iterator[TensorDictBase]) -> Iterator[TensorDictBase]:
        with self.told():
            yield from batches

    def _lost_to(self, error: Exception) -> RlsyncError | None:
        if self._raised is not None:
            return self._raised
        # A process that ends closes its pipes a moment before it is seen to be dead.
        until = time.monotonic()
        if isinstance(error, (ConnectionError, EOFError)):
            until += _DEAD_WITHIN_S
        while (publisher := self.watched()) is not None:
            lost = lost_workers(publisher, publisher.transport.status(), "asking for a batch")
            if lost is not None:
                self._end_workers()
            if lost is not None or time.monotonic() >= until:
                return lost
            time.sleep(LOOK_EVERY_S / 10)
        return None

    def watched(self) -> WorkersPublisher | None:
        """The publisher, unless its workers have been shut down or belong to another process."""
        collector = self._collector()
        ours = collector is not None and not collector.closed and os.getpid() == self._pid
        if ours:
            return self._publisher()
        return None

    def _look(self) -> None:
        now = time.monotonic()
        if self._looked_at is not None and now - self._looked_at < LOOK_EVERY_S / 2:
            return
        publisher = self.watched()
        if publisher is None:
            return
        self._looked_at = now
        workers = publisher.transport.status()
        error: RlsyncError | None = lost_workers(publisher, workers, "waiting for frames")
        if error is None:
            error = self._hanging(workers)
        if error is not None:
            self._end_workers()
            self._raised = error
            raise error

    def _hanging(self, workers: list[ReaderStatus]) -> AdoptionTimeout | None:
        ages_s = {worker.reader: worker.heartbeat_age_s for worker in workers}
        named = self._named(workers, set(self.silence.look(ages_s)))
        if named:
            return self._late(named)
        return None

    def _named(self, workers: list[ReaderStatus], silent: Collection[int]) -> list[ReaderStatus]:
        """Whom to name if one that is waited for is silent: a stopped one may hold a lock of all others."""
        waited_for = [worker for worker in workers if worker.reader not in self._had_its_turn]
        late = [worker for worker in waited_for if worker.reader in silent]
        if not late:
            return []
        stopped = [worker for worker in waited_for if worker.state == "stopped"]
        return stopped or late

    def _late(self, named: list[ReaderStatus]) -> AdoptionTimeout:
        limit_s = self.silence.timeout_s
        problems = [f"{worker} has not begun a rollout for {limit_s:g} s" for worker in named]
        return AdoptionTimeout(
            "; ".join(problems),
            f"waiting for frames; silent_timeout_s={limit_s:g}",
            "find out what stopped it, or where it hangs (py-spy dump --pid PID); if its rollouts take that "
            "long, give a longer silent_timeout_s to WatchWorkers or to the BoardScheme",
        )

    def _end_workers(self) -> None:
        collector = self._collector()
        if collector is not None:
            self._kill()
            collector.shutdown(timeout=END_WITHIN_S, raise_on_error=False)

    def _kill(self, named: Collection[int] = ()) -> None:
        """Kill these workers, and those that are stopped: they would not leave in any time."""
        for worker, process in enumerate(getattr(self._collector(), "procs", ())):
            with suppress(ValueError):  # closed: TorchRL has ended it
                if worker in named or process_state(process.pid) == "stopped":
                    end_group(process)


def _end_long_reads(ref: weakref.ref[Watch]) -> None:
    """While a watch looks after workers, end each read that takes longer than its timeout.

    The time is counted in sleeps: a program that was suspended has not waited meanwhile.
    """
    read = None
    lasts_s = 0.0
    while (watch := ref()) is not None and (publisher := watch.watched()) is not None:
        if watch.read is None or watch.read is not read:
            read = watch.read
            lasts_s = 0.0
        elif lasts_s > watch.silence.timeout_s:
            watch.end_read(publisher)
        tick_s = min(1.0, watch.silence.timeout_s / 4)
        del watch, publisher
        time.sleep(tick_s)
        lasts_s += tick_s
