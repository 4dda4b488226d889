"""Tells of a cluster's nodes, for ``rlsync status``."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tensordict import TensorDictBase
from torchrl.trainers import Trainer, TrainerHookBase

from rlsync.workers.cluster.told import ClusterStatus

#: How often the file is written.
TELL_EVERY_S = 2.0


class TellNodes(TrainerHookBase):
    """Writes what is known of the nodes of a cluster into a file, every few seconds.

    Args:
        status: asks the collector.
        file: where it is written.
    """

    def __init__(self, status: Callable[[], ClusterStatus], file: Path) -> None:
        self._status = status
        self._file = file
        self._next_s = 0.0

    def __call__(self, batch: TensorDictBase | None = None) -> None:
        if time.monotonic() >= self._next_s:
            self._status().write(self._file)
            self._next_s = time.monotonic() + TELL_EVERY_S

    def register(self, trainer: Trainer, name: str = "tell_nodes") -> None:
        """Tell after a batch, if the last time is long ago."""
        self()
        trainer.register_op("post_steps_log", self)

    def state_dict(self) -> dict[str, Any]:
        """Nothing to keep: a resumed run has other nodes."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing to load."""
