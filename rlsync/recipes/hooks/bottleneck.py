"""Who waits for whom: the learner or the workers."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tensordict import TensorDictBase
from torchrl.trainers import Trainer, TrainerHookBase

from rlsync.recipes.hooks.summary import InSummary
from rlsync.transport.ring.reader import RingCounters


@dataclass(frozen=True, slots=True)
class Load:
    """Who waited for whom.

    Args:
        learner_busy: fraction of the time in which the learner was not waiting for unrolls.
        workers_waited: fraction of the workers' time in which they waited for a free slot.

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


class Bottleneck(TrainerHookBase, InSummary):
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
        if self._started is None:  # counting begins after the first batch, so that start-up is left out
            self._started = now
            return {}
        wall_s, learner_s, workers_s = (b - a for a, b in zip(self._started, now, strict=True))
        wall_s = max(wall_s, 1e-9)
        self.load = Load(1 - learner_s / wall_s, workers_s / wall_s / self._num_workers)
        return {
            "load/learner_busy": self.load.learner_busy,
            "load/workers_waited": self.load.workers_waited,
            "load/dropped_rollouts": counted.dropped,
        }

    def summary_line(self) -> str:
        """Who waited for whom, over the whole run."""
        return str(self.load)

    def register(self, trainer: Trainer, name: str = "bottleneck") -> None:
        """Log after every batch."""
        trainer.register_op("post_steps_log", self)
        trainer.register_module(name, self)

    def state_dict(self) -> dict[str, Any]:
        """Nothing to keep: the waiting times are those of this process."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing to load."""
