"""Hooks that measure a run: who waits for whom, how old the frames are, and all of it in numbers."""

from __future__ import annotations

import csv
import math
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path
from statistics import quantiles
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.collectors import BaseCollector, MultiAsyncCollector
from torchrl.trainers import Trainer

from rlsync import Receipt, SyncWeights, VerifySync
from rlsync.runs.actors.rollout_collector import RolloutCollector
from rlsync.runs.evaluation.evaluator import evaluations_ended
from rlsync.runs.recipes.hooks.steering import EpisodeReturns
from rlsync.runs.recipes.run_files import RunStatistics
from rlsync.torchrl_plugin.compat.collectors import around_arrivals
from rlsync.torchrl_plugin.compat.stamps import STAMP
from rlsync.torchrl_plugin.compat.trainers import Reader, registered_modules
from rlsync.torchrl_plugin.hooks.ages import UNKNOWN, counts_by_age
from rlsync.torchrl_plugin.hooks.logs import require_stamps
from rlsync.torchrl_plugin.hooks.misuse import RegistersItself
from rlsync.transport.contract import ReaderStatus


class InSummary(ABC):
    """A registered hook with one more line for the end of ``rlsync train``."""

    @abstractmethod
    def summary_line(self) -> str:
        """The line, without a line break; called once, after the last frame."""


class Waits(NamedTuple):
    """How long each side has waited for the other, in seconds, and for how long that was counted."""

    seconds: float  # since counting began
    learner_s: float  # the learner for frames
    # all workers together for the learner; None: the collector cannot tell
    workers_s: float | None = None
    dropped: int | None = None  # rollouts, because no worker may wait; None where none can be


@dataclass(frozen=True, slots=True)
class Load:
    learner_busy: float  # fraction of the time in which the learner was not waiting for frames
    # of the workers' time; None where the collector cannot tell
    workers_waited: float | None = None
    more_frames: str | None = None  # the override with which workers make more frames

    def __str__(self) -> str:
        idle = 1 - self.learner_busy
        waited = self.workers_waited
        told = f"learner busy {self.learner_busy:.0%}"
        if waited is None:
            if idle >= 0.1:
                who = "the workers are the bottleneck"
            else:
                who = "the learner is the bottleneck"
        else:
            told += f", workers waited {waited:.0%}"
            if waited > idle:
                who = "the learner is the bottleneck"
            else:
                who = "the workers are the bottleneck"
            if max(idle, waited) < 0.1:
                who = "neither waits for the other"
        if who.startswith("the workers") and self.more_frames is not None:
            who += f", try {self.more_frames}"
        return f"{told}: {who}".replace("%", " %")


#: The hook's name in checkpoints. It counts staleness and not lag, but older checkpoints have this name, and
#: TorchRL refuses a checkpoint that lacks a registered name.
CHECKPOINT_KEY = "lag_histogram"


class StalenessHistogram(RegistersItself, Reader):
    """Counts how many versions old the consumed steps are, and logs their mean.

    The counts go to a file at each checkpoint and at the end. After every batch it logs
    ``sync/staleness_versions``: the mean over the steps that the optimizer has used since the batch arrived.
    Steps of unknown age are left out.
    """

    reads = (STAMP,)

    def __init__(self, sync: SyncWeights, file: Path | None = None) -> None:
        self.sync = sync
        self.counts: Counter[int] = Counter()  #: consumed steps by age, up to the last report
        self._file = file
        # stamps since the last report, by the learner's version
        self._consumed: dict[int, list[Tensor]] = {}

    def _consume(self, batch: TensorDictBase) -> TensorDictBase:
        if (stamps := batch.get(STAMP, None)) is not None:
            # They are counted after the batch: one update's alone take as long as its gathers.
            self._consumed.setdefault(self.sync.version, []).append(stamps.clone())
        return batch

    def report(self, batch: TensorDictBase | None = None) -> dict[str, Any] | None:
        """The mean age of what was consumed since the last call; None if nothing was."""
        consumed = self._consumed
        self._consumed = {}
        ages: Counter[int] = Counter()
        for newest, stamps in consumed.items():
            ages += counts_by_age(
                torch.cat([part.flatten() for part in stamps]), self.sync.ledger, newest
            )
        if not ages:
            return None
        self.counts.update(ages)
        return {
            "sync/staleness_versions": sum(age * count for age, count in ages.items())
            / ages.total()
        }

    def register(self, trainer: Trainer, name: str = CHECKPOINT_KEY) -> None:
        """Count before each optimizer step, and write at the end; ConfigError without stamps."""
        require_stamps(self.sync, "StalenessHistogram")
        trainer.register_op("process_optim_batch", self._consume)
        trainer.register_op("post_steps_log", self.report)
        trainer.register_op("shutdown", self.write)
        trainer.register_module(name, self)

    def write(self) -> None:
        self.report()
        if self._file is not None:
            with self._file.open("w", newline="") as file:
                csv.writer(file).writerows(
                    [("staleness_versions", "steps"), *sorted(self.counts.items())]
                )

    def state_dict(self) -> dict[str, Any]:
        self.write()
        return {"counts": dict(self.counts)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.counts = Counter({int(age): int(count) for age, count in state_dict["counts"].items()})


_NEWEST = 1000  #: publishes from which the percentiles are taken: the newest

_WRITE_EVERY_S = 1.0  #: seconds between two writes of the file


@dataclass(eq=False)
class StatisticsHook(RegistersItself, InSummary):
    """Writes ``statistics.json`` about every second, and at the end; without a ``run_dir`` it only counts.

    It logs who waits for whom, and says at the end who was the bottleneck. With ``turns`` workers collect
    only while the learner waits. Register it after what publishes, and before hooks that mix frames into a
    batch.
    """

    sync: SyncWeights
    staleness: StalenessHistogram
    run_dir: Path | None
    verify: VerifySync | None = None
    num_workers: int = 1
    more_frames: str | None = None

    def __post_init__(self) -> None:
        self.load = Load(0.0)
        self._started_s = self._idle_since_s = time.monotonic()
        self._written_s = -math.inf  # the first batch is written at once
        self._first = self.sync.counters()
        self._after_first: Waits | None = None  # when the first batch was done
        self._learner_wait_s = 0.0
        self._lag_versions = 0
        self._published_bytes = 0
        self._seen = 0  # the newest version whose receipt was counted
        self._publish_ms: deque[float] = deque(maxlen=_NEWEST)
        self._to_frames_ms: deque[float] = deque(maxlen=_NEWEST)
        self._adoption_ms: deque[float] = deque(maxlen=_NEWEST)
        self._published_s: dict[int, float] = {}  # of the newest versions
        self._adopted: dict[int, int] = {}  # by each worker, when the last batch arrived
        # no frames have been made with these yet
        self._awaited: deque[Receipt] = deque(maxlen=_NEWEST)
        self._trainer: Trainer | None = None
        self._made: Counter[int] = Counter()  # frames of each worker

    def register(self, trainer: Trainer, name: str = "bottleneck") -> None:
        """Count each batch of the trainer with which the hook that publishes is registered."""
        self._trainer = trainer
        if isinstance(trainer.collector, MultiAsyncCollector):
            # Its batches do not tell who made them.
            around_arrivals(
                trainer.collector, lambda worker, new: self._made.update({worker: new.numel()})
            )
        trainer.register_op("setup", self._begin)
        trainer.register_op("batch_process", partial(self._arrived, trainer.collector))
        trainer.register_op("post_steps_log", self._done)
        trainer.register_op("shutdown", self.write)
        trainer.register_module(name, self)

    def summary_line(self) -> str:
        return str(self.load)

    def _waits(self) -> Waits:
        so_far = Waits(time.monotonic() - self._started_s, self._learner_wait_s)
        collector = None if self._trainer is None else self._trainer.collector
        if not isinstance(collector, RolloutCollector):
            return so_far
        ring = collector.counters()
        return so_far._replace(workers_s=ring.worker_wait_s, dropped=ring.dropped)

    def now(self) -> RunStatistics:
        counted = self.sync.counters()
        began = self._first
        waits = self._waits()
        since = max(waits.seconds, 1e-9)
        steps = self.staleness.counts
        if self._trainer is None:
            modules = []
        else:
            modules = registered_modules(self._trainer)
        means = (hook.mean for hook in modules if isinstance(hook, EpisodeReturns) and hook.newest)
        measured = self._publish_ms, self._to_frames_ms, self._adoption_ms
        publish, to_frames, adoption = map(_percentiles, measured)
        return RunStatistics(
            frames=counted.frames,
            updates=counted.optim_steps,
            updates_per_frame=counted.optim_steps / counted.frames if counted.frames else None,
            seconds=waits.seconds,
            frames_per_s=(counted.frames - began.frames) / since,
            updates_per_s=(counted.optim_steps - began.optim_steps) / since,
            version=self.sync.version,
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
            outputs_held_version=None if self.verify is None else self.verify.behaviour_held,
            outputs_held_time_s=None if self.verify is None else self.verify.behaviour_held_time_s,
            outputs_open=None if self.verify is None else "; ".join(self.verify.untold) or None,
            total_frames=None if self._trainer is None else self._trainer.total_frames,
            run_id=self.sync.ledger.run_id,
            return_mean=next(means, None),
            frames_by_worker={str(worker): self._made[worker] for worker in sorted(self._made)},
            evaluations_ended=None if self._trainer is None else evaluations_ended(self._trainer),
        )

    def write(self) -> None:
        if self.run_dir is not None:
            self._count_receipts()
            self.now().write(self.run_dir)
        self._written_s = time.monotonic()

    def _begin(self) -> None:
        self._started_s = self._idle_since_s = time.monotonic()
        self._first = self.sync.counters()

    def _arrived(self, collector: BaseCollector, batch: TensorDictBase) -> TensorDictBase:
        self._count_makers(collector, batch)
        self._learner_wait_s += time.monotonic() - self._idle_since_s
        workers = self.sync.acting_workers()
        self._lag_versions = self.sync.lag_versions(workers)
        self._count_receipts()
        self._look_at_adoptions(workers)
        age = self.sync.staleness(batch).versions
        known = age[age != UNKNOWN]
        if known.numel():
            newest = self.sync.version - int(known.min())
            while self._awaited and self._awaited[0].version <= newest:
                self._to_frames_ms.append((time.time() - self._awaited.popleft().time_s) * 1e3)
        return batch

    def _count_makers(self, collector: BaseCollector, batch: TensorDictBase) -> None:
        if isinstance(collector, MultiAsyncCollector):
            return  # counted as they arrive
        # an element of a batch is a whole rollout
        of_rollouts = isinstance(collector, RolloutCollector)
        if of_rollouts:
            makers = collector.last_workers
        else:
            makers = range(self.num_workers)
        frames = collector.frames_per_batch if of_rollouts else batch.numel()
        for worker in makers:
            self._made[worker] += frames // len(makers)

    def _look_at_adoptions(self, workers: list[ReaderStatus]) -> None:
        """Note how long after its publish each worker began a rollout with a version that is new to it."""
        now_s = time.time()
        for worker in workers:
            version = worker.adopted_version
            published_s = self._published_s.get(worker.adopted_version)
            if published_s is not None and self._adopted.get(worker.reader) != version:
                began_s = now_s - worker.heartbeat_age_s
                self._adoption_ms.append(max(0.0, began_s - published_s) * 1e3)
            self._adopted[worker.reader] = version

    def _done(self, batch: TensorDictBase | None = None) -> dict[str, Any]:
        if time.monotonic() - self._written_s >= _WRITE_EVERY_S:
            self.write()
        self._idle_since_s = time.monotonic()
        counted = self._waits()
        began = self._after_first
        if began is None:  # counting begins after the first batch, so that start-up is left out
            self._after_first = counted
            return {}
        wall_s = max(counted.seconds - began.seconds, 1e-9)
        busy = 1 - (counted.learner_s - began.learner_s) / wall_s
        waited = None
        if counted.workers_s is not None and began.workers_s is not None:
            waited = (counted.workers_s - began.workers_s) / wall_s / self.num_workers
        self.load = Load(busy, waited, self.more_frames)
        logged = {
            "load/learner_busy": busy,
            "load/workers_waited": waited,
            "load/dropped_rollouts": counted.dropped,
        }
        return {key: value for key, value in logged.items() if value is not None}

    def _count_receipts(self) -> None:
        # The newest are the last: older ones were counted, and are not looked at again.
        new = list(
            takewhile(lambda r: r.version > self._seen or r.coalesced, reversed(self.sync.receipts))
        )
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
