"""A process of its own that evaluates one version after the other, while training goes on."""

from __future__ import annotations

import copy
import csv
import logging
import os
import signal
import time
from dataclasses import asdict, dataclass, fields, replace
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.trainers import Trainer, TrainerHookBase

from rlsync.core.errors import BoardClosed
from rlsync.recipes.evaluate import Episode, NetworkActor, Score, at_once, play
from rlsync.recipes.impala.envs import EnvSpec, make_venv
from rlsync.recipes.impala.models import ImpalaNet
from rlsync.recipes.impala.worker import adopting
from rlsync.torchrl_plugin.waits import ending
from rlsync.transport.board_format import MAX_READERS
from rlsync.transport.board_handle import BoardHandle

_log = logging.getLogger(__name__)

#: The evaluator's line on the board: the last one, which no worker has.
READER = MAX_READERS - 1

_LOOK_EVERY_S = 0.2
_NICE = 10
_LEAVE_WITHIN_S = 5.0


@dataclass(frozen=True, slots=True)
class Evaluated(Score):
    """The score of one version.

    Args:
        version: the one that acted in every step of every episode.
        seconds: how long it took.
    """

    version: int
    seconds: float


@dataclass(frozen=True, slots=True)
class EvaluationJob:
    """What the process is told; small and picklable.

    Args:
        board: where versions come from.
        network: what acts, without its memory.
        env: what it acts in.
        episodes: of one evaluation.
        every_versions: at least so many lie between two evaluations.
        file: CSV, one line an evaluation.
        seed: of environments and actions, of every evaluation.
    """

    board: BoardHandle
    network: ImpalaNet
    env: EnvSpec
    episodes: int
    every_versions: int
    file: Path
    seed: int


def run_evaluator(job: EvaluationJob) -> None:
    """The process: adopt, play, write, until the learner is gone."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(_NICE)
    torch.set_num_threads(1)
    try:
        adopter = adopting(job.board, READER, job.network)
    except BoardClosed:
        return
    envs = make_venv(job.env, at_once(job.episodes))
    evaluated = -job.every_versions
    while not adopter.learner_gone:
        if adopter.newest - evaluated < job.every_versions:
            time.sleep(_LOOK_EVERY_S)
            continue
        evaluated, started = adopter.adopt(), time.monotonic()
        played: list[Episode] = []
        for ended in play(NetworkActor(job.network), envs, job.episodes, job.seed):
            played += ended
            if adopter.learner_gone:
                return
        seconds = round(time.monotonic() - started, 3)
        _write(job.file, Evaluated(**asdict(Score.of(played)), version=evaluated, seconds=seconds))


def _write(file: Path, evaluated: Evaluated) -> None:
    with file.open("a", newline="") as opened:
        writer = csv.writer(opened)
        if not opened.tell():
            writer.writerow([field.name for field in fields(Evaluated)])
        writer.writerow(asdict(evaluated).values())


def _numbers(row: dict[str, str]) -> dict[str, Any]:
    counted = ("episodes", "version")
    return {name: int(text) if name in counted else float(text) for name, text in row.items()}


class Evaluator(TrainerHookBase):
    """Runs the process, and logs what it writes: ``eval/version``, ``eval/return``.

    A version stays pinned while it is evaluated: the learner publishes past it, and workers adopt past it.

    Args:
        job: what it is told.
        start_method: as of :class:`UnrollCollector`.
    """

    def __init__(self, job: EvaluationJob, start_method: str = "forkserver") -> None:
        blank = copy.deepcopy(job.network).to("meta")
        told = replace(job, network=blank)
        make: Any = get_context(start_method)
        self._file = job.file
        self._seen = 0
        self._process: BaseProcess = make.Process(
            target=run_evaluator, args=(told,), name="rlsync evaluator", daemon=True
        )
        self._process.start()
        self._failed = False

    def register(self, trainer: Trainer, name: str = "evaluator") -> None:
        """Log after every batch, and end the process with the trainer."""
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
        """What was found so far, oldest first."""
        if not self._file.exists():
            return []
        with self._file.open(newline="") as opened:
            return [Evaluated(**_numbers(row)) for row in csv.DictReader(opened)]

    def close(self) -> None:
        """End the process; twice is once."""
        if self._process.is_alive():
            self._process.terminate()
            self._process.join(_LEAVE_WITHIN_S)
            if self._process.is_alive():
                self._process.kill()
                self._process.join()
