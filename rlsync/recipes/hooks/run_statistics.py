"""Counts what a run does, and leaves the numbers in its folder."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from statistics import quantiles

from tensordict import TensorDictBase
from torchrl.trainers import Trainer

from rlsync import SyncWeights
from rlsync.core.plan import Receipt
from rlsync.recipes.hooks.bottleneck import Waits
from rlsync.recipes.hooks.staleness import StalenessHistogram
from rlsync.recipes.statistics import RunStatistics
from rlsync.torchrl_plugin.hooks.ages import UNKNOWN
from rlsync.torchrl_plugin.hooks.misuse import no_trainer
from rlsync.transport.contract import ReaderStatus
from rlsync.transport.ring.format import RingCounters

#: Publishes from which the percentiles are taken: the newest.
_NEWEST = 1000

#: Seconds between two writes of the file.
_WRITE_EVERY_S = 1.0


class StatisticsHook:
    """Writes ``statistics.json`` about every second, and at the end; without a ``run_dir`` it only counts.

    Register it after the hook that publishes, and before hooks that mix other frames into a batch. It keeps
    nothing in checkpoints: a resumed run goes on from the trainer's counters.
    """

    def __init__(
        self,
        sync: SyncWeights,
        staleness: StalenessHistogram,
        run_dir: Path | None,
        counters: Callable[[], RingCounters] | None = None,
    ) -> None:
        self._sync = sync
        self._staleness = staleness
        self._run_dir = run_dir
        self._counters = counters
        self._registered = False
        self._started_s = self._idle_since_s = time.monotonic()
        self._written_s = -math.inf  # the first batch is written at once
        self._first = sync.counters()
        self._learner_wait_s = 0.0
        self._lag_versions = 0
        self._published_bytes = 0
        self._seen = 0  # the newest version whose receipt was counted
        self._publish_ms: deque[float] = deque(maxlen=_NEWEST)
        self._to_frames_ms: deque[float] = deque(maxlen=_NEWEST)
        self._adoption_ms: deque[float] = deque(maxlen=_NEWEST)
        self._published_s: dict[int, float] = {}  # of the newest versions
        self._adopted: dict[int, int] = {}  # by each worker, when the last batch arrived
        self._awaited: deque[Receipt] = deque(maxlen=_NEWEST)  # no frames have been made with these yet

    def register(self, trainer: Trainer) -> None:
        """Count each batch of the trainer with which the hook that publishes is registered."""
        self._registered = True
        trainer.register_op("setup", self._begin)
        trainer.register_op("batch_process", self._arrived)
        trainer.register_op("post_steps_log", self._done)
        trainer.register_op("shutdown", self.write)

    def waits(self) -> Waits:
        """Who has waited so far; costs less than :meth:`now`."""
        ring = None if self._counters is None else self._counters()
        return Waits(
            time.monotonic() - self._started_s,
            self._learner_wait_s,
            None if ring is None else ring.worker_wait_s,
            None if ring is None else ring.dropped,
        )

    def now(self) -> RunStatistics:
        """The numbers so far."""
        counted, began = self._sync.counters(), self._first
        waits = self.waits()
        since = max(waits.seconds, 1e-9)
        steps = self._staleness.steps_by_age
        publish, to_frames = _percentiles(self._publish_ms), _percentiles(self._to_frames_ms)
        adoption = _percentiles(self._adoption_ms)
        return RunStatistics(
            frames=counted.frames,
            updates=counted.optim_steps,
            updates_per_frame=counted.optim_steps / counted.frames if counted.frames else None,
            seconds=waits.seconds,
            frames_per_s=(counted.frames - began.frames) / since,
            updates_per_s=(counted.optim_steps - began.optim_steps) / since,
            version=self._sync.version,
            published_bytes=self._published_bytes,
            publish_ms_p50=publish[0],
            publish_ms_p95=publish[1],
            to_frames_ms_p50=to_frames[0],
            to_frames_ms_p95=to_frames[1],
            adoption_ms_p50=adoption[0],
            adoption_ms_p95=adoption[1],
            lag_versions=self._lag_versions,
            staleness_versions=(
                sum(age * count for age, count in steps.items()) / steps.total() if steps else None
            ),
            learner_wait_s=waits.learner_s,
            workers_wait_s=waits.workers_s,
            dropped_rollouts=waits.dropped,
        )

    def write(self) -> None:
        if self._run_dir is not None:
            self._count_receipts()
            self.now().write(self._run_dir)
        self._written_s = time.monotonic()

    def _begin(self) -> None:
        self._started_s = self._idle_since_s = time.monotonic()
        self._first = self._sync.counters()

    def _arrived(self, batch: TensorDictBase) -> TensorDictBase:
        if not self._registered:
            raise no_trainer(self)
        self._learner_wait_s += time.monotonic() - self._idle_since_s
        workers = self._sync.acting_workers()
        self._lag_versions = self._sync.lag_versions(workers)
        self._count_receipts()
        self._look_at_adoptions(workers)
        age = self._sync.staleness(batch).versions
        known = age[age != UNKNOWN]
        if known.numel():
            newest = self._sync.version - int(known.min())
            while self._awaited and self._awaited[0].version <= newest:
                self._to_frames_ms.append((time.time() - self._awaited.popleft().time_s) * 1e3)
        return batch

    def _look_at_adoptions(self, workers: list[ReaderStatus]) -> None:
        """Note how long after its publish each worker began a rollout with a version that is new to it."""
        now_s = time.time()
        for worker in workers:
            version, published_s = worker.adopted_version, self._published_s.get(worker.adopted_version)
            if published_s is not None and self._adopted.get(worker.reader) != version:
                began_s = now_s - worker.heartbeat_age_s
                self._adoption_ms.append(max(0.0, began_s - published_s) * 1e3)
            self._adopted[worker.reader] = version

    def _done(self, batch: TensorDictBase | None = None) -> None:
        if time.monotonic() - self._written_s >= _WRITE_EVERY_S:
            self.write()
        self._idle_since_s = time.monotonic()

    def _count_receipts(self) -> None:
        # The newest are the last: older ones were counted, and are not looked at again.
        new = list(takewhile(lambda r: r.version > self._seen or r.coalesced, reversed(self._sync.receipts)))
        for receipt in [r for r in reversed(new) if r.version > self._seen and not r.coalesced]:
            self._seen = receipt.version
            self._published_bytes += receipt.copied_bytes
            self._publish_ms.append(receipt.duration_s * 1e3)
            self._published_s[receipt.version] = receipt.time_s
            self._awaited.append(receipt)
        while len(self._published_s) > _NEWEST:
            del self._published_s[next(iter(self._published_s))]


def _percentiles(values: deque[float]) -> tuple[float | None, float | None]:
    """The median and the 95th percentile; nothing of fewer than two values."""
    if len(values) < 2:
        return None, None
    cut = quantiles(values, n=20, method="inclusive")
    return cut[9], cut[18]
