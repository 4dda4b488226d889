"""The process that evaluates one version after the other, while training goes on. Loads no torchrl."""

from __future__ import annotations

import csv
import math
import os
import signal
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from rlsync.core.errors import BoardClosed
from rlsync.core.plan import POLICY
from rlsync.evaluation.best import Best, best_in, rank
from rlsync.evaluation.films import EvaluationFilms, Filming
from rlsync.evaluation.play import Episode, Score, at_once, play
from rlsync.sync.adopter import Adopt
from rlsync.transport.board.format import MAX_READERS
from rlsync.transport.board.handle import BoardHandle
from rlsync.workers.devices import CPU
from rlsync.workers.envs.specs import EnvSpec, make_venv
from rlsync.workers.player import Player, check_fits
from rlsync.workers.worker import adopting, prepare_process

#: The evaluator's line on the board: the last one, which no worker has.
READER = MAX_READERS - 1

_LOOK_EVERY_S = 0.2
_NICE = 10


@dataclass(frozen=True, slots=True)
class Evaluated(Score):
    """The score of one version.

    Args:
        version: the one that acted in every step of every episode.
        seconds: how long the evaluation took.
    """

    version: int
    seconds: float


@dataclass(frozen=True, slots=True)
class EvaluationJob:
    """What the process is told; small and picklable.

    Args:
        board: where versions come from.
        player: what acts.
        env: what it acts in.
        episodes: how many make one evaluation.
        every_versions: at least so many versions lie between two evaluations.
        file: a CSV file; each evaluation adds a line.
        seed: of environments and actions, the same for every evaluation.
        adopt: whether parameters are pointed at the board, or copied out of it.
        device: where the player acts.
        best: a file in which the best version is kept, by :func:`~rlsync.evaluation.best.rank`; of two equal
            ones the older stays. None keeps none.
        kept: the names of the leaves that are kept, destination first, begin with this, which is taken off.
        filming: which evaluations are filmed; None films none.
    """

    board: BoardHandle
    player: Player
    env: EnvSpec
    episodes: int
    every_versions: int
    file: Path
    seed: int
    adopt: Adopt = "alias"
    device: torch.device = CPU
    best: Path | None = None
    kept: str = f"{POLICY}."
    filming: Filming | None = None


def run_evaluator(job: EvaluationJob) -> None:
    """What the process runs: adopt, play, write, until the learner is gone.

    Args:
        job: what to do; its player is without memory.
    """
    prepare_process()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # the learner ends this process with it
    os.nice(_NICE)
    try:
        adopter = adopting(job.board, READER, job.player, job.adopt, job.device)
    except BoardClosed:
        return
    envs = make_venv(job.env, at_once(job.episodes))
    check_fits(job.player, envs, str(job.env))
    evaluated, keep = -job.every_versions, _KeepBest(job)
    films = None
    if job.filming is not None:
        films = EvaluationFilms(job.filming, job.player, job.env, job.seed, job.device)
    while not adopter.learner_gone:
        if adopter.newest - evaluated < job.every_versions:
            time.sleep(_LOOK_EVERY_S)
            continue
        evaluated, started = adopter.adopt(), time.monotonic()
        played: list[Episode] = []
        for ended in play(job.player, envs, job.episodes, job.seed, job.device):
            played += ended
            if adopter.learner_gone:
                return
        seconds = round(time.monotonic() - started, 3)
        found = Evaluated(**asdict(Score.of(played)), version=evaluated, seconds=seconds)
        best = keep.look(found)  # before the learner sees the result, which may end the run
        _write(job.file, found)
        if films is not None:
            films.evaluated(evaluated, best=best)


class _KeepBest:
    """Keeps the best version of a run, those before a resume in the same folder included."""

    def __init__(self, job: EvaluationJob) -> None:
        self._job = job
        before = None if job.best is None else best_in(job.best)
        self._rank = -math.inf if before is None else before.rank

    def look(self, found: Evaluated) -> bool:
        """Keep the version that acts now if its score is better than any before; whether it is."""
        if self._job.best is None or rank(found) <= self._rank:
            return False
        self._rank, prefix = rank(found), self._job.kept
        held = {
            f"{destination}.{name}": tensor
            for destination, module in self._job.player.modules.items()
            for name, tensor in module.state_dict().items()
        }
        weights = {
            name.removeprefix(prefix): tensor.detach().to("cpu", copy=True)
            for name, tensor in held.items()
            if name.startswith(prefix)
        }
        Best(found.version, found.return_mean, self._rank, weights).write(self._job.best)
        return True


def _write(file: Path, evaluated: Evaluated) -> None:
    with file.open("a", newline="") as opened:
        writer = csv.writer(opened)
        if not opened.tell():
            writer.writerow([field.name for field in fields(Evaluated)])
        writer.writerow(asdict(evaluated).values())


def read_evaluations(file: Path) -> list[Evaluated]:
    """The evaluations that the process has written so far, oldest first.

    Args:
        file: :attr:`EvaluationJob.file`; it need not exist yet.
    """
    if not file.exists():
        return []
    with file.open(newline="") as opened:
        return [Evaluated(**_numbers(row)) for row in csv.DictReader(opened)]


def _numbers(row: dict[str, str]) -> dict[str, Any]:
    counted = ("episodes", "version")
    return {name: int(text) if name in counted else float(text) for name, text in row.items()}
