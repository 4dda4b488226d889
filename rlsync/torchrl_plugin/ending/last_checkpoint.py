"""The last checkpoint of a run, and the state of a collector whose workers may be dead, stopped or busy."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchrl.collectors import BaseCollector
from torchrl.trainers import Trainer

from rlsync.core.errors import first_line
from rlsync.sync.processes import tried
from rlsync.tensors.digest import all_finite
from rlsync.torchrl_plugin.compat import collectors, trainers

ANSWER_WITHIN_S = 5.0  #: how long workers may take to answer, seconds


@dataclass(frozen=True, slots=True)
class LastCheckpoint:
    """Where the last checkpoint is, or why none was written."""

    path: Path | None
    why_not: str = ""

    def __str__(self) -> str:
        return str(self.path or self.why_not)


def save_before_the_end(trainer: Trainer) -> LastCheckpoint:
    """Write the checkpoint once more, if weights are finite; workers that do not answer are left out."""
    if trainer.save_trainer_file is None:
        return LastCheckpoint(None, "the run has no folder")
    if not trainer.collected_frames:
        return LastCheckpoint(None, "no batch had arrived, so there is nothing to go on from")
    if not finite_weights(trainer):
        return LastCheckpoint(None, "the weights are not finite")
    collector = CollectorState.of(trainer)
    if collector is not None:
        collector.answer_within_s = ANSWER_WITHIN_S
    try:
        trainer.save_trainer(force_save=True)
    except Exception as error:  # noqa: BLE001  # another error is on its way, which must not be lost
        return LastCheckpoint(
            None, f"it could not be written: {type(error).__name__}: {first_line(error)}"
        )
    return LastCheckpoint(Path(trainer.save_trainer_file))


def finite_weights(trainer: Trainer) -> bool:
    """Whether all parameters that the trainer's optimizers hold are finite."""
    for optimizer in trainers.optimizers(trainer):
        for group in optimizer.param_groups:
            if not all(map(all_finite, group["params"])):
                return False
    return True


COMPONENT = "collector"  #: the collector's name in TorchRL's checkpoints

_WITHOUT_WORKERS = "without_workers"  #: says that the workers were not asked, or did not answer


class CollectorState:
    """A collector's state in checkpoints; that of workers is left out if they do not answer."""

    def __init__(self, collector: BaseCollector) -> None:
        self._collector = collector
        #: how long workers may take; None: as long as they need
        self.answer_within_s: float | None = None

    @classmethod
    def of(cls, trainer: Trainer) -> CollectorState | None:
        """The one in a trainer's checkpoints. None for a trainer that has no ``Checkpoint``."""
        checkpoint = trainer.checkpoint
        if checkpoint is None:
            return None
        component = checkpoint.components.get(COMPONENT)
        if not isinstance(component, cls):
            component = cls(trainer.collector)
            trainers.replace_component(checkpoint, COMPONENT, component)
        return component

    def state_dict(self) -> Mapping[str, Any]:
        """The collector's own state; or a note that it was left out."""
        if self.answer_within_s is None:
            return self._collector.state_dict()
        # TorchRL's questions have no deadline, and it ends when its workers do.
        asked = tried(self._collector.state_dict, self.answer_within_s, "rlsync-collector-state")
        # else it is closed, or a worker is dead
        answered = asked.done() and asked.exception() is None
        if answered and asked.result():
            return asked.result()
        return OrderedDict([(_WITHOUT_WORKERS, True)])

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        if _WITHOUT_WORKERS not in state_dict and self._is_of_as_many(state_dict):
            self._collector.load_state_dict(state_dict)

    def _is_of_as_many(self, state_dict: Mapping[str, Any]) -> bool:
        if not isinstance(self._collector, collectors.MultiCollector):
            return True
        wrote = {key for key in state_dict if key.startswith("worker")}
        return wrote == {f"worker{number}" for number in range(self._collector.num_workers)}
