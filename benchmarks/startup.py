"""What it costs to start: imports and commands in processor seconds, and workers until the first frame.

    python benchmarks/startup.py [--runs 5] [--json startup.json] [--only ...] [--commands ...]

Commands: processor seconds (user and system, of the process and its children) of a fresh interpreter, beside
``python -c pass`` and ``import torch``. The cases take turns, so that a busy machine is busy for all of them.
Medians. ``rlsync status`` asks a board that this process holds open.

Workers: from the construction of a MultiSyncCollector to its first batch, two workers, each case in a fresh
learner process that has imported what it needs. Wall seconds, twice in the same learner; and the processor
seconds of the whole program (learner, workers, fork server) less those of a learner without a collector.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

_STATUS = "rlsync status RUN"
COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "import torch": ["-c", "import torch"],
    "import rlsync": ["-c", "import rlsync"],
    "import rlsync.transport (the board)": ["-c", "import rlsync.transport.board.writer"],
    "import rlsync.sync (publisher, adopter)": [
        "-c",
        "import rlsync.sync.publisher, rlsync.sync.adopter",
    ],
    "from rlsync import *": ["-c", "from rlsync import *"],
    "import torchrl.collectors": ["-c", "import torchrl.collectors"],
    "rlsync --help": ["-m", "rlsync", "--help"],
    "rlsync --version": ["-m", "rlsync", "--version"],
    "rlsync ls": ["-m", "rlsync", "ls"],
    "rlsync lss (misspelt)": ["-m", "rlsync", "lss"],
    _STATUS: ["-m", "rlsync", "status", "RUN"],
}
FRAMES = 64
PR_SET_CHILD_SUBREAPER = 36  # of linux/prctl.h


# ------------------------------------------------------------------------------------------ commands


def children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def cpu_s(words: list[str]) -> float:
    """Processor seconds of one command."""
    before = children_cpu_s()
    subprocess.run([sys.executable, *words], capture_output=True, timeout=300, check=False)
    return children_cpu_s() - before


def measure_commands(runs: int, names: Collection[str] = tuple(COMMANDS)) -> dict[str, float]:
    found: dict[str, list[float]] = {name: [] for name in names}
    with (
        tempfile.TemporaryDirectory() as run,
        open_board(Path(run)) if _STATUS in names else nullcontext(),
    ):
        for _ in range(runs):
            for name in names:
                found[name].append(
                    cpu_s([run if word == "RUN" else word for word in COMMANDS[name]])
                )
    return {name: statistics.median(seconds) for name, seconds in found.items()}


@contextmanager
def open_board(run: Path) -> Iterator[None]:
    """A board that this process holds open, and its address where ``rlsync status`` looks for it."""
    from rlsync.runs.recipes.run_files import BOARD
    from rlsync.transport.board.writer import BoardWriter

    board = BoardWriter()
    (run / BOARD).write_text(json.dumps(asdict(board.handle)))
    try:
        yield
    finally:
        board.close()


# ------------------------------------------------------------------------------------------- workers


def make_env() -> Any:
    from torchrl.envs import GymEnv

    return GymEnv("CartPole-v1", categorical_action_encoding=True)


def make_policy() -> Any:
    import torch
    from tensordict.nn import TensorDictModule, TensorDictSequential
    from torchrl.modules import MLP

    net = TensorDictModule(MLP(4, 2, num_cells=[64, 64]), ["observation"], ["values"])
    return TensorDictSequential(
        net,
        TensorDictModule(partial(torch.argmax, dim=-1), in_keys=["values"], out_keys=["action"]),
    )


def start_workers(case: str) -> dict[str, float]:
    """In a fresh learner: start collectors as ``case`` says, and time them to their first batch."""
    import rlsync

    early = rlsync.Forkserver() if case == "fork server, made first" else None
    import torch
    from torchrl.collectors import MultiSyncCollector
    from torchrl.weight_update import SharedMemWeightSyncScheme

    torch.set_num_threads(1)
    policy = make_policy()
    make_env().close()  # as a program that looks at its environment first
    rlsync.BoardScheme  # noqa: B018  (loads it)
    told = {}
    for name in () if case == "no collector" else ("first", "second"):
        stock = case == "SharedMem, spawn"
        began = time.perf_counter()
        start = early or (nullcontext() if case.endswith("spawn") else rlsync.Forkserver())
        scheme = SharedMemWeightSyncScheme() if stock else rlsync.BoardScheme()
        with start:
            collector = MultiSyncCollector(
                [make_env] * 2,
                policy,
                frames_per_batch=FRAMES,
                total_frames=-1,
                num_sub_threads=1,
                weight_sync_schemes={"policy": scheme},
            )
        next(iter(collector))
        told[f"{name}_s"] = time.perf_counter() - began
        told[f"{name}_private_mb"] = max(private_mb(process.pid) for process in collector.procs)
        collector.shutdown()
    return told


def private_mb(pid: int) -> float:
    """Memory that a process shares with nobody, in MB."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return sum(int(kb) for kb in re.findall(r"^Private_\w+: +(\d+) kB", text, re.MULTILINE)) / 1024


CASES = (
    "no collector",
    "SharedMem, spawn",
    "board, spawn",
    "fork server",
    "fork server, made first",
)


def adopt_orphans() -> None:
    """Become the parent of what a child leaves behind, a fork server for example, to count its seconds."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def await_orphans() -> None:
    with suppress(ChildProcessError):
        while True:
            os.wait()


def measure_workers(runs: int) -> dict[str, dict[str, float]]:
    adopt_orphans()
    found: dict[str, list[dict[str, float]]] = {case: [] for case in CASES}
    for _ in range(runs):
        for case in CASES:
            before = children_cpu_s()
            done = subprocess.run(
                [sys.executable, __file__, "--case", case],
                capture_output=True,
                text=True,
                timeout=600,
                check=True,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
            await_orphans()
            told = json.loads(done.stdout.splitlines()[-1])
            found[case].append(told | {"cpu_s": children_cpu_s() - before})
    return {
        case: {key: statistics.median(r[key] for r in rows) for key in rows[0]}
        for case, rows in found.items()
    }


# -------------------------------------------------------------------------------------------- report


def print_commands(found: dict[str, float]) -> None:
    torch_s = found.get("import torch", math.nan)
    print("| command | processor seconds | beside import torch |\n|---|---|---|")
    for name, seconds in found.items():
        print(f"| `{name}` | {seconds:.2f} | {seconds / torch_s:.2f} |")


def print_workers(found: dict[str, dict[str, float]]) -> None:
    floor = found["no collector"]["cpu_s"]
    print(
        "| workers started by | first collector | second | processor seconds of both | private memory |"
    )
    print("|---|---|---|---|---|")
    for case in CASES[1:]:
        row = found[case]
        print(
            f"| {case} | {row['first_s']:.2f} s | {row['second_s']:.2f} s | {row['cpu_s'] - floor:.1f} s "
            f"| {row['second_private_mb']:.0f} MB |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=5, help="times that each case is run")
    parser.add_argument(
        "--only", nargs="*", choices=["commands", "workers"], default=["commands", "workers"]
    )
    parser.add_argument(
        "--commands", nargs="*", choices=COMMANDS, default=list(COMMANDS), metavar="NAME"
    )
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(start_workers(options.case)))
        return
    parts: dict[str, tuple[Callable[[int], Any], Callable[[Any], None]]] = {
        "commands": (partial(measure_commands, names=options.commands), print_commands),
        "workers": (measure_workers, print_workers),
    }
    told = {}
    for name in options.only:
        measure, show = parts[name]
        told[name] = measure(options.runs)
        show(told[name])
        print(flush=True)
    if options.json:
        options.json.write_text(json.dumps(told, indent=2))


if __name__ == "__main__":
    main()
