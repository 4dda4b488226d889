"""What looks at the workers while a learner waits for them."""

from __future__ import annotations

import math
import os
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from typing import Any

from torchrl.collectors import AsyncBatchedCollector

from rlsync.core.errors import AdoptionTimeout, ConfigError, WorkerLost
from rlsync.core.path import short
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


def check_timeout(silent_timeout_s: object, who: str) -> None:
    if silent_timeout_s is None or (isinstance(silent_timeout_s, int | float) and silent_timeout_s > 0):
        return
    what = f"a timeout is a number of seconds above zero, got {short(silent_timeout_s)}"
    raise ConfigError(what, f"{who}(silent_timeout_s=...)", "for example 300.0; None waits for ever")


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
        self._silence = Silence(silent_timeout_s)
        self._take_turns = not collectors.collects_in_the_background(publisher.collector)
        self._pid = os.getpid()
        self._looked_at: float | None = None
        self._had_its_turn: set[int] = set()
        if isinstance(watched, AsyncBatchedCollector):
            waits.around_server(watched, self.wait, self.came)
        else:
            waits.around_waits(watched, self.wait, self.came)
            waits.around_requests(watched, self.told)
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
            raise ConfigError("these workers are watched already", "WatchWorkers.register", "register one")
        self.asked = True
        self._silence = Silence(silent_timeout_s)

    def wait(self, step: Callable[[float], bool], timeout_s: float | None) -> bool:
        """A :data:`~rlsync.torchrl_plugin.ending.waits.Wait` that raises for a dead or silent worker."""
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while not step(max(0.0, min(LOOK_EVERY_S, deadline - time.monotonic()))):
            self._look()
            if time.monotonic() >= deadline:
                return False
        return True

    def came(self, worker: int) -> None:
        """A batch of ``worker`` arrived. The silence timers start again, unless the others collect on."""
        if not self._take_turns:
            self._look()  # a queue that another worker keeps full is never waited for
            return
        self._silence.clear()
        self._looked_at = None
        if (collector := self._collector()) is not None:
            self._had_its_turn.add(worker)
            if len(self._had_its_turn) == collector.num_workers:
                self._had_its_turn.clear()

    def told(self) -> AbstractContextManager[None]:
        """Raise WorkerLost with the names of the dead workers in place of TorchRL's error, its cause."""
        return lost_in_place(self._lost_to)

    def _told_of(self, batches: Iterator[Any]) -> Iterator[Any]:
        with self.told():
            yield from batches

    def _lost_to(self, error: Exception) -> WorkerLost | None:
        # A process that ends closes its pipes a moment before it is seen to be dead.
        broken = isinstance(error, (ConnectionError, EOFError))
        until = time.monotonic() + (_DEAD_WITHIN_S if broken else 0.0)
        while (publisher := self._watched()) is not None:
            lost = lost_workers(publisher, publisher.transport.status(), "asking for a batch")
            if lost is not None:
                self._end_workers()
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
            "; ".join(f"{it} has not begun a rollout for {self._silence.timeout_s:g} s" for it in named),
            f"waiting for frames; silent_timeout_s={self._silence.timeout_s:g}",
            "find out what stopped it, or where it hangs (py-spy dump --pid PID); if its rollouts take that "
            "long, give a longer silent_timeout_s to WatchWorkers or to the BoardScheme",
        )

    def _end_workers(self) -> None:
        collector = self._collector()
        if collector is not None:
            for process in getattr(collector, "procs", ()):
                with suppress(ValueError):  # closed: TorchRL has ended it
                    if process_state(process.pid) == "stopped":  # it would not leave in any time
                        end_group(process)
            collector.shutdown(timeout=END_WITHIN_S, raise_on_error=False)
