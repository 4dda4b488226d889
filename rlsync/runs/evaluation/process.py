"""The process that evaluates the versions it is asked for, while training goes on. Loads no torchrl."""

from __future__ import annotations

import csv
import hashlib
import logging
import math
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from io import BytesIO
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlsync import BoardClosed, ConfigError, RlsyncError
from rlsync.runs.actors.devices import CPU
from rlsync.runs.actors.envs.specs import EnvSpec, make_venv
from rlsync.runs.actors.envs.vectors import Envs
from rlsync.runs.actors.player import Player, check_fits
from rlsync.runs.actors.worker import adopting, prepare_process
from rlsync.runs.evaluation.play import (
    PATIENCE,
    Episode,
    Filmed,
    Patience,
    Score,
    at_once,
    film,
    filmed,
    play,
)
from rlsync.seams import (
    EVALUATOR,
    POLICY,
    Adopt,
    BoardHandle,
    BoardReader,
    first_line,
    machine,
    whole_file,
)

_log = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.2
_NICE = 10


@dataclass(frozen=True, slots=True)
class Asked:
    """A version to evaluate, and where the learner stood with it."""

    version: int
    frames: int  # collected until then
    optim_steps: int  # -1: nobody counted them


@dataclass(frozen=True, slots=True)
class Evaluated(Score):
    """The score of the version that acted in every step of every episode, and how long that took."""

    version: int
    seconds: float
    run_id: str = ""
    frames: int = 0  # as in Asked; 0 also where an earlier rlsync has not written it
    optim_steps: int = -1


@dataclass(frozen=True, slots=True)
class Filming:
    """Which evaluations are filmed, and where their films go."""

    folder: Path
    every: int  # evaluations; the first one is filmed
    best: Path | None = None  # shows the best version, at whichever evaluation; None: none


@dataclass(frozen=True, slots=True)
class EvaluationJob:
    """What the process is told; small and picklable, for its player is without memory."""

    board: BoardHandle
    player: Player
    env: EnvSpec
    episodes: int
    file: Path  # a CSV file, to which each evaluation adds a line
    seed: int  # of environments and actions, the same for every evaluation
    adopt: Adopt = "alias"
    device: torch.device = CPU
    # where the version of the highest rank is kept; of equal ones the oldest
    best: Path | None = None
    # the leaves that are kept begin with this, destination first; it is taken off
    kept: str = f"{POLICY}."
    filming: Filming | None = None
    run_id: str = ""  # of the version numbers, see rlsync.core.ledger.Ledger
    patience: Patience = PATIENCE


@dataclass(frozen=True, slots=True)
class Words:
    """What the process tells the learner: that it can play, has evaluated, is done, or its error."""

    what: str
    where: str = ""
    cure: str = ""


#: The first step was made; an evaluation was written; and, after the last one, the process ends.
PLAYS = Words("it plays")
WRITTEN = Words("it has written an evaluation")
DONE = Words("it is done")


@dataclass(frozen=True, slots=True)
class Best:
    """The version with the highest :attr:`Score.rank` so far, and its weights as a state dict."""

    version: int
    return_mean: float
    rank: float
    weights: dict[str, Tensor]
    run_id: str = ""

    def digest(self) -> str:
        """Of all that it holds; beside it in the file."""
        head = repr((self.version, self.return_mean, self.rank, self.run_id))
        return digest_of_weights(self.weights, head)

    def write(self, file: Path) -> None:
        record = {
            "version": self.version,
            "return_mean": self.return_mean,
            "rank": self.rank,
            "weights": self.weights,
            "run_id": self.run_id,
            "digest": self.digest(),
        }
        content = BytesIO()  # of a file, torch does not tell what the machine refused
        torch.save(record, content)
        whole_file.write_whole(file, lambda beside: beside.write_bytes(content.getbuffer()))


def digest_of_weights(weights: dict[str, Tensor], head: str = "") -> str:
    """BLAKE2b of names, dtypes, shapes and bytes, in order, after a ``head``: 40 hexadecimal digits."""
    digest = hashlib.blake2b(head.encode(), digest_size=20)
    for name, tensor in weights.items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def best_in(file: Path, *, trusted: bool = False) -> Best | None:
    """What was kept, if anything; ConfigError: damaged, or an older one without a digest, not ``trusted``."""
    if not file.exists():
        return None
    try:
        record = torch.load(BytesIO(file.read_bytes()), map_location="cpu", weights_only=True)
        written = record.pop("digest", None)
        best = Best(**record)
        if not (isinstance(best.version, int) and isinstance(best.weights, dict)):
            raise TypeError("it holds something else")
        digest = best.digest()
        if written is None and not trusted:
            raise ValueError("it has no digest")
        if written not in (None, digest):
            raise ValueError("its content is not what was written")
    except Exception as error:  # a damaged file may raise anything
        problem = f"cannot read the best version: {first_line(error) or type(error).__name__}"
        cure = "remove the file; if it is whole, and of an older rlsync, add --trust (in Python trust=True)"
        raise ConfigError(problem, str(file), cure) from error
    return best


def run_evaluator(job: EvaluationJob, learner: Connection) -> None:
    """What the process runs: adopt what the learner asks for, play, write, until that ends or is gone."""
    prepare_process()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the learner ends this process with it
    os.nice(_NICE)
    try:
        _evaluate(job, learner)
    except (BoardClosed, EOFError):  # the learner has ended
        return
    except RlsyncError as error:
        _leave(learner, Words(error.what, error.where, error.cure))
        sys.exit(1)
    except Exception as error:
        if (refusal := machine.machines(error)) is not None:
            folder = job.file.parent
            problem = f"{refusal.strerror}: {refusal.filename or folder}"
            _leave(learner, Words(problem, str(folder), machine.cure_of(refusal, folder) or ""))
            sys.exit(1)
        _leave(learner, Words(f"{type(error).__name__}: {first_line(error)}"))
        raise


def _evaluate(job: EvaluationJob, learner: Connection) -> None:
    adopter = adopting(job.board, EVALUATOR, job.player, job.adopt, job.device)
    adopter.end_with_the_learner()
    reader = adopter.reader
    assert isinstance(reader, BoardReader), "an evaluation reads a board"
    envs = make_venv(job.env, at_once(job.episodes))
    check_fits(job.player, envs, str(job.env))
    job = replace(job, patience=replace(job.patience, sign_of_life=reader.give_sign_of_life))
    for _ in islice(_steps(job, envs), 2):  # what cannot play is told before anything runs
        pass
    _leave(learner, PLAYS)

    films = None
    if job.filming is not None:
        films = EvaluationFilms(
            job.filming, job.player, job.env, job.seed, job.device, patience=job.patience
        )
    while not reader.closed_by_learner:
        reader.give_sign_of_life()
        if not learner.poll(_LOOK_EVERY_S):
            continue
        asked = learner.recv()
        if asked is None:
            _leave(learner, DONE)
            return
        # It stays on the board, unless another process writes to that at its own pace.
        if not reader.adopt_version(asked.version):
            adopter.adopt()
        result = _evaluated(job, envs, reader, replace(asked, version=reader.version))
        if result is None:
            return
        before = read_evaluations(job.file)
        best = job.best is not None and _is_best(job.best, result, before)
        if best:  # kept before the learner sees the result, which may end the run
            _keep(job, result)
        _write(job.file, result)
        _leave(learner, WRITTEN)
        if films is not None:
            films.evaluated(result.version, len(before), best=best)


def _steps(job: EvaluationJob, envs: Envs) -> Iterator[list[Episode]]:
    return play(job.player, envs, job.episodes, job.seed, job.device, patience=job.patience)


def _evaluated(
    job: EvaluationJob, envs: Envs, reader: BoardReader, asked: Asked
) -> Evaluated | None:
    """Play with the version that was adopted. None: the learner has closed the board meanwhile."""
    started = time.monotonic()
    episodes: list[Episode] = []
    for ended in _steps(job, envs):
        episodes += ended
        if reader.closed_by_learner:
            return None
    return Evaluated(
        **asdict(Score.of(episodes)),
        **asdict(asked),
        seconds=round(time.monotonic() - started, 3),
        run_id=job.run_id,
    )


def _is_best(file: Path, result: Evaluated, before: Sequence[Evaluated]) -> bool:
    """Whether nothing so far was better, also of the run that this one resumes; of equals the first is best."""
    best = best_in(file, trusted=True)
    if best is None:
        return result.rank > -math.inf
    if result.rank == best.rank:
        # What the file has was evaluated in a part of the run that is made again now.
        return all(best.version != other.version for other in before)
    return result.rank > best.rank


def _leave(learner: Connection, words: Words) -> None:
    with suppress(OSError):  # it has ended
        learner.send(words)


def _keep(job: EvaluationJob, result: Evaluated) -> None:
    weights = {}
    for destination, module in job.player.modules.items():
        for leaf, tensor in module.state_dict().items():
            name = f"{destination}.{leaf}"
            if name.startswith(job.kept):
                weights[name.removeprefix(job.kept)] = tensor.detach().to("cpu", copy=True)
    assert job.best is not None
    Best(result.version, result.return_mean, result.rank, weights, job.run_id).write(job.best)


def _write(file: Path, evaluated: Evaluated) -> None:
    row = asdict(evaluated)
    with file.open("a", newline="") as opened:
        writer = csv.DictWriter(opened, list(row))
        if not opened.tell():
            writer.writeheader()
        writer.writerow(row)


def read_evaluations(file: Path) -> list[Evaluated]:
    """The evaluations in a job's file, oldest first; it need not exist yet."""
    if not file.exists():
        return []
    try:
        with file.open(newline="") as opened:
            return [Evaluated(**_values(row)) for row in csv.DictReader(opened)]
    except (csv.Error, ValueError, TypeError) as error:
        problem = f"cannot read the evaluations: {first_line(error)}"
        raise ConfigError(problem, str(file), "remove or repair the file") from error


def _values(row: dict[str, str]) -> dict[str, Any]:
    kinds = {"episodes": int, "version": int, "run_id": str, "frames": int, "optim_steps": int}
    # A value without a name is a newer column, below the header of a file that is older.
    return {name: kinds.get(name, float)(text) for name, text in row.items() if name is not None}


@dataclass
class EvaluationFilms:
    """Films evaluations after they were written, played again with their seed: a film delays no result."""

    filming: Filming
    player: Player
    env: EnvSpec
    seed: int
    device: torch.device = CPU
    patience: Patience = PATIENCE

    def __post_init__(self) -> None:
        self._stage: Filmed | None = None
        self._warned = False

    def evaluated(self, version: int, before: int, *, best: bool) -> None:
        """Film the version that acts now, if after so many evaluations it is its turn, or the best so far."""
        due = before % self.filming.every == 0
        shown = None
        if best:
            shown = self.filming.best
        file = shown
        if due:
            file = video_of_version(self.filming.folder, version)
        if file is None:
            return
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            if self._stage is None:
                self._stage = filmed(self.env, self.seed)
            film(self.player, self._stage, file, self.seed, self.device, patience=self.patience)
            if due and shown is not None:
                whole_file.write_whole(shown, lambda beside: shutil.copyfile(file, beside))
        except (RlsyncError, OSError, RuntimeError, ValueError) as error:
            if not self._warned:
                self._warned = True
                _log.warning(
                    "no video of version %d (this is told once): %s", version, first_line(error)
                )


def video_of_version(folder: Path, version: int) -> Path:
    return folder / f"version_{version:06d}.gif"
