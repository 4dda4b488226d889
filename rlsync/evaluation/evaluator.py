"""The Trainer hook that runs an evaluating process and logs its results."""

from __future__ import annotations

import logging
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from typing import Any

from tensordict import TensorDictBase
from torchrl.trainers import Trainer, TrainerHookBase

from rlsync.evaluation.process import (
    READER,
    Evaluated,
    EvaluationJob,
    read_evaluations,
    run_evaluator,
)
from rlsync.sync.processes import ending
from rlsync.workers.player import without_memory

__all__ = ["READER", "Evaluated", "EvaluationJob", "Evaluator"]

_log = logging.getLogger(__name__)

_LEAVE_WITHIN_S = 5.0


class Evaluator(TrainerHookBase):
    """Starts a process that evaluates, and logs what it writes: ``eval/version``, ``eval/return``.

    The process keeps a version for a whole evaluation. Meanwhile the learner publishes newer versions, and
    workers adopt them.

    Args:
        job: what the process is told.
        start_method: see :class:`UnrollCollector`.
    """

    def __init__(self, job: EvaluationJob, start_method: str = "forkserver") -> None:
        told = replace(job, player=without_memory(job.player))
        make: Any = get_context(start_method)
        self._file = job.file
        self._seen = self._read = 0
        self._kept: list[Evaluated] = []
        self._process: BaseProcess = make.Process(
            target=run_evaluator, args=(told,), name="rlsync evaluator", daemon=True
        )
        self._process.start()
        self._failed = False

    def register(self, trainer: Trainer, name: str = "evaluator") -> None:
        """Log after every batch; end the process when the trainer shuts down."""
        trainer.register_op("post_steps_log", self)
        trainer.register_op("shutdown", self.close)

    def __call__(self, batch: TensorDictBase | None = None) -> dict[str, Any] | None:
        if not self._failed and self._process.exitcode is not None:
            self._failed = True
            _log.error("the evaluator %s; training goes on without it", ending(self._process.exitcode))
        size = self._file.stat().st_size if self._file.exists() else 0
        if size == self._seen:
            return None
        self._seen = size
        last = self.evaluations()[-1]
        return {"eval/version": last.version, "eval/return": last.return_mean}

    def evaluations(self) -> list[Evaluated]:
        """The evaluations so far, oldest first."""
        size = self._file.stat().st_size if self._file.exists() else 0
        if size != self._read:  # else nothing was written since
            self._read, self._kept = size, read_evaluations(self._file)
        return list(self._kept)

    def close(self) -> None:
        """End the process. A second call does nothing."""
        if self._process.is_alive():
            self._process.terminate()
            self._process.join(_LEAVE_WITHIN_S)
            if self._process.is_alive():
                self._process.kill()
                self._process.join()
