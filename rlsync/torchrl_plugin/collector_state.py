"""What a checkpoint keeps of a collector whose workers may be dead, stopped, or busy for a long time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

from torchrl.collectors import BaseCollector
from torchrl.trainers import Trainer

from rlsync.torchrl_plugin.compat import collectors, trainers

#: The collector's name in TorchRL's checkpoints.
COMPONENT = "collector"

#: Says that the workers were not asked, or did not answer.
_WITHOUT_WORKERS = "without_workers"


class CollectorState:
    """A collector's state in checkpoints. Where workers cannot answer, it is written without theirs.

    Workers keep the state of their environments' transforms, such as running means. It is left out if the
    collector is closed, or if workers have not answered within a deadline. It is not loaded into another
    number of workers than wrote it. Weights and versions do not depend on it.

    Args:
        collector: the trainer's collector.
    """

    def __init__(self, collector: BaseCollector) -> None:
        self._collector = collector
        self.answer_within_s: float | None = None  #: how long workers may take; None: as long as they need

    @classmethod
    def of(cls, trainer: Trainer) -> CollectorState | None:
        """The one in a trainer's checkpoints. None for a trainer that has no ``Checkpoint``."""
        checkpoint = trainer.checkpoint
        if checkpoint is None:
            return None
        held = checkpoint.components.get(COMPONENT)
        if not isinstance(held, cls):
            held = cls(trainer.collector)
            trainers.replace_component(checkpoint, COMPONENT, held)
        return held

    def state_dict(self) -> Mapping[str, Any]:
        """The collector's own state; or a note that it was left out."""
        if self.answer_within_s is None:
            return self._collector.state_dict()
        return self._asked(self.answer_within_s) or OrderedDict([(_WITHOUT_WORKERS, True)])

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`, for as many workers as there were."""
        if _WITHOUT_WORKERS not in state_dict and self._is_of_as_many(state_dict):
            self._collector.load_state_dict(state_dict)

    def _is_of_as_many(self, state_dict: Mapping[str, Any]) -> bool:
        if not isinstance(self._collector, collectors.MultiCollector):
            return True
        wrote = {key for key in state_dict if key.startswith("worker")}
        return wrote == {f"worker{number}" for number in range(self._collector.num_workers)}

    def _asked(self, timeout_s: float) -> Mapping[str, Any] | None:
        """Ask in a thread: TorchRL's questions have no deadline, and it ends when its workers do."""
        answers: SimpleQueue[Mapping[str, Any] | None] = SimpleQueue()

        def ask() -> None:
            try:
                answers.put(self._collector.state_dict())
            except Exception:  # noqa: BLE001  # closed, a dead worker: whatever it is, there is no state
                answers.put(None)

        Thread(target=ask, name="rlsync-collector-state", daemon=True).start()
        try:
            return answers.get(timeout=timeout_s)
        except Empty:
            return None
