"""Small trainer hooks: returns, the age of frames, what pushes cost, exploration."""

from __future__ import annotations

import csv
from collections import Counter, deque
from pathlib import Path
from typing import Any

from tensordict import TensorDictBase
from torchrl.modules import EGreedyModule
from torchrl.trainers import Trainer, TrainerHookBase

from rlsync import SyncWeights


class EpisodeReturns(TrainerHookBase):
    """The mean return of the newest finished episodes; stops the trainer when it is high enough.

    Reads ``("next", "reward_sum")`` where ``("next", "done")``; logs ``return`` and ``episodes``.

    Args:
        target: stop when the mean reaches this return; None never stops.
        episodes: the number of newest episodes that make the mean, all of which must be there.
    """

    def __init__(self, target: float | None = None, episodes: int = 20) -> None:
        self.target = target
        self.newest: deque[float] = deque(maxlen=episodes)
        self.finished = 0
        self.reached = False
        self._trainer: Trainer | None = None

    @property
    def mean(self) -> float:
        """The mean return of the newest episodes; not a number before the first one ends."""
        return sum(self.newest) / len(self.newest) if self.newest else float("nan")

    def __call__(self, batch: TensorDictBase | None) -> dict[str, Any] | None:
        if batch is None or self._trainer is None:
            return None
        ended = self.ended(batch)
        self.newest.extend(ended)
        self.finished += len(ended)
        full = len(self.newest) == self.newest.maxlen
        if self.target is not None and full and self.mean >= self.target:
            self.reached = True
            self._trainer.request_stop(f"return {self.mean:.0f} reached {self.target:g}")
        return {"return": self.mean, "episodes": self.finished} if self.newest else None

    def ended(self, batch: TensorDictBase) -> list[float]:
        """The returns of the episodes that ended in this batch."""
        returns: list[float] = batch["next", "reward_sum"][batch["next", "done"]].flatten().tolist()
        return returns

    def register(self, trainer: Trainer, name: str = "episode_returns") -> None:
        """Watch every batch of this trainer."""
        self._trainer = trainer
        trainer.register_op("post_steps_log", self)
        trainer.register_module(name, self)

    def state_dict(self) -> dict[str, Any]:
        """The newest returns and the number of episodes."""
        return {"newest": list(self.newest), "finished": self.finished}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self.newest.clear()
        self.newest.extend(state_dict["newest"])
        self.finished = state_dict["finished"]


class LagHistogram(TrainerHookBase):
    """Counts how many versions old the consumed steps are, and writes the counts down.

    Args:
        sync: the hook that publishes.
        file: a CSV file, ``staleness_versions,steps``; rewritten at each checkpoint and at the end. None
            writes nothing.
    """

    def __init__(self, sync: SyncWeights, file: Path | None = None) -> None:
        self.sync = sync
        self.counts: Counter[int] = Counter()
        self._file = file

    def __call__(self, batch: TensorDictBase) -> TensorDictBase:
        ages, counts = self.sync.staleness(batch).versions.unique(return_counts=True)
        self.counts.update(dict(zip(ages.tolist(), counts.tolist(), strict=True)))
        return batch

    def register(self, trainer: Trainer, name: str = "lag_histogram") -> None:
        """Count before each optimizer step, and write at the end."""
        self.sync.require_stamps("LagHistogram")
        trainer.register_op("process_optim_batch", self)
        trainer.register_op("shutdown", self.write)
        trainer.register_module(name, self)

    def write(self) -> None:
        """Write the counts so far."""
        if self._file is not None:
            with self._file.open("w", newline="") as file:
                csv.writer(file).writerows([("staleness_versions", "steps"), *sorted(self.counts.items())])

    def state_dict(self) -> dict[str, Any]:
        """The counts."""
        self.write()
        return {"counts": dict(self.counts)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self.counts = Counter({int(age): int(count) for age, count in state_dict["counts"].items()})


class SyncMetrics(TrainerHookBase):
    """Logs the version, the lag of the slowest worker and the duration of the newest publish.

    Args:
        sync: the hook whose receipts are read.
    """

    def __init__(self, sync: SyncWeights) -> None:
        self.sync = sync

    def __call__(self, batch: TensorDictBase | None = None) -> dict[str, Any] | None:
        if not self.sync.receipts:
            return None
        return {
            "sync/version": self.sync.version,
            "sync/lag_versions": self.sync.lag_versions(),
            "sync/publish_ms": self.sync.receipts[-1].duration_s * 1e3,
        }

    def register(self, trainer: Trainer, name: str = "sync_metrics") -> None:
        """Log after every batch of this trainer."""
        trainer.register_op("post_steps_log", self)
        trainer.register_module(name, self)

    def state_dict(self) -> dict[str, Any]:
        """Nothing to keep."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing to load."""


class EpsilonDecay(TrainerHookBase):
    """Lets the exploration rate of an EGreedyModule fall with the frames collected.

    DQNTrainer does this itself, but forgets in a checkpoint how far it was.

    Args:
        greedy: the module, which checkpoints carry as ``trainer.greedy_module``.
    """

    def __init__(self, greedy: EGreedyModule) -> None:
        self.greedy = greedy
        self._frames = 0
        self._trainer: Trainer | None = None

    def __call__(self) -> None:
        if self._trainer is not None and self._trainer.collected_frames > self._frames:
            self.greedy.step(self._trainer.collected_frames - self._frames)
            self._frames = self._trainer.collected_frames

    def register(self, trainer: Trainer, name: str = "epsilon_decay") -> None:
        """Step after every batch; register before the hook that publishes the rate."""
        self._trainer = trainer
        trainer.register_op("post_steps", self)
        trainer.register_module(name, self)

    def state_dict(self) -> dict[str, Any]:
        """The number of frames the rate has fallen for."""
        return {"frames": self._frames}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._frames = state_dict["frames"]
