"""Test a board under load and faults: workers are killed, stopped and restarted, and layouts change.

    python benchmarks/soak.py [--workers 4] [--seconds 600] [--seed 0] [--out soak.json]

One learner publishes at full rate. Workers adopt as fast as they can, half of them by alias and half by copy,
and check that every element of every leaf holds the version that ``adopt`` returned. At random moments a
worker is killed (SIGKILL), stopped and continued (SIGSTOP, SIGCONT) or started again, and the board gets a
new layout with other leaves of other sizes. At the end every worker must reach the newest version within a
deadline, end by itself, and leave nothing behind.

The exit status is 1 if a count under ``bad`` is not zero. The counters are in shared memory, so that those of
a killed worker are kept.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import os
import platform
import random
import signal
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from rlsync.core.ledger import Stamp
from rlsync.tensors.layout import Layout, LeafSpec
from rlsync.transport.board import BoardHandle, BoardReader, BoardWriter
from rlsync.transport.board import format as fmt
from rlsync.transport.shared_file import whole_pages

#: One line of 64-bit counters a worker, after one word that tells all workers to leave.
COUNTERS = ("adoptions", "looks", "torn", "wrong", "fell", "lost", "last")
LINE_WORDS = 8

DTYPES = (torch.float32, torch.float64, torch.int32, torch.int64)
LARGEST = 20_000  # elements of a leaf
EXACT = 1 << 20  # leaves hold the version modulo this, which every dtype above can hold

ARRIVES_WITHIN_S = 60.0
# On average: each worker is killed, each worker is stopped, the board gets a new layout.
KILLED_EVERY_S, STOPPED_EVERY_S, LAID_OUT_EVERY_S = 10.0, 6.0, 2.0
LONGEST_STOP_S = 3.0
LONGEST_ABSENCE_S = 1.0
PR_SET_PDEATHSIG = 1


# ------------------------------------------------------------------------------------------ a worker


class Canary:
    """The acting weights of a worker: the views themselves (alias), or its own memory (copy)."""

    def __init__(self, mode: str) -> None:
        self.alias = mode == "alias"
        self.tensors: list[torch.Tensor] = []

    def __call__(self, version: int, layout: Layout, views: Sequence[torch.Tensor]) -> bool:
        del version, layout
        self.tensors = list(views) if self.alias else [view.clone() for view in views]
        return self.alias

    def low_high(self) -> tuple[int, int]:
        """The smallest and the largest number in all leaves."""
        ends = [torch.aminmax(tensor) for tensor in self.tensors if tensor.numel()]
        return min(int(low) for low, _ in ends), max(int(high) for _, high in ends)


def work(handle: BoardHandle, number: int, mode: str, counters: Sequence[int]) -> None:
    """Adopt and check until told to end. The worker also ends when its parent process ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # also while it is stopped
    torch.set_num_threads(1)
    line = 1 + number * LINE_WORDS
    at = {name: line + i for i, name in enumerate(COUNTERS)}
    canary = Canary(mode)
    reader = BoardReader(handle, canary, number)
    last = 0  # per process: a successor begins at 0, like any late worker
    while not counters[0]:
        newest = reader.newest
        version = reader.adopt()
        if not version:
            continue
        counters[at["lost"]] += version < newest
        counters[at["fell"]] += version < last
        counters[at["adoptions"]] += version != last
        if version == last:
            os.sched_yield()  # there are more workers than cores: let the learner publish
        counters[at["last"]] = last = version
        for _ in range(2):  # the acting weights must not change until the next adoption
            low, high = canary.low_high()
            counters[at["looks"]] += 1
            counters[at["torn"]] += low != high
            counters[at["wrong"]] += (low, high) != (version % EXACT, version % EXACT)
    canary.tensors = []
    reader.close()


# ---------------------------------------------------------------------------------- what is left behind


def descriptors() -> Counter[str]:
    """The target of each open descriptor of this process; only the kind for pipes and sockets."""
    found: Counter[str] = Counter()
    for fd in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the descriptor of the listing itself
            found[str(fd.readlink()).split("[")[0]] += 1
    return found


def board_mappings() -> int:
    """The mappings of memory files in this process."""
    return sum("/memfd:rlsync" in line for line in Path("/proc/self/maps").read_text().splitlines())


def descendants() -> set[int]:
    """The descendants of this process."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    found, grown = {os.getpid()}, True
    while grown:
        below = {pid for pid, parent in parents.items() if parent in found} - found
        found |= below
        grown = bool(below)
    return found - {os.getpid()}


def resident_bytes() -> int:
    """The memory of this process outside of boards."""
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024


# ------------------------------------------------------------------------------------------- the crowd


class Crowd:
    """The worker processes. A successor of a killed worker takes its number."""

    def __init__(
        self, handle: BoardHandle, workers: int, chance: random.Random, counters: Sequence[int]
    ) -> None:
        self.context = multiprocessing.get_context("forkserver")
        self.counters = counters
        self.counts = dict.fromkeys(("kills", "stops", "respawns", "crashed"), 0)
        self._handle = handle
        self.workers = workers
        self._chance = chance
        self._living: dict[int, BaseProcess] = {}
        self._comes_back = dict.fromkeys(range(workers), 0.0)
        self._goes_on: dict[int, float] = {}

    def start(self, number: int) -> None:
        mode = "alias" if number % 2 else "copy"
        process = self.context.Process(
            target=work, args=(self._handle, number, mode, self.counters)
        )
        process.start()
        self._living[number] = process
        del self._comes_back[number]

    def kill(self) -> None:
        """Kill one worker, even if it is stopped. A successor takes its number soon."""
        if number := self._any_living():
            process = self._living.pop(number[0])
            process.kill()
            process.join()
            process.close()
            self._goes_on.pop(number[0], None)
            self._comes_back[number[0]] = time.monotonic() + self._chance.uniform(
                0, LONGEST_ABSENCE_S
            )
            self.counts["kills"] += 1

    def stop(self) -> None:
        """Stop one worker for a while."""
        if (number := self._any_living()) and number[0] not in self._goes_on:
            os.kill(self._living[number[0]].pid, signal.SIGSTOP)
            self._goes_on[number[0]] = time.monotonic() + self._chance.uniform(0, LONGEST_STOP_S)
            self.counts["stops"] += 1

    def tend(self, *, at_once: bool = False) -> None:
        """Continue and restart workers that are due. Count those that ended by themselves."""
        now = float("inf") if at_once else time.monotonic()
        for number in [n for n, due in self._goes_on.items() if due <= now]:
            del self._goes_on[number]
            os.kill(self._living[number].pid, signal.SIGCONT)
        for number in [n for n, process in self._living.items() if process.exitcode is not None]:
            self._living.pop(number).close()
            self._goes_on.pop(number, None)
            self._comes_back[number] = time.monotonic()
            self.counts["crashed"] += 1
        for number in [n for n, due in self._comes_back.items() if due <= now]:
            self.counts["respawns"] += 1
            self.start(number)

    def leave(self) -> None:
        """Ask all workers to end. Count those that do not."""
        self.counters[0] = 1
        for process in self._living.values():
            process.join(ARRIVES_WITHIN_S)
            self.counts["crashed"] += process.exitcode != 0
        self.end()

    def end(self) -> None:
        """Kill all workers."""
        for process in self._living.values():
            process.kill()
            process.join()
            process.close()
        self._living.clear()

    def total(self, name: str) -> int:
        at = 1 + COUNTERS.index(name)
        return sum(self.counters[at + n * LINE_WORDS] for n in range(self.workers))

    def _any_living(self) -> list[int]:
        return [self._chance.choice(sorted(self._living))] if self._living else []


# ----------------------------------------------------------------------------------------- the learner


class Learner:
    """Publishes tensors that hold the version, and sometimes gives the board a new layout."""

    def __init__(self, board: BoardWriter, chance: random.Random) -> None:
        self.board = board
        self._chance = chance
        self._tensors: list[torch.Tensor] = []
        self.counts = {"publishes": 0, "coalesced": 0, "layouts": 0}
        self.payload_bytes = 0
        self.slots_peak = self.file_bytes_peak = self.text_bytes = 0
        self.durations_s: list[float] = []
        self.longest_s = 0.0

    def lay_out(self) -> None:
        """Make a layout with other leaves and sizes. Its first leaf is never empty."""
        sizes = [self._chance.randrange(LARGEST) for _ in range(self._chance.randint(1, 12))]
        leaves = [
            LeafSpec(f"w{i}", "parameter", (max(size, not i),), self._chance.choice(DTYPES))
            for i, size in enumerate(sizes)
        ]
        layout = Layout.build({"policy": leaves})
        self.board.lay_out(layout)
        self._tensors = [torch.empty(leaf.shape, dtype=leaf.dtype) for leaf in leaves]
        self.payload_bytes = layout.image_bytes
        self.text_bytes = whole_pages(len(layout.to_json()))
        self.counts["layouts"] += 1
        self.publish()

    def publish(self) -> None:
        for tensor in self._tensors:
            tensor.fill_((self.board.newest + 1) % EXACT)
        started = time.perf_counter()
        version = self.board.publish(self._tensors, stamp=Stamp(1, self.board.newest + 1))
        duration = time.perf_counter() - started
        self.longest_s = max(self.longest_s, duration)
        self.counts["publishes"] += 1
        self.counts["coalesced"] += version is None
        self.slots_peak = max(self.slots_peak, self.board.slot_count)
        if self.counts["publishes"] % 64 == 0:
            self.durations_s.append(duration)

    def file_bytes(self) -> int:
        """The memory of the board's file, whichever processes map it."""
        found = Path(self.board.handle.address.path).stat().st_blocks * 512
        self.file_bytes_peak = max(self.file_bytes_peak, found)
        return found

    def figures(self) -> dict[str, float]:
        """Figures without a promise, as context for the counts."""
        return {
            "slots_peak": self.slots_peak,
            "board_peak_bytes": self.file_bytes_peak,
            "publish_median_us": round(statistics.median(self.durations_s or [0.0]) * 1e6, 1),
            "publish_longest_us": round(self.longest_s * 1e6, 1),
        }


def torment(learner: Learner, crowd: Crowd, chance: random.Random, seconds: float) -> None:
    """Publish at full rate. Kill and stop workers and change the layout at random moments."""
    acts = {"kill": crowd.kill, "stop": crowd.stop, "lay_out": learner.lay_out}
    means = KILLED_EVERY_S / crowd.workers, STOPPED_EVERY_S / crowd.workers, LAID_OUT_EVERY_S
    rates = {name: 1 / mean_s for name, mean_s in zip(acts, means, strict=True)}
    begun = time.monotonic()
    due = {name: begun + chance.expovariate(rate) for name, rate in rates.items()}
    while (now := time.monotonic()) < begun + seconds:
        learner.publish()
        for name, act in acts.items():
            if due[name] <= now:
                act()
                due[name] = now + chance.expovariate(rates[name])
                learner.file_bytes()
        crowd.tend()


def settle(learner: Learner, crowd: Crowd, workers: int) -> int:
    """All workers run again and must reach the newest version. Returns how many do not."""
    crowd.tend(at_once=True)
    learner.lay_out()
    deadline = time.monotonic() + ARRIVES_WITHIN_S
    # Not board.wait(): it would raise for the dead predecessor of a worker that is still starting.
    while (missing := workers - _arrived(learner.board)) and time.monotonic() < deadline:
        crowd.tend()
        time.sleep(0.01)
    if missing:
        print(*learner.board.status(), sep="\n")
    learner.publish()  # returns slots without a lease
    return missing


def _arrived(board: BoardWriter) -> int:
    return sum(status.alive and status.adopted_version == board.newest for status in board.status())


def soak(workers: int, seconds: float, seed: int) -> dict[str, object]:
    """Make one run; see the top of this file."""
    chance = random.Random(seed)
    counters = _warm_up(workers)
    before, below = descriptors(), descendants()
    board = BoardWriter()
    learner, crowd = Learner(board, chance), Crowd(board.handle, workers, chance, counters)
    learner.lay_out()
    began, began_bytes = time.monotonic(), resident_bytes()
    try:
        crowd.tend()
        crowd.counts["respawns"] = 0
        torment(learner, crowd, chance, seconds)
        not_arrived = settle(learner, crowd, workers)
        took_s, anonymous_bytes = time.monotonic() - began, resident_bytes() - began_bytes
        crowd.leave()
    finally:
        crowd.end()
    counts = learner.counts | {n: crowd.total(n) for n in ("adoptions", "looks")} | crowd.counts
    bad = {name: crowd.total(name) for name in ("torn", "wrong", "fell", "lost")} | {
        "not_arrived": not_arrived,
        "coalesced": counts.pop("coalesced"),
        "crashed": counts.pop("crashed"),
        "slots_above_bound": max(0, learner.slots_peak - (2 * workers + 2)),
        "board_bytes_unaccounted": _unaccounted_bytes(learner),
    }
    figures = learner.figures() | {"learner_private_growth_bytes": anonymous_bytes}
    board.close()
    del learner, board, crowd
    leaked = descriptors() - before
    bad |= {
        "leaked_descriptors": sum(leaked.values()),
        "leaked_mappings": board_mappings(),
        "leaked_processes": len(descendants() - below),
    }
    return {
        "workers": workers,
        "seconds": round(took_s, 1),
        "seed": seed,
        "counts": counts,
        "bad": bad,
        "leaked": sorted(leaked.elements()),
        "figures": figures,
        "host": {
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
    }


def _unaccounted_bytes(learner: Learner) -> int:
    """The memory of the board without its control pages, its slots and the text of its present layout."""
    slots = learner.board.slot_count * whole_pages(learner.payload_bytes)
    return max(0, learner.file_bytes() - slots - learner.text_bytes - fmt.CONTROL_BYTES)


def _warm_up(workers: int) -> Sequence[int]:
    """Start what lasts for the whole run: the fork server, the resource tracker, the shared counters."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "rlsync.transport.board.writer"])
    counters = context.RawArray("Q", 1 + workers * LINE_WORDS)
    process = context.Process(target=torch.set_num_threads, args=(1,))
    process.start()
    process.join()
    process.close()
    return counters


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="soak.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = soak(options.workers, options.seconds, options.seed)
    text = json.dumps(found, indent=2)
    Path(options.out).write_text(text + "\n")
    print(text)
    return int(any(found["bad"].values()))


if __name__ == "__main__":
    raise SystemExit(main())
