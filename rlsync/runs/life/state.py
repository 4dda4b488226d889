"""What a run is doing, or how it ended: what it writes of itself, and how that is read.

Loads torch for the board's memory file, and nothing of TorchRL: it answers while a machine is busy.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
import yaml

from rlsync import BoardClosed, ConfigError
from rlsync.runs.actors.cluster.session import ClusterStatus
from rlsync.runs.plain import json_of
from rlsync.runs.recipes import run_files as files
from rlsync.runs.recipes.lag import THIS_MACHINE, collector_of_now, lag_in_words
from rlsync.seams import (
    EVALUATOR,
    BoardHandle,
    BoardWatch,
    ReaderStatus,
    processes,
    shared_file,
    whole_file,
)


def name_it(folder: Path) -> str:
    """What to do about a folder that is none of a run."""
    if (folder / ".hydra").is_dir():
        return "start it again: it was stopped before it had written anything; or wait, if it just starts"
    return "name the folder that rlsync train printed as 'run'; runs made in Python write no config"


#: What a run is doing; the first word of what is printed says the same.
RUNNING = "running"
HAS_ENDED = "ended"
KILLED = "killed"
NO_BOARD = "no board"

TARGET_REACHED = "target return reached"  #: how a run ended that learned what it was to learn


REPEATED = "repeated.json"  #: what was made again, in each folder of what was set aside

ROOM_BYTES = 16 * 1024  #: what is kept for :class:`Ended`, whose error may have many lines


#: What a run writes of itself, from its first moment on, beside how it ended.
_BEGAN = (files.ROOM, files.BOARD, files.CLUSTER, files.STATISTICS)


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a run. Its folder has it as a file, unless the run goes on or was killed."""

    # "total_frames collected", "target return reached", "interrupted" (Ctrl-C), "terminated" or "failed"
    how: str
    at: str  # local time, 2026-11-20 18:00:00
    status: int  # the exit status
    frames: int | None = None  # collected; None if training had not begun
    version: int | None = None  # the newest published one; None if training had not begun
    error: str = ""  # what the run failed with, as it was printed
    checkpoint: str | None = None
    run_id: str = ""  # as in the run's receipts; empty if training had not begun
    evaluations_ended: str | None = None  # why there were none any more before the end
    # that the run took in the process that ended it; None: an earlier rlsync wrote this
    seconds: float | None = None

    def __str__(self) -> str:
        if self.frames is None:
            counts = ""
        else:
            counts = f"  frames {self.frames:,}  version {self.version}"
        lines = [f"ended {self.at}: {self.how}{counts}"]
        if self.error:
            lines.append(self.error)
        if self.evaluations_ended:
            lines.append(self.evaluations_ended)
        if self.checkpoint:
            lines.append(f"checkpoint {self.checkpoint}")
        return "\n".join(lines)

    def write(self, run: Path) -> None:
        """Leave this in a run's folder, and take the board's address away: the board is gone.

        It is written over the bytes that :func:`begin` has put there, so a full disk takes it, also a second
        time.
        """
        room = run / files.ROOM
        with suppress(FileNotFoundError):
            (run / files.ENDED).replace(room)
        room.touch()
        with room.open("r+") as file:
            file.write(json_of(asdict(self)) + "\n")
            file.truncate()
            file.flush()
            os.fsync(file.fileno())
        room.replace(run / files.ENDED)
        (run / files.BOARD).unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class RunStatus:
    state: str  # one of the four words above
    told: str  # for people, in lines
    version: int | None = None  # the newest published one; None if it cannot be known
    workers: tuple[ReaderStatus, ...] = ()  # one entry for each worker of a running training
    ended: Ended | None = None  # how the run ended, if it did so by itself
    statistics: files.RunStatistics | None = None  # what the run last wrote of itself
    agents: tuple[RunStatus, ...] = ()  # of a population
    # how old the weights are that workers act with, in words; empty if it cannot be known
    lag: str = ""

    @property
    def healthy(self) -> bool:
        """Whether the run goes on and all its workers live; of a population, whether all its agents do."""
        if self.agents:
            return all(agent.healthy for agent in self.agents)
        return self.state == RUNNING and all(worker.alive for worker in self.workers)

    def to_dict(self) -> dict[str, Any]:
        facts = asdict(self)
        del facts["told"]
        return facts


@dataclass(frozen=True, slots=True)
class Repeated:
    """Frames that a run had learned from when it was killed, and that it makes again."""

    from_frames: int
    to_frames: int

    @property
    def frames(self) -> int:
        return self.to_frames - self.from_frames


def repeated_in(run: Path) -> list[Repeated]:
    """What a run made again, each time that it went on."""
    noted = sorted(
        (run / files.ASIDE).glob(f"*/{REPEATED}"), key=lambda file: int(file.parent.name)
    )
    return [Repeated(**json.loads(file.read_text())) for file in noted]


def status_of(run: Path) -> RunStatus:
    if agents := files.agents_in(run):
        return _population(run, agents)
    status = _state_of(run)
    version = status.version
    evaluations_ended = None
    statistics = files.statistics_in(run)
    lines: list[str | None] = [status.told]
    if statistics is not None:
        lines.append(str(statistics))
        evaluations_ended = statistics.evaluations_ended
        if version is None:
            version = statistics.version
    lag = lag_of(run)
    lines.append(lag)
    if status.ended is None:
        lines.append(evaluations_ended)
    lines.append(_repeated(run))
    schedule = run / files.SCHEDULE
    if schedule.is_file():
        size = schedule.stat().st_size
        lines.append(f"schedule {schedule}: {size:,} bytes, for rlsync rerun {run}")
    return replace(
        status,
        told="\n".join(filter(None, lines)),
        version=version,
        statistics=statistics,
        lag=lag,
    )


def _repeated(run: Path) -> str | None:
    """How often a run went on, if it did."""
    repeated = repeated_in(run)
    if not repeated:
        return None
    times = "once" if len(repeated) == 1 else f"{len(repeated)} times"
    frames = sum(each.frames for each in repeated)
    return f"went on, or began again, {times}: {frames:,} frames were made again"


def lag_of(run: Path) -> str:
    """How old the weights are that a run's workers act with, as its config says; empty where it does not."""
    try:
        config = yaml.safe_load((run / files.RESOLVED).read_text())
        collector = collector_of_now(config["collector"])
        here = config["cluster"]["kind"] == THIS_MACHINE
        return lag_in_words(collector["lag"], in_process=here and collector["num_workers"] == 0)
    except (OSError, ValueError, yaml.YAMLError, LookupError, TypeError):  # another rlsync wrote it
        return ""


def _population(run: Path, agents: Mapping[int, Path]) -> RunStatus:
    end = ended(run)
    lines = []
    state = KILLED
    statuses = []
    for number, folder in agents.items():
        status = status_of(folder)
        statuses.append(status)
        lines.append(f"agent {number}: {status.told}")
        if status.state in (RUNNING, NO_BOARD):
            state = RUNNING
    if end is not None:
        lines.insert(0, str(end))
        state = HAS_ENDED
    lines.append(f"best agent {files.best_agent(run)}")
    return RunStatus(state, "\n".join(lines), ended=end, agents=tuple(statuses))


def _state_of(run: Path) -> RunStatus:
    """What a run is doing, or how it ended, as its board, its folder and its processes say."""
    handle = handle_in(run)
    cluster = None
    if (run / files.CLUSTER).is_file():
        cluster = ClusterStatus.read(run / files.CLUSTER)
    if handle is not None and ended(run) is None:
        status = _watched(handle)
        if status is not None:
            return status
    learner = learner_in(run)
    # Only now: a run that ends closes its board, then writes this, and then its process is gone.
    end = ended(run)
    if end is not None:
        return RunStatus(HAS_ENDED, str(end), end.version, ended=end)
    if learner is None and any((run / name).is_file() for name in _BEGAN):
        return RunStatus(KILLED, _killed(run))
    if handle is not None:
        return RunStatus(RUNNING, "the board is closed: the run is ending")
    if cluster is not None:
        return RunStatus(RUNNING, str(cluster), cluster.version, cluster.workers)
    if learner is not None:
        return RunStatus(RUNNING, f"pid {learner} trains: {_why_no_board(run)}")
    return _not_begun(run)


def _why_no_board(run: Path) -> str:
    numbers = files.statistics_in(run)
    why = "its workers read no board, so the learner alone can ask them"
    if numbers is not None and numbers.frames:
        return why
    return f"the run is starting, or {why}"


def _not_begun(run: Path) -> RunStatus:
    """Of a folder in which no process trains. ConfigError: it has no config of a run either."""
    if not (run / files.RESOLVED).is_file():
        problem = f"no run in {run}: it has neither {files.RESOLVED} nor {files.BOARD}"
        raise ConfigError(problem, "rlsync status", name_it(run))
    since = at((run / files.RESOLVED).stat().st_mtime)
    why = "the run is starting, or was killed while it started"
    return RunStatus(NO_BOARD, f"no board, since {since}: {why}")


def handle_in(run: Path) -> BoardHandle | None:
    """The address of the board that a run left in its folder; None if there is none."""
    try:
        fields = json.loads((run / files.BOARD).read_text())
    except (FileNotFoundError, NotADirectoryError):
        return None
    address = shared_file.FileAddress(**fields["address"])
    if address.kind is None:  # no other file is opened for a foreign folder
        problem = f"{address.path} is not where a board lies"
        raise ConfigError(problem, str(run / files.BOARD), "remove the file")
    return BoardHandle(address, fields["board_id"])


def _watched(handle: BoardHandle) -> RunStatus | None:
    try:
        watch = BoardWatch(*handle.open())
        readers = watch.status()
    except BoardClosed:
        return None
    workers = tuple(reader for reader in readers if reader.reader != EVALUATOR)
    lines = [f"newest version {watch.newest}"]
    for reader in readers:
        lines.append(str(reader).replace(f"worker {EVALUATOR} ", "evaluator "))
    return RunStatus(RUNNING, "\n".join(lines), watch.newest, workers)


def _killed(run: Path) -> str:
    """The run has not written how it ended: it had no time to."""
    checkpoint = run / files.CHECKPOINT
    signs = [run / name for name in (*_BEGAN, files.RECEIPTS)]
    signs += [*(run / files.METRICS).rglob("*"), *checkpoint.rglob("*")]
    last_sign = max(file.stat().st_mtime for file in signs if file.exists())
    if checkpoint.is_dir():
        left = f"checkpoint {checkpoint}"
    else:
        left = "it had written no checkpoint"
    return f"killed, or the machine stopped; the run last wrote something {at(last_sign)}\n{left}"


def begin(run: Path) -> None:
    """Take away what an earlier run in this folder has left: a new one begins. Keep room for its end."""
    for name in (files.ENDED, files.ROOM, files.BOARD, files.STATISTICS):
        (run / name).unlink(missing_ok=True)
    began = {"pid": os.getpid(), "began_s": psutil.Process().create_time()}
    # No file system compresses the rest.
    (run / files.ROOM).write_bytes(json.dumps(began).encode() + b"\n" + os.urandom(ROOM_BYTES))
    # What a killed process was writing. One that is whole, or was replaced, stays until there is a newer one.
    for half in run.glob(f".{files.CHECKPOINT}.stage-*"):
        if not (half / files.DIGESTS).is_file():
            shutil.rmtree(half, ignore_errors=True)


def learner_in(run: Path) -> int | None:
    """The process on this machine that trains in this folder, if one does."""
    with suppress(OSError, ValueError, psutil.Error):
        began = json.loads((run / files.ROOM).read_bytes().partition(b"\n")[0])
        process = psutil.Process(began["pid"])
        # A process's number is given again, also that of one that has just begun.
        is_the_same = abs(process.create_time() - began["began_s"]) < 1
        if is_the_same and processes.process_state(process.pid) != "dead":
            return process.pid
    return None


def ended(run: Path) -> Ended | None:
    """How the run in this folder ended; None if it has not, or was killed."""
    end = whole_file.record_in(
        run / files.ENDED, Ended, "how the run ended", "remove it; then it counts as killed"
    )
    if end is not None and end.checkpoint is not None:  # the folder may have moved since
        end = replace(end, checkpoint=str(run / files.CHECKPOINT))
    return end


def at(timestamp: float) -> str:
    """Local time of a timestamp, to the second."""
    return datetime.fromtimestamp(timestamp).strftime("%Y-%m-%d %H:%M:%S")


#: Seconds between two views: on a terminal, where one replaces the other, and elsewhere.
EVERY_S = 0.5
PLAIN_EVERY_S = 2.0
