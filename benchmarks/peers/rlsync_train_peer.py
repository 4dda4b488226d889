"""``rlsync train``, as a user starts it. What its publishes say of frames and updates is reported.

    python benchmarks/peers/rlsync_train_peer.py recipe=dqn recipe.total_frames=12000 [--seconds S] [--cold]

It takes the overrides of ``rlsync train``; the run folder is a temporary one. With ``--seconds`` the run is
interrupted so long after its first publish, which comes before its first frame. With ``--cold`` nothing is
compiled yet. This process reads files of the run, and loads no torch.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rlsync.runs.recipes.run_files import ENDED, RECEIPTS

LOOK_EVERY_S = 0.1
REPORT_EVERY_S = 0.5
INTERRUPTED = 128 + signal.SIGINT
REACHED = "target return reached"


class Publishes:
    """The receipts of a run, of which the newest is printed for the measuring process from time to time."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._read_bytes = 0
        self._next_s = 0.0
        self._told: dict[str, Any] | None = None
        self.first: dict[str, Any] | None = None
        self.newest: dict[str, Any] | None = None

    def look(self) -> None:
        """Read what has come, and report if it is time."""
        if not self._file.exists():
            return
        with self._file.open("rb") as file:
            file.seek(self._read_bytes)
            whole_lines = file.read().rpartition(b"\n")[0]
        if whole_lines:
            self._read_bytes += len(whole_lines) + 1
            lines = whole_lines.splitlines()
            self.first = self.first or json.loads(lines[0])
            self.newest = json.loads(lines[-1])
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + REPORT_EVERY_S
            self.report()

    def report(self) -> None:
        """Print the newest receipt, once."""
        if self.first is None or self.newest is None or self.newest is self._told:
            return
        self._told = self.newest
        said = {
            "steps": self.newest["frames"],
            "updates": self.newest["optim_steps"],
            "seconds": self.newest["time_s"] - self.first["time_s"],
        }
        print("@", json.dumps(said), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--cold", action="store_true")
    options, overrides = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        caches = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/compiled"} if options.cold else {}
        words = [sys.executable, "-m", "rlsync", "train", *overrides, f"run_dir={run_dir}"]
        run = subprocess.Popen(words, env={**os.environ, **caches})
        status = follow(run, Publishes(run_dir / RECEIPTS), options.seconds)
        if status == INTERRUPTED and options.seconds is not None:
            status = 0
        if status == 0:  # else there may be no such file, and the run has said why
            ended = json.loads((run_dir / ENDED).read_text())
            print("@", json.dumps({"reached": int(ended["how"] == REACHED)}), flush=True)
    return status


def follow(run: subprocess.Popen[bytes], publishes: Publishes, seconds: float | None) -> int:
    """Report until the run has ended, and return its exit status."""
    ends_s: float | None = None
    while run.poll() is None:
        publishes.look()
        if seconds is not None and publishes.first is not None:
            if ends_s is None:
                ends_s = time.monotonic() + seconds
            elif time.monotonic() >= ends_s:
                run.send_signal(signal.SIGINT)
                ends_s = math.inf  # once: a second one would end the run without its last words
        time.sleep(LOOK_EVERY_S)
    publishes.look()
    publishes.report()
    return run.returncode


if __name__ == "__main__":
    raise SystemExit(main())
