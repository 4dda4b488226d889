"""Trainer hooks of the actor-learner: episodes, replayed unrolls, the bottleneck."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tensordict import TensorDict, TensorDictBase
from torchrl.trainers import Trainer, TrainerHookBase

from rlsync.recipes.hooks import EpisodeReturns
from rlsync.recipes.impala import batch as keys
from rlsync.recipes.impala.replay_mix import ReplayMix
from rlsync.recipes.impala.unrolls import COLLECTOR, EPISODE_RETURN
from rlsync.transport.rollout_ring import RingCounters


class UnrollReturns(EpisodeReturns):
    """The mean return of the newest finished episodes of unrolls."""

    def ended(self, batch: TensorDictBase) -> list[float]:
        """The returns of the episodes that ended in this batch."""
        over = batch.get(keys.TERMINATED) | batch.get(keys.TRUNCATED)
        returns: list[float] = batch.get((COLLECTOR, EPISODE_RETURN))[over].tolist()
        return returns


class MixReplayed(TrainerHookBase):
    """Adds replayed unrolls to what an optimizer step is about to use.

    Args:
        mix: what adds them.
        keep_contents: whether checkpoints carry the unrolls; else a resumed run begins with an empty replay.
    """

    def __init__(self, mix: ReplayMix, *, keep_contents: bool = False) -> None:
        self.mix = mix
        self.keep_contents = keep_contents

    def __call__(self, batch: TensorDictBase) -> TensorDictBase:
        return self.mix(batch.exclude(COLLECTOR))

    def register(self, trainer: Trainer, name: str = "replay") -> None:
        """Mix before each optimizer step; register after hooks that look at online unrolls alone."""
        trainer.register_op("process_optim_batch", self)
        trainer.register_op("post_steps_log", self._report)
        trainer.register_module(name, self)

    def _report(self, batch: TensorDictBase | None = None) -> dict[str, Any]:
        return {"replay/steps": self.mix.replay.steps, "replay/replayed_unrolls": self.mix.total.replayed}

    def state_dict(self) -> dict[str, Any]:
        """Where the ratio and the draws stand, and the unrolls if they are to be kept."""
        return {"mix": self.mix.state_dict(), "replay": self.mix.replay.state_dict(self.keep_contents)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self.mix.load_state_dict(state_dict["mix"])
        replay = dict(state_dict["replay"])
        if "contents" in replay:  # checkpoints give tensordicts back as mappings
            replay["contents"] = TensorDict(dict(replay["contents"]))
        self.mix.replay.load_state_dict(replay)


@dataclass(frozen=True, slots=True)
class Load:
    """Who waited for whom.

    Args:
        learner_busy: part of the time in which the learner was not waiting for unrolls.
        workers_waited: part of the workers' time in which they waited for a free slot.

    Example:
        >>> print(Load(learner_busy=0.97, workers_waited=0.41))
        learner busy 97 %, workers waited 41 %: the learner is the bottleneck
    """

    learner_busy: float
    workers_waited: float

    def __str__(self) -> str:
        idle, waited = 1 - self.learner_busy, self.workers_waited
        if max(idle, waited) < 0.1:
            who = "neither waits for the other"
        else:
            who = "the learner is the bottleneck" if waited > idle else "the workers are the bottleneck"
        return f"learner busy {self.learner_busy:.0%}, workers waited {waited:.0%}: {who}".replace("%", " %")


class Bottleneck(TrainerHookBase):
    """Logs who waits for whom, from the counters of the rollout ring.

    Args:
        counters: of the ring.
        num_workers: how many workers there are.
    """

    def __init__(self, counters: Callable[[], RingCounters], num_workers: int) -> None:
        self._counters = counters
        self._num_workers = num_workers
        self._started: tuple[float, float, float] | None = None
        self.load = Load(0.0, 0.0)

    def __call__(self, batch: TensorDictBase | None = None) -> dict[str, Any]:
        counted = self._counters()
        now = time.monotonic(), counted.learner_wait_s, counted.worker_wait_s
        if self._started is None:  # after the first batch: not what it took to start
            self._started = now
            return {}
        wall_s, learner_s, workers_s = (b - a for a, b in zip(self._started, now, strict=True))
        wall_s = max(wall_s, 1e-9)
        self.load = Load(1 - learner_s / wall_s, workers_s / wall_s / self._num_workers)
        return {"load/learner_busy": self.load.learner_busy, "load/workers_waited": self.load.workers_waited}

    def register(self, trainer: Trainer, name: str = "bottleneck") -> None:
        """Log after every batch."""
        trainer.register_op("post_steps_log", self)
        trainer.register_module(name, self)

    def state_dict(self) -> dict[str, Any]:
        """Nothing to keep: it is about this process."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing to load."""
