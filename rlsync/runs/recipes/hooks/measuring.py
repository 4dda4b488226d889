"""Hooks that measure a run: who waits for whom, how old the frames are, and all of it in numbers."""

from __future__ import annotations

import csv
import math
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, compress, count, repeat, takewhile
from operator import ne
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
from rlsync.seams import STAMP, TellsAtOnce, ages, around_arrivals, misuse, trainers


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
        shares = f"learner busy {self.learner_busy:.0%}"
        if waited is None:
            if idle >= 0.1:
                who = "the workers are the bottleneck"
            else:
                who = "the learner is the bottleneck"
        else:
            shares += f", workers waited {waited:.0%}"
            if waited > idle:
                who = "the learner is the bottleneck"
            else:
                who = "the workers are the bottleneck"
            if max(idle, waited) < 0.1:
                who = "neither waits for the other"
        if who.startswith("the workers") and self.more_frames is not None:
            who += f", try {self.more_frames}"
        return f"{shares}: {who}".replace("%", " %")


#: The hook's name in checkpoints. It counts staleness and not lag, but older checkpoints have this name, and
#: TorchRL refuses a checkpoint that lacks a registered name.
CHECKPOINT_KEY = "lag_histogram"


class StalenessHistogram(misuse.RegistersItself, trainers.Reader):
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

    def report(self, batch: TensorDictBase | None = None) -> dict[str, float] | None:
        """The mean age of what was consumed since the last call; None if nothing was."""
        consumed = self._consumed
        self._consumed = {}
        steps: Counter[int] = Counter()
        for newest, stamps in consumed.items():
            flat = torch.cat(list(map(torch.flatten, stamps)))
            steps += ages.counts_by_age(flat, self.sync.ledger, newest)
        if not steps:
            return None
        self.counts.update(steps)
        return {"sync/staleness_versions": _mean_age(steps)}

    def register(self, trainer: Trainer, name: str = CHECKPOINT_KEY) -> None:
        """Count before each optimizer step, and write at the end; ConfigError without stamps."""
        misuse.require_stamps(self.sync, "StalenessHistogram")
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

    def state_dict(self) -> dict[str, dict[int, int]]:
        self.write()
        return {"counts": dict(self.counts)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.counts = Counter({int(age): int(count) for age, count in state_dict["counts"].items()})


_NEWEST = 1000  #: publishes from which the percentiles are taken: the newest

_WRITE_EVERY_S = 1.0  #: seconds between two writes of the file


@dataclass(eq=False)
class StatisticsHook(misuse.RegistersItself, InSummary):
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
        self._adopted: list[int] = []  # by each worker, when the last batch arrived
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
        if self._trainer is None or not isinstance(self._trainer.collector, RolloutCollector):
            return so_far
        lost = self._trainer.collector.lost()
        return so_far._replace(workers_s=lost.worker_wait_s, dropped=lost.dropped)

    def now(self) -> RunStatistics:
        counted = self.sync.counters()
        began = self._first
        waits = self._waits()
        since = max(waits.seconds, 1e-9)
        # Before the first frame, publish or consumed step there is no ratio, percentile or mean.
        updates_per_frame = None
        if counted.frames:
            updates_per_frame = counted.optim_steps / counted.frames
        staleness = None
        if self.staleness.counts:
            staleness = _mean_age(self.staleness.counts)
        measured = self._publish_ms, self._to_frames_ms, self._adoption_ms
        publish, to_frames, adoption = map(_percentiles, measured)

        numbers = RunStatistics(
            frames=counted.frames,
            updates=counted.optim_steps,
            updates_per_frame=updates_per_frame,
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
            staleness_versions=staleness,
            learner_wait_s=waits.learner_s,
            workers_wait_s=waits.workers_s,
            dropped_rollouts=waits.dropped,
            outputs_held_version=None,
            outputs_held_time_s=None,
            outputs_open=None,
            total_frames=None,
            run_id=self.sync.ledger.run_id,
            return_mean=None,
            frames_by_worker={str(worker): self._made[worker] for worker in sorted(self._made)},
            evaluations_ended=None,
        )
        return self._with_checks(self._with_trainers(numbers))

    def _with_checks(self, numbers: RunStatistics) -> RunStatistics:
        """With what comparisons of outputs have shown, if there are any."""
        if self.verify is None:
            return numbers
        return replace(
            numbers,
            outputs_held_version=self.verify.behaviour_held,
            outputs_held_time_s=self.verify.behaviour_held_time_s,
            outputs_open="; ".join(self.verify.untold) or None,
        )

    def _with_trainers(self, numbers: RunStatistics) -> RunStatistics:
        """With what the trainer and its other hooks know."""
        trainer = self._trainer
        if trainer is None:
            return numbers
        return_mean = None
        for hook in trainers.registered_modules(trainer):
            if return_mean is None and isinstance(hook, EpisodeReturns) and hook.newest:
                return_mean = hook.mean
        return replace(
            numbers,
            total_frames=trainer.total_frames,
            return_mean=return_mean,
            evaluations_ended=evaluations_ended(trainer),
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
        self._lag_versions = self.sync.lag_versions()
        self._count_receipts()
        self._look_at_adoptions()
        age = self.sync.staleness(batch).versions
        known = age[age != ages.UNKNOWN]
        if known.numel():
            newest = self.sync.version - int(known.min())
            while self._awaited and self._awaited[0].version <= newest:
                self._to_frames_ms.append((time.time() - self._awaited.popleft().time_s) * 1e3)
        return batch

    def _count_makers(self, collector: BaseCollector, batch: TensorDictBase) -> None:
        if isinstance(collector, MultiAsyncCollector):
            return  # counted as they arrive
        makers: Sequence[int]
        if isinstance(collector, RolloutCollector):
            makers = collector.last_workers
            frames = collector.frames_per_batch  # an element of a batch is a whole rollout
        else:
            makers = range(self.num_workers)
            frames = batch.numel()
        for worker in makers:
            self._made[worker] += frames // len(makers)

    def _look_at_adoptions(self) -> None:
        """Note how long after its publish each worker began a rollout with a version that is new to it."""
        transport = self.sync.bound.endpoint.publisher.transport
        if not isinstance(transport, TellsAtOnce):
            return
        before = self._adopted
        self._adopted = transport.adopted(self.sync.bound.endpoint.num_workers)
        if self._adopted == before:
            return
        now_s = time.time()
        has_adopted = map(ne, self._adopted, chain(before, repeat(0)))
        for worker in compress(count(), has_adopted):
            published_s = self._published_s.get(self._adopted[worker])
            if published_s is not None:
                began_s = now_s - transport.age_s(worker)
                self._adoption_ms.append(max(0.0, began_s - published_s) * 1e3)

    def _done(self, batch: TensorDictBase | None = None) -> dict[str, float]:
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
        counted = self._seen
        new = list(
            takewhile(lambda r: r.version > counted or r.coalesced, reversed(self.sync.receipts))
        )
        for receipt in reversed(new):
            if receipt.coalesced or receipt.version <= counted:
                continue
            self._seen = receipt.version
            self._published_bytes += receipt.copied_bytes
            self._publish_ms.append(receipt.duration_s * 1e3)
            self._published_s[receipt.version] = receipt.time_s
            self._awaited.append(receipt)
        while len(self._published_s) > _NEWEST:
            del self._published_s[next(iter(self._published_s))]


def _mean_age(steps: Counter[int]) -> float:
    """The mean of ages of which it is counted how many steps have each."""
    return sum(age * count for age, count in steps.items()) / steps.total()


def _percentiles(values: deque[float]) -> tuple[float | None, float | None]:
    """The median and the 95th percentile; nothing of fewer than two values."""
    if len(values) < 2:
        return None, None
    cut = quantiles(values, n=20, method="inclusive")
    return cut[9], cut[18]
