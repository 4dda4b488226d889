"""The Trainer hook that runs an evaluating process, logs its results, and ends a run by them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from multiprocessing import Pipe
from typing import Any

from tensordict import TensorDictBase
from torchrl.collectors import BaseCollector
from torchrl.trainers import Trainer, TrainerHookBase

from rlsync.evaluation.process import Evaluated, EvaluationJob, read_evaluations, run_evaluator
from rlsync.sync.families import end_group, start_process
from rlsync.sync.processes import ending
from rlsync.torchrl_plugin.collectors.board import BoardEndpoint
from rlsync.torchrl_plugin.collectors.choose import endpoint_of
from rlsync.torchrl_plugin.compat import trainers
from rlsync.transport.board.reader import BoardHandle
from rlsync.workers.player import without_memory
from rlsync.workers.rollout_collector import RolloutCollector

_log = logging.getLogger(__name__)

_LEAVE_WITHIN_S = 5.0
_LAST_WITHIN_S = 300.0


class Evaluator(TrainerHookBase):
    """Starts a process that evaluates one version at a time; logs ``eval/version`` and ``eval/return``."""

    def __init__(self, job: EvaluationJob, start_method: str = "forkserver") -> None:
        blank = replace(job, player=without_memory(job.player))
        self._file = job.file
        self._read_bytes = self._logged = 0
        self._evaluations: list[Evaluated] = []
        #: Called, with the reason, when a version's mean greedy return reaches the target, if any.
        self.stop: Callable[[str], object] = lambda why: None
        self.target: float | None = None
        self.evaluations()  # an unreadable file is refused before anything runs
        hears, self._last = Pipe(duplex=False)
        self._process = start_process(start_method, run_evaluator, (blank, hears), "rlsync evaluator")
        self._failed = False

    def register(self, trainer: Trainer, name: str = "evaluator") -> None:
        trainer.register_op("post_steps_log", self)
        trainer.register_op("shutdown", partial(self._end, trainer))

    def __call__(self, batch: TensorDictBase | None = None) -> dict[str, Any] | None:
        if not self._failed and self._process.exitcode is not None:
            self._failed = True
            end_group(self._process)
            _log.error("the evaluator %s; training goes on without it", ending(self._process.exitcode))
        evaluations = self.evaluations()
        new, self._logged = evaluations[self._logged :], len(evaluations)
        if not new:
            return None
        for result in new:
            if self.target is not None and result.return_mean >= self.target:
                reached = f"greedy return {result.return_mean:.0f} of version {result.version}"
                self.stop(f"{reached} reached {self.target:g}")
        return {"eval/version": new[-1].version, "eval/return": new[-1].return_mean}

    def evaluations(self) -> list[Evaluated]:
        """Oldest first."""
        size = self._file.stat().st_size if self._file.exists() else 0
        if size != self._read_bytes:  # else nothing was written since
            self._read_bytes, self._evaluations = size, read_evaluations(self._file)
        return list(self._evaluations)

    def _end(self, trainer: Trainer) -> None:
        """End the process; where all frames were collected, after it has evaluated the last version."""
        until = time.monotonic() + _LAST_WITHIN_S * (trainer.collected_frames >= trainer.total_frames)
        if self._process.is_alive():
            self._last.send(None)
        while self._process.is_alive() and time.monotonic() < until and not trainers.asked_to_stop(trainer):
            self._process.join(0.1)
        self.close()

    def close(self) -> None:
        """End the process. A second call does nothing."""
        if self._process.is_alive():
            self._process.terminate()
            self._process.join(_LEAVE_WITHIN_S)
            end_group(self._process)
            self._process.join()


def board_of(collector: BaseCollector) -> BoardHandle | None:
    """A board of this machine with every version that a collector's workers get; None if there is none."""
    if isinstance(collector, RolloutCollector):
        return collector.board_here()
    endpoint = endpoint_of(collector)
    handle: Any = endpoint.publisher.transport.handle if isinstance(endpoint, BoardEndpoint) else None
    return handle if isinstance(handle, BoardHandle) else None
