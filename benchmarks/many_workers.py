"""What grows with the workers of one machine: the learner's batch, memory, descriptors, the start and the end.

    python benchmarks/many_workers.py [--workers 2 16 64 200] [--seconds 20] [--lag 1] [--out many.json]

For each number of workers one `rlsync train recipe=impala`, one after the other, with batches of one unroll of 8
frames, in an environment that costs next to nothing. The learner is the bottleneck, so most workers wait.

- **learner**: processor microseconds of the learner's main thread for a batch, all of its hooks included, over
  ``--seconds``. Others on the machine do not lengthen them, as they do seconds, though they cool the caches.
- **worker**: what one takes of a core meanwhile, in percent, for its rollouts and its waits.
- **start**: seconds from the command to the first batch, and processor seconds of a worker until then.
- **end**: seconds from Ctrl-C until no process is left.
- **memory**: what the learner, and the worker in the middle, share with nobody, MB. **descriptors**: those of the
  learner, and of the worker that has most.
- **bytes**: what a batch adds to the record of the run, in ``schedule.bin`` and ``receipts.jsonl``.
- **status**, **timeline**: processor milliseconds of these commands, in a process that has loaded what they need:
  while the run goes on, and of a picture of one second of it after its end.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import psutil

from rlsync.runs.cli import main as command_line
from rlsync.runs.life.state import status_of
from rlsync.runs.recipes import run_files as files

UNROLL = 8
EPISODE = 200
STARTS_WITHIN_S, ENDS_WITHIN_S = 900.0, 120.0
MB = 1e6


class Free(gymnasium.Env[Any, Any]):
    """Costs next to nothing, and teaches nothing."""

    observation_space = gymnasium.spaces.Box(-1, 1, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self) -> None:
        self._seen = np.zeros(4, np.float32)
        self._steps = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._steps = 0
        return self._seen, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._steps += 1
        return self._seen, 1.0, self._steps >= EPISODE, False, {}


gymnasium.register("Free-v0", "many_workers:Free")


@dataclass(frozen=True, slots=True)
class Figures:
    """What one number of workers came to."""

    workers: int
    learner_us_per_batch: float
    worker_percent_of_core: float
    start_s: float
    start_cpu_s_of_worker: float
    end_s: float
    learner_mb: float
    worker_mb: float
    learner_descriptors: int
    worker_descriptors: int
    record_bytes_per_batch: float
    status_ms: float
    timeline_ms: float


@contextmanager
def training(folder: Path, workers: int, lag: int | None) -> Iterator[subprocess.Popen[bytes]]:
    """A run that goes on until it is ended."""
    here = Path(__file__)
    words = [
        *("recipe=impala", "env=gymnasium", f"env.id={here.stem}:Free-v0", "env.num_envs=1"),
        *(f"recipe.unroll_length={UNROLL}", "recipe.batch_size=1"),
        *(f"collector.frames_per_batch={UNROLL}", f"collector.num_workers={workers}"),
        *("recipe.total_frames=1000000000", f"run_dir={folder}"),
    ]
    if lag is not None:
        words.append(f"collector.lag={lag}")
    paths = [str(here.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    with (folder.with_suffix(".txt")).open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "rlsync", "train", *words],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def batches_of(folder: Path) -> int:
    """How many batches a run has learned from: each has its version."""
    return status_of(folder).version or 0


def main_thread_ns(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0])


def cpu_s(processes: list[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def record_bytes(folder: Path) -> int:
    return sum((folder / name).stat().st_size for name in (files.SCHEDULE, files.RECEIPTS))


def command_ms(*words: str) -> float:
    """Processor milliseconds of an rlsync command in this process, the least of three times."""
    spent_s = []
    for _ in range(3):
        began_s = time.process_time()
        with redirect_stdout(io.StringIO()):
            command_line.main(list(words))
        spent_s.append(time.process_time() - began_s)
    return 1e3 * min(spent_s)


def measured(folder: Path, workers: int, seconds: float, lag: int | None) -> Figures:
    began_s = time.monotonic()
    with training(folder, workers, lag) as process:
        # It runs when it has learned from a few batches.
        while not (folder / files.STATISTICS).is_file() or batches_of(folder) < 5:
            if process.poll() is not None or time.monotonic() > began_s + STARTS_WITHIN_S:
                raise SystemExit(folder.with_suffix(".txt").read_text()[-2000:])
            time.sleep(0.1)
        start_s = time.monotonic() - began_s
        learner = psutil.Process(process.pid)
        # The fork server and its like have children of their own, or none of their worker's name.
        acting = [each for each in learner.children(recursive=True) if each.num_threads() > 1]
        start_cpu_s = cpu_s(acting)

        time.sleep(seconds / 4)  # until what is compiled, cached and asked at first is done
        before = (
            batches_of(folder),
            main_thread_ns(process.pid),
            cpu_s(acting),
            record_bytes(folder),
        )
        from_s = time.monotonic()
        time.sleep(seconds)
        after = batches_of(folder), main_thread_ns(process.pid), cpu_s(acting), record_bytes(folder)
        wall_s = time.monotonic() - from_s
        batches, learner_ns, workers_cpu_s, recorded = (
            late - early for late, early in zip(after, before, strict=True)
        )

        private = sorted(each.memory_full_info().uss for each in acting)
        learner_mb = learner.memory_full_info().uss / MB
        descriptors = learner.num_fds(), max(each.num_fds() for each in acting)
        status_ms = command_ms("status", str(folder))

        ended_s = time.monotonic()
        process.send_signal(signal.SIGINT)
        process.wait(ENDS_WITHIN_S)
        psutil.wait_procs(acting, ENDS_WITHIN_S)
        end_s = time.monotonic() - ended_s
    timeline_ms = command_ms("timeline", str(folder), "--from", "1", "--to", "2")
    return Figures(
        workers=workers,
        learner_us_per_batch=learner_ns / 1e3 / batches,
        worker_percent_of_core=100 * workers_cpu_s / wall_s / len(acting),
        start_s=start_s,
        start_cpu_s_of_worker=start_cpu_s / len(acting),
        end_s=end_s,
        learner_mb=learner_mb,
        worker_mb=statistics.median(private) / MB,
        learner_descriptors=descriptors[0],
        worker_descriptors=descriptors[1],
        record_bytes_per_batch=recorded / batches,
        status_ms=status_ms,
        timeline_ms=timeline_ms,
    )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--workers", nargs="+", type=int, default=[2, 16, 64, 200])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--lag", type=int)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    figures = []
    with tempfile.TemporaryDirectory(prefix="many-workers-") as folder:
        for workers in options.workers:
            run = Path(folder) / str(workers)
            figures.append(measured(run, workers, options.seconds, options.lag))
            print(json.dumps(asdict(figures[-1])), flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps([asdict(each) for each in figures]) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
