"""The memory and the descriptors that weights need on a host: rlsync's board and TorchRL's schemes.

    python benchmarks/footprint.py [--workers 1 2 4 8] [--tensors 10 100 1000 10000] [--floats 1000]
                                   [--big-floats 83333 --big-workers 8] [--start fork]
                                   [--out footprint.json] [--table footprint.md]

Each cell is a MultiSyncCollector of forked (or spawned) workers. The learner publishes five times, with a
rollout after each publish.

**Memory** is the proportional set size (PSS) of anonymous and shared memory, from
``/proc/<pid>/smaps_rollup``, summed over this process, the learner and its workers. Each page counts once,
however many processes map it. Two amounts are subtracted: the memory in use before the collector was made
(with the learner's own model), and the memory of a collector whose model is one number (the cost of the
processes). The rest is due to the weights: boards, buffers, behaviour policies and their Python objects.

**Descriptors** are the entries of ``/proc/<pid>/fd``, the highest count of any worker. A cell that raises or
does not end in time is recorded as failed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import signal
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from publish import BulkPolicy, make_push, make_trainer
from torchrl.collectors import MultiSyncCollector
from torchrl.envs import GymEnv
from torchrl.weight_update import (
    MultiProcessWeightSyncScheme,
    SharedMemWeightSyncScheme,
    WeightSyncScheme,
)

from rlsync import BoardScheme

SCHEMES: dict[str, Callable[[], WeightSyncScheme]] = {
    "board alias": partial(BoardScheme, "alias", prove=False),
    "board copy": partial(BoardScheme, "copy", prove=False),
    "SharedMem": SharedMemWeightSyncScheme,
    "MultiProcess": MultiProcessWeightSyncScheme,
}
PUSHES = 5
ENDS_WITHIN_S = 75.0
BOARD = "/memfd:rlsync-board"


@dataclass(frozen=True, slots=True)
class Cell:
    """One measurement.

    Args:
        scheme: a key of ``SCHEMES``.
        workers: worker processes.
        tensors: parameters of the policy.
        floats: elements of each.
        apart: whether the learner trains a copy of the module that the collector is given.
        descriptors: the limit of descriptors of each process; 0 for the highest allowed.
        start: how workers are started, "fork" or "spawn".
    """

    scheme: str
    workers: int
    tensors: int
    floats: int
    apart: bool = False
    descriptors: int = 0
    start: str = "fork"


# ------------------------------------------------------------------------------------------ measuring


def children(pid: int) -> list[int]:
    """The descendants of ``pid``, at any depth."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    found, level = [], [pid]
    while level := [child for child, parent in parents.items() if parent in level]:
        found += level
    return found


def pss_bytes(pids: list[int]) -> int:
    """The anonymous and shared memory of these processes. Each page counts once."""
    total = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith(("Pss_Anon:", "Pss_Shmem:")):
                total += int(line.split()[1]) * 1024
    return total


def descriptors(pid: int) -> list[str]:
    """The target of each open descriptor of a process."""
    found = []
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            found.append(str(fd.readlink()))
    return found


def limit_descriptors(wanted: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, wanted) if wanted else (hard, hard))


def measure(cell: Cell, starter: int) -> dict[str, float]:
    """Measure one cell in the calling process."""
    limit_descriptors(cell.descriptors)
    learner = BulkPolicy(cell.tensors, cell.floats)
    tree = [starter, os.getpid()]
    before = pss_bytes(tree)
    collector = MultiSyncCollector(
        [partial(GymEnv, "CartPole-v1")] * cell.workers,
        deepcopy(learner) if cell.apart else learner,
        frames_per_batch=2 * cell.workers,
        total_frames=-1,
        weight_sync_schemes={"policy": SCHEMES[cell.scheme]()},
        track_policy_version=True,
        num_sub_threads=1,
    )
    try:
        push = make_push(cell.scheme.split()[0], make_trainer(collector, learner))
        batches = iter(collector)
        for _ in range(PUSHES):
            push()
            next(batches)
        workers = [process.pid for process in collector.procs]
        theirs = [descriptors(pid) for pid in workers]
        return {
            "grown_bytes": pss_bytes([*tree, *children(os.getpid())]) - before,
            "worker_descriptors": max(map(len, theirs)),
            "worker_board_descriptors": max(sum(BOARD in fd for fd in fds) for fds in theirs),
            "learner_descriptors": len(descriptors(os.getpid())),
        }
    finally:
        collector.shutdown()


def answer(cell: Cell, starter: int, connection: Connection) -> None:
    """Measure one cell, and send the result or the error through the pipe."""
    multiprocessing.set_start_method(cell.start, force=True)
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 2)  # tracebacks of workers that run out of descriptors
    try:
        connection.send(measure(cell, starter))
    except BaseException as error:  # noqa: BLE001
        connection.send({"fails": first_cause(error)})


def first_cause(error: BaseException) -> str:
    """The error in one line. If it contains a worker's traceback, the line with the worker's error."""
    lines = [
        line.strip() for line in f"{type(error).__name__}: {error}".splitlines() if line.strip()
    ]
    named = [
        line for line in lines[1:] if line.split(":")[0].endswith(("Error", "Exception", "Empty"))
    ]
    return f"{lines[0]} {named[-1] if named else ''}".strip()[:200]


def ask(cell: Cell) -> dict[str, object]:
    """Measure one cell in a separate process, and end all processes that it leaves."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    context = multiprocessing.get_context("fork")
    process = context.Process(target=answer, args=(cell, os.getpid(), theirs))
    started = time.monotonic()
    process.start()
    theirs.close()
    found: dict[str, object] = {"fails": f"no answer within {ENDS_WITHIN_S:g} s"}
    with suppress(EOFError):
        if ours.poll(ENDS_WITHIN_S):
            found = ours.recv()
            process.join(10)
    for pid in [*children(process.pid), process.pid] if process.is_alive() else []:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.join()
    ours.close()
    return asdict(cell) | found | {"took_s": round(time.monotonic() - started, 1)}


def without_processes(cell: Cell, empties: dict[tuple[str, int], int]) -> dict[str, object]:
    """A cell minus the cost of its processes, which is measured with a model of one number."""
    key = cell.scheme, cell.workers
    if key not in empties:
        empties[key] = ask(Cell(cell.scheme, cell.workers, 1, 1, start=cell.start)).get(
            "grown_bytes", 0
        )
    row = ask(cell)
    if "grown_bytes" in row:
        row["model_bytes"] = 4 * cell.tensors * cell.floats
        row["weights_bytes"] = row["grown_bytes"] - empties[key]
        row["copies"] = row["weights_bytes"] / row["model_bytes"]
    return row


def failed_with_fewer(cell: Cell, rows: list[dict]) -> dict[str, object] | None:
    """Skip what failed with fewer workers, because each failure takes a minute."""
    for row in rows:
        if "fails" in row and (row["scheme"], row["tensors"]) == (cell.scheme, cell.tensors):
            return asdict(cell) | {"fails": row["fails"], "not_tried": True, "took_s": 0.0}
    return None


# ------------------------------------------------------------------------------------------ the tables


def shown(row: dict) -> str:
    if "fails" in row:
        return "as above" if row.get("not_tried") else f"fails: {row['fails'][:120]}"
    return f"{row['weights_bytes'] / 1e6:.1f} MB · {row['worker_descriptors']} · {row['learner_descriptors']}"


def matrix_table(rows: list[dict]) -> list[str]:
    schemes = list(dict.fromkeys(row["scheme"] for row in rows))
    lines = [f"| tensors | workers | {' | '.join(schemes)} |", "|---|---|" + "---|" * len(schemes)]
    cells = {(row["tensors"], row["workers"], row["scheme"]): row for row in rows}
    for tensors, workers in dict.fromkeys((row["tensors"], row["workers"]) for row in rows):
        found = (shown(cells[tensors, workers, scheme]) for scheme in schemes)
        lines.append(f"| {tensors:,} | {workers} | {' | '.join(found)} |")
    return lines


def big_table(rows: list[dict]) -> list[str]:
    lines = [
        "| scheme | learner trains | descriptor limit | model | workers | memory, in models "
        "| descriptors of a worker |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        model = f"{4e-6 * row['tensors'] * row['floats']:.1f} MB, {row['tensors']:,} tensors"
        trains = "a copy" if row["apart"] else "the collector's policy"
        result = (
            f"fails: {row['fails'][:120]} | "
            if "fails" in row
            else f"{row['weights_bytes'] / 1e6:.0f} MB, {row['copies']:.2f} | {row['worker_descriptors']}"
        )
        limit = row["descriptors"] or "highest"
        lines.append(
            f"| {row['scheme']} | {trains} | {limit} | {model} | {row['workers']} | {result} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 2, 4, 8])
    parser.add_argument("--tensors", type=int, nargs="*", default=[10, 100, 1000, 10_000])
    parser.add_argument(
        "--floats", type=int, default=1000, help="elements of each tensor of the matrix"
    )
    parser.add_argument("--schemes", nargs="+", choices=list(SCHEMES), default=list(SCHEMES))
    parser.add_argument("--big-floats", type=int, default=83_333, help="of 300 tensors; 0 for none")
    parser.add_argument("--big-workers", type=int, default=8)
    parser.add_argument("--start", choices=["fork", "spawn"], default="fork")
    parser.add_argument("--out", default="footprint.json")
    parser.add_argument("--table", default="footprint.md")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    limit_descriptors(0)
    empties: dict[tuple[str, int], int] = {}
    big = []
    if options.big_floats:
        few, many = (options.big_workers, 300, options.big_floats), (2, 1000, 100)
        cells = [Cell(scheme, *few, apart) for apart in (False, True) for scheme in options.schemes]
        cells += [Cell(scheme, *many, descriptors=256) for scheme in options.schemes]
        cells += [Cell(s, *few, descriptors=256) for s in options.schemes if s.startswith("board")]
        cells = [replace(cell, start=options.start) for cell in cells]
        for cell in cells:
            big.append(without_processes(cell, empties))
            print(*big_table(big[-1:])[-1:], flush=True)
    rows = []
    for tensors in options.tensors:
        for workers in options.workers:
            for scheme in options.schemes:
                cell = Cell(scheme, workers, tensors, options.floats, start=options.start)
                rows.append(failed_with_fewer(cell, rows) or without_processes(cell, empties))
                print(
                    scheme, tensors, workers, shown(rows[-1]), f"{rows[-1]['took_s']} s", flush=True
                )
    host = {
        "descriptor_limit": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "torch": torch.__version__,
    }
    Path(options.out).write_text(
        json.dumps({"host": host, "rows": rows, "big": big}, indent=2) + "\n"
    )
    tables = [*big_table(big), "", *matrix_table(rows)]
    Path(options.table).write_text("\n".join(tables) + "\n")


if __name__ == "__main__":
    main()
