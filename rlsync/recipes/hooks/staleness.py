"""How old the consumed steps were, counted."""

from __future__ import annotations

import csv
from collections import Counter
from pathlib import Path
from typing import Any

from tensordict import TensorDictBase
from torchrl.trainers import Trainer, TrainerHookBase

from rlsync import SyncWeights
from rlsync.torchrl_plugin.hooks.ages import UNKNOWN
from rlsync.torchrl_plugin.hooks.misuse import no_trainer

#: The hook's name in checkpoints. It counts staleness and not lag, but older checkpoints have this name, and
#: TorchRL refuses a checkpoint that lacks a registered name.
CHECKPOINT_KEY = "lag_histogram"


class StalenessHistogram(TrainerHookBase):
    """Counts how many versions old the consumed steps are, logs their mean, and writes the counts to a file.

    After every batch it logs ``sync/staleness_versions``: the mean over the steps that the optimizer has used
    since the batch arrived. Steps of unknown age are left out. The CSV file, ``staleness_versions,steps``, is
    rewritten at each checkpoint and at the end.
    """

    def __init__(self, sync: SyncWeights, file: Path | None = None) -> None:
        self.sync = sync
        self.counts: Counter[int] = Counter()
        self.mean = float("nan")  #: of the newest batch that was learned from
        self._file = file
        self._registered = False
        self._ages: Counter[int] = Counter()

    def __call__(self, batch: TensorDictBase) -> TensorDictBase:
        if not self._registered:  # nobody would write the file
            raise no_trainer(self)
        age = self.sync.staleness(batch).versions
        ages, counts = age[age != UNKNOWN].unique(return_counts=True)
        self._ages.update(dict(zip(ages.tolist(), counts.tolist(), strict=True)))
        return batch

    def report(self, batch: TensorDictBase | None = None) -> dict[str, Any] | None:
        """The mean age of what was consumed since the last call; None if nothing was."""
        if not self._ages:
            return None
        self.mean = sum(age * count for age, count in self._ages.items()) / self._ages.total()
        self._keep()
        return {"sync/staleness_versions": self.mean}

    @property
    def steps_by_age(self) -> Counter[int]:
        """How many consumed steps were how many versions old, so far."""
        return self.counts + self._ages

    def _keep(self) -> None:
        self.counts.update(self._ages)
        self._ages.clear()

    def register(self, trainer: Trainer, name: str = CHECKPOINT_KEY) -> None:
        """Count before each optimizer step, and write at the end.

        ConfigError if ``sync`` is bound to no trainer, or its frames carry no stamps.
        """
        self.sync.require_stamps("StalenessHistogram")
        self._registered = True
        trainer.register_op("process_optim_batch", self)
        trainer.register_op("post_steps_log", self.report)
        trainer.register_op("shutdown", self.write)
        trainer.register_module(name, self)

    def write(self) -> None:
        self._keep()
        if self._file is not None:
            with self._file.open("w", newline="") as file:
                csv.writer(file).writerows([("staleness_versions", "steps"), *sorted(self.counts.items())])

    def state_dict(self) -> dict[str, Any]:
        self.write()
        return {"counts": dict(self.counts)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.counts = Counter({int(age): int(count) for age, count in state_dict["counts"].items()})
