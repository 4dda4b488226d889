"""How a run ended, as a file in its folder. Loads the standard library only: ``rlsync status`` reads it."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from rlsync.core.whole_file import record_in, write_whole
from rlsync.recipes.run_files import BOARD, CHECKPOINT, ENDED, STATISTICS


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a run.

    Example:
        >>> print(Ended("interrupted", "2026-11-20 18:00:00", 130, 4096, 7, checkpoint="runs/a/checkpoint"))
        ended 2026-11-20 18:00:00: interrupted  frames 4,096  version 7
        checkpoint runs/a/checkpoint
    """

    # "total_frames collected", "target return reached", "interrupted" (Ctrl-C), "terminated" or "failed"
    how: str
    at: str  # local time, 2026-11-20 18:00:00
    status: int  # the exit status
    frames: int | None = None  # collected; None if training had not begun
    version: int | None = None  # the newest published one; None if training had not begun
    error: str = ""  # what the run failed with, as it was printed
    checkpoint: str | None = None

    def __str__(self) -> str:
        counts = "" if self.frames is None else f"  frames {self.frames:,}  version {self.version}"
        lines = [f"ended {self.at}: {self.how}{counts}"]
        lines += [self.error] if self.error else []
        lines += [f"checkpoint {self.checkpoint}"] if self.checkpoint else []
        return "\n".join(lines)

    def write(self, run: Path) -> None:
        """Leave this in a run's folder, and take the board's address away: the board is gone."""
        text = json.dumps(asdict(self), indent=2) + "\n"
        write_whole(run / ENDED, lambda beside: beside.write_text(text))
        (run / BOARD).unlink(missing_ok=True)


def begin(run: Path) -> None:
    """Take away what an earlier run in this folder has left: a new one begins."""
    for name in (ENDED, BOARD, STATISTICS):
        (run / name).unlink(missing_ok=True)
    # What TorchRL was writing when its process was killed. It never becomes a checkpoint.
    for half in run.glob(f".{CHECKPOINT}.stage-*"):
        shutil.rmtree(half, ignore_errors=True)
    # A checkpoint that was replaced, by a process that was killed before it had removed it.
    if (run / CHECKPOINT / "manifest.json").is_file():
        for replaced in run.glob(f".{CHECKPOINT}.backup-*"):
            shutil.rmtree(replaced, ignore_errors=True)


def ended(run: Path) -> Ended | None:
    """How the run in this folder ended; None if it has not, or was killed."""
    return record_in(run / ENDED, Ended, "how the run ended")


def now() -> str:
    """Local time, to the second."""
    return at(datetime.now().timestamp())


def at(timestamp: float) -> str:
    """Local time of a timestamp.

    Example:
        >>> len(at(0.0))
        19
    """
    return datetime.fromtimestamp(timestamp).strftime("%Y-%m-%d %H:%M:%S")
