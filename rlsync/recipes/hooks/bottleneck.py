"""Who waits for whom: the learner or the workers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from tensordict import TensorDictBase
from torchrl.trainers import Trainer, TrainerHookBase


class InSummary(ABC):
    """A registered hook with one more line for the end of ``rlsync train``.

    Example:
        >>> class Patience(InSummary):
        ...     def summary_line(self) -> str:
        ...         return "learning rate halved 3 times"
        >>> Patience().summary_line()
        'learning rate halved 3 times'
    """

    @abstractmethod
    def summary_line(self) -> str:
        """The line, without a line break; called once, after the last frame."""


class Waits(NamedTuple):
    """How long each side has waited for the other, in seconds, and for how long that was counted."""

    seconds: float  # since counting began
    learner_s: float  # the learner for frames
    workers_s: float | None = None  # all workers together for the learner; None: the collector cannot tell
    dropped: int | None = None  # rollouts, because no worker may wait; None where none can be


@dataclass(frozen=True, slots=True)
class Load:
    """Who waited for whom.

    Example:
        >>> print(Load(learner_busy=0.97, workers_waited=0.41))
        learner busy 97 %, workers waited 41 %: the learner is the bottleneck
        >>> print(Load(learner_busy=0.4))
        learner busy 40 %: the workers are the bottleneck
    """

    learner_busy: float  # fraction of the time in which the learner was not waiting for frames
    workers_waited: float | None = None  # of the workers' time; None where the collector cannot tell

    def __str__(self) -> str:
        idle, waited = 1 - self.learner_busy, self.workers_waited
        told = f"learner busy {self.learner_busy:.0%}"
        if waited is None:
            who = "the workers are the bottleneck" if idle >= 0.1 else "the learner is the bottleneck"
        else:
            told += f", workers waited {waited:.0%}"
            who = "the learner is the bottleneck" if waited > idle else "the workers are the bottleneck"
            if max(idle, waited) < 0.1:
                who = "neither waits for the other"
        return f"{told}: {who}".replace("%", " %")


class Bottleneck(TrainerHookBase, InSummary):
    """Logs who waits for whom, and says at the end who was the bottleneck.

    With ``turns`` workers collect only while the learner waits for them, so they wait while it is busy.
    """

    def __init__(self, waits: Callable[[], Waits], num_workers: int, *, turns: bool = False) -> None:
        self._waits = waits
        self._num_workers = num_workers
        self._turns = turns
        self._started: Waits | None = None
        self.load = Load(0.0)

    def __call__(self, batch: TensorDictBase | None = None) -> dict[str, Any]:
        counted = self._waits()
        if self._started is None:  # counting begins after the first batch, so that start-up is left out
            self._started = counted
            return {}
        began = self._started
        wall_s = max(counted.seconds - began.seconds, 1e-9)
        busy = 1 - (counted.learner_s - began.learner_s) / wall_s
        self.load = Load(busy, busy if self._turns else None)
        if counted.workers_s is not None and began.workers_s is not None:
            waited_s = counted.workers_s - began.workers_s
            self.load = replace(self.load, workers_waited=waited_s / wall_s / self._num_workers)
        told = {
            "load/learner_busy": self.load.learner_busy,
            "load/workers_waited": self.load.workers_waited,
            "load/dropped_rollouts": counted.dropped,
        }
        return {key: value for key, value in told.items() if value is not None}

    def summary_line(self) -> str:
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
