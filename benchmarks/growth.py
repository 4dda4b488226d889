"""What grows in a long run: memory, descriptors and checkpoints of `rlsync train`, with each logger.

    python benchmarks/growth.py [--loggers csv tensorboard] [--recipe ppo] [--seconds 600] [--out growth.json]

One run for each logger, side by side, with small batches and a checkpoint every 200 of them. Every two
seconds it looks at the learner and its workers: private memory, open descriptors, and the bytes of the newest
checkpoint. The first half of a run fills what is bounded, as receipts and allocators are. In the second half
nothing may grow but the list of versions that a ledger remembers, while it is not full: each figure is the
median of its last quarter less that of the third one.

``--out`` also keeps the learner's batches and bytes once a minute: a step is no slope.

The exit status is 1 if a run has more descriptors, a checkpoint that is larger by more than 1 %, or a learner
or workers that grow by more than 2 MB, and by more than 1 MB for each 1,000 batches.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from rlsync.core.ledger import HISTORY

FRAMES_PER_BATCH, BATCHES_PER_CHECKPOINT, LOOK_EVERY_S = 32, 200, 2.0
ENDS_WITHIN_S = 60.0
LARGER_CHECKPOINT = 0.01
VERSION_KB = 0.02  # two numbers for each version that a ledger remembers
MB = 1e6
GROWTH_MB, GROWTH_MB_PER_1000_BATCHES = 2.0, 1.0
WORDS = (
    *("recipe.total_frames=1000000000", "recipe.target_return=null", "recipe.num_epochs=1"),
    *(f"collector.frames_per_batch={FRAMES_PER_BATCH}", "recipe.batch_size=32"),
    f"checkpoint_every_frames={FRAMES_PER_BATCH * BATCHES_PER_CHECKPOINT}",
)


@dataclass(frozen=True, slots=True)
class Look:
    """One moment of a run."""

    batches: int
    learner_bytes: int
    workers_bytes: int
    descriptors: int
    checkpoint_bytes: int


class Run:
    """A training in a process group of its own."""

    def __init__(self, folder: Path, recipe: str, logger: str) -> None:
        self.folder = folder
        self.looks: list[Look] = []
        words = [f"recipe={recipe}", f"logger={logger}", f"run_dir={folder}", *WORDS]
        if logger == "wandb":
            words.append("logger.kwargs.mode=offline")
        self._output = folder.with_suffix(".txt").open("w")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rlsync", "train", *words],
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def look(self) -> None:
        """Note what there is now, once a batch was counted and a checkpoint is there."""
        if self._process.poll() is not None:
            raise SystemExit(
                f"a run has ended: {self.folder.with_suffix('.txt').read_text()[-2000:]}"
            )
        # a process has ended, or a checkpoint is replaced
        with suppress(OSError, ValueError, KeyError):
            batches = (
                json.loads((self.folder / "statistics.json").read_text())["frames"]
                // FRAMES_PER_BATCH
            )
            files = [
                file.stat().st_size
                for file in (self.folder / "checkpoint").rglob("*")
                if file.is_file()
            ]
            pid = self._process.pid
            workers = sum(map(_private_bytes, _session(pid) - {pid}))
            descriptors = len(list(Path(f"/proc/{pid}/fd").iterdir()))
            if files:
                self.looks.append(
                    Look(batches, _private_bytes(pid), workers, descriptors, sum(files))
                )

    def end(self) -> None:
        """As Ctrl-C ends it."""
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(ENDS_WITHIN_S)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._output.close()

    def figures(self) -> dict[str, float]:
        """What has grown in the second half of the looks."""
        quarter = len(self.looks) // 4
        third, last = (
            _median(part) for part in (self.looks[2 * quarter : 3 * quarter], self.looks[-quarter:])
        )
        grown = {name: last[name] - third[name] for name in last}
        return {
            "batches": self.looks[-1].batches,
            "batches_between": grown["batches"],
            "learner_mb": last["learner_bytes"] / MB,
            "learner_growth_mb": grown["learner_bytes"] / MB,
            "workers_growth_mb": grown["workers_bytes"] / MB,
            "descriptors": last["descriptors"],
            "descriptors_growth": grown["descriptors"],
            "checkpoint_kb": last["checkpoint_bytes"] / 1e3,
            "checkpoint_growth_kb": grown["checkpoint_bytes"] / 1e3,
        }


def _median(looks: list[Look]) -> dict[str, float]:
    rows = [asdict(look) for look in looks]
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def _session(leader: int) -> set[int]:
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if os.getsid(int(entry.name)) == leader:
                found.add(int(entry.name))
    return found


def _private_bytes(pid: int) -> int:
    text = Path(f"/proc/{pid}/status").read_text()
    (line,) = (line for line in text.splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def grows(figures: dict[str, float]) -> list[str]:
    """What of a run is not flat."""
    allowed_mb = max(GROWTH_MB, GROWTH_MB_PER_1000_BATCHES * figures["batches_between"] / 1000)
    bad = [who for who in ("learner", "workers") if figures[f"{who}_growth_mb"] > allowed_mb]
    bad += ["descriptors"] * (figures["descriptors_growth"] > 0)
    filling_kb = VERSION_KB * figures["batches_between"] * (figures["batches"] < HISTORY)
    allowed_kb = LARGER_CHECKPOINT * figures["checkpoint_kb"] + filling_kb
    return bad + ["checkpoint"] * (figures["checkpoint_growth_kb"] > allowed_kb)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--loggers", nargs="+", default=["csv", "tensorboard"])
    parser.add_argument("--recipe", default="ppo")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(arguments)
    runs: dict[str, Run] = {}
    with tempfile.TemporaryDirectory(prefix="growth-") as folder:
        try:
            for logger in given.loggers:
                runs[logger] = Run(Path(folder) / logger, given.recipe, logger)
            until_s = time.monotonic() + given.seconds
            while time.monotonic() < until_s:
                time.sleep(LOOK_EVERY_S)
                for run in runs.values():
                    run.look()
        finally:
            for run in runs.values():
                run.end()
    found = {logger: run.figures() for logger, run in runs.items()}
    bad = {logger: grows(figures) for logger, figures in found.items()}
    for logger, figures in found.items():
        shown = "  ".join(f"{name} {value:,.1f}" for name, value in figures.items())
        print(f"{logger}: {shown}  grows: {', '.join(bad[logger]) or 'nothing'}", flush=True)
    if given.out is not None:
        minutes = {
            name: [(at.batches, at.learner_bytes) for at in run.looks[::30]]
            for name, run in runs.items()
        }
        given.out.write_text(
            json.dumps({"found": found, "bad": bad, "learner_by_minute": minutes}) + "\n"
        )
    return int(any(bad.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
