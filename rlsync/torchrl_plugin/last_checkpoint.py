"""The checkpoint of a run that ends before its time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torchrl.trainers import Trainer

from rlsync.core.errors import first_line
from rlsync.tensors.digest import all_finite
from rlsync.torchrl_plugin.collector_state import CollectorState
from rlsync.torchrl_plugin.compat.trainers import optimizers

#: How long workers may take to answer, seconds.
ANSWER_WITHIN_S = 5.0


@dataclass(frozen=True, slots=True)
class LastCheckpoint:
    """What became of the last checkpoint.

    Args:
        path: where it is; None if none was written.
        why_not: why none was written.

    Example:
        >>> print(LastCheckpoint(None, "the weights are not finite"))
        the weights are not finite
    """

    path: Path | None
    why_not: str = ""

    def __str__(self) -> str:
        return str(self.path or self.why_not)


def save_before_the_end(trainer: Trainer) -> LastCheckpoint:
    """Write a trainer's checkpoint once more, because its run is about to end with an error.

    The one before stays if this one cannot be written. Dead, stopped or busy workers cannot hold it up: their
    state is left out. Weights that are not finite are not written.

    Args:
        trainer: whose checkpoint has a place to go.

    Returns:
        Where it is, or why there is none.
    """
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
        return LastCheckpoint(None, f"it could not be written: {type(error).__name__}: {first_line(error)}")
    return LastCheckpoint(Path(trainer.save_trainer_file))


def finite_weights(trainer: Trainer) -> bool:
    """Whether all parameters that the trainer's optimizers hold are finite."""
    groups = [group for optimizer in optimizers(trainer) for group in optimizer.param_groups]
    return all(all_finite(param) for group in groups for param in group["params"])
