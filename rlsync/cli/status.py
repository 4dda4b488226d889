"""``rlsync status``: which version each worker of a running training acts with, or how the run has ended.

Loads torch for the board's memory file, and nothing of TorchRL: it answers while a machine is busy.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rlsync.cli.ended import Ended, at, ended
from rlsync.core.errors import BoardClosed, ConfigError
from rlsync.recipes.run_files import (
    BOARD,
    CHECKPOINT,
    CLUSTER,
    METRICS,
    RECEIPTS,
    RESOLVED,
    RunStatistics,
    statistics_in,
    statistics_schema,
)
from rlsync.transport.board.format import BoardWatch, process_state
from rlsync.transport.board.reader import BoardHandle
from rlsync.transport.contract import ReaderStatus
from rlsync.transport.shared_file import FileAddress
from rlsync.workers.cluster.session import ClusterStatus

_EXAMPLES = """examples:
  rlsync status runs/2026-11-20/18-00-00-000000
  rlsync status --json runs/2026-11-20/18-00-00-000000
  rlsync status --schema

exit status: 0 all workers live, 1 one is dead or the run has ended or has not begun, 2 not a run folder
"""

#: What a run is doing; the first word of what is printed says the same.
RUNNING, ENDED, KILLED, NO_BOARD = "running", "ended", "killed", "no board"


@dataclass(frozen=True, slots=True)
class RunStatus:
    """What can be told of a run from outside."""

    state: str  # one of the four words above
    told: str  # for people, in lines
    version: int | None = None  # the newest published one; None if it cannot be known
    workers: tuple[ReaderStatus, ...] = ()  # one entry for each worker of a running training
    ended: Ended | None = None  # how the run ended, if it did so by itself
    statistics: RunStatistics | None = None  # what the run last wrote of itself

    @property
    def healthy(self) -> bool:
        """Whether the run goes on and all its workers live."""
        return bool(self.workers) and all(worker.alive for worker in self.workers)

    def to_dict(self) -> dict[str, Any]:
        return {
            "state": self.state,
            "version": self.version,
            "workers": [asdict(worker) for worker in self.workers],
            "ended": None if self.ended is None else asdict(self.ended),
            "statistics": None if self.statistics is None else asdict(self.statistics),
        }


def main(arguments: list[str]) -> int:
    """Print one line a worker, or how the run ended; or JSON."""
    parser = argparse.ArgumentParser(
        prog="rlsync status",
        description="Tell which version each worker of a running training acts with, and whether it lives. "
        "Of a run that has ended, tell when and how.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, nargs="?", help="the run's folder, as rlsync train prints it")
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")
    parser.add_argument(
        "--schema", action="store_true", help="print the JSON schema of the statistics that a run writes"
    )
    given = parser.parse_args(arguments)
    if given.schema:
        print(json.dumps(statistics_schema(), indent=2))
        return 0
    if given.run is None:
        parser.error("the following arguments are required: run")
    found = status_of(given.run)
    print(json.dumps(found.to_dict(), indent=2) if given.json else found.told)
    return 0 if found.healthy else 1


def status_of(run: Path) -> RunStatus:
    found, statistics = _state_of(run), statistics_in(run)
    if statistics is None:
        return found
    return replace(found, told=f"{found.told}\n{statistics}", statistics=statistics)


def _state_of(run: Path) -> RunStatus:
    handle, cluster = handle_in(run), _cluster_of(run)
    found = _watched(handle) if handle is not None and ended(run) is None else None
    if found is not None:
        return found
    end = ended(run)  # only now: a run that ends closes its board before it writes this
    if end is not None:
        return RunStatus(ENDED, str(end), end.version, ended=end)
    if handle is not None:
        if process_state(handle.address.pid) not in (None, "dead"):
            return RunStatus(RUNNING, "the board is closed: the run is ending")
        return RunStatus(KILLED, _killed(run))
    if cluster is not None:
        if process_state(cluster.pid) not in (None, "dead"):
            return RunStatus(RUNNING, str(cluster), cluster.version, cluster.workers)
        return RunStatus(KILLED, _killed(run))
    if not (run / RESOLVED).is_file():
        raise ConfigError(
            f"no run in {run}: it has neither {RESOLVED} nor {BOARD}",
            "rlsync status",
            "name the folder that rlsync train printed as 'run'",
        )
    since = at((run / RESOLVED).stat().st_mtime)
    return RunStatus(
        NO_BOARD,
        f"no board, since {since}: the run is starting, was killed while it started, or has no workers on a "
        "board",
    )


def handle_in(run: Path) -> BoardHandle | None:
    """The address of the board that a run left in its folder; None if there is none."""
    try:
        found = json.loads((run / BOARD).read_text())
    except (FileNotFoundError, NotADirectoryError):
        return None
    return BoardHandle(FileAddress(**found["address"]), found["board_id"])


def _cluster_of(run: Path) -> ClusterStatus | None:
    """What a run on a cluster told last; None if it is on none."""
    file = run / CLUSTER
    return ClusterStatus.read(file) if file.is_file() else None


def _watched(handle: BoardHandle) -> RunStatus | None:
    try:
        watch = BoardWatch(*handle.open())
        workers = tuple(watch.status())
    except BoardClosed:
        return None
    told = "\n".join([f"newest version {watch.version}", *map(str, workers)])
    return RunStatus(RUNNING, told, watch.version, workers)


def _killed(run: Path) -> str:
    """The run has not written how it ended: it had no time to."""
    lines = [f"killed, or the machine stopped; the run last wrote something {at(_last_sign(run))}"]
    checkpoint = run / CHECKPOINT
    lines += [f"checkpoint {checkpoint}"] if checkpoint.is_dir() else ["it had written no checkpoint"]
    return "\n".join(lines)


def _last_sign(run: Path) -> float:
    """When the run last wrote to its folder, as a timestamp."""
    folders = [run / METRICS, run / CHECKPOINT]
    files = [
        run / BOARD,
        run / CLUSTER,
        run / RECEIPTS,
        *(file for folder in folders for file in folder.rglob("*")),
    ]
    return max(file.stat().st_mtime for file in files if file.exists())
