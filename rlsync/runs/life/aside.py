"""What a run wrote after the checkpoint that it goes on from: it makes that again, so it is set aside."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlsync.runs.evaluation.process import video_of_version
from rlsync.runs.life.state import REPEATED, Repeated
from rlsync.runs.recipes.checkpoints import AboutRun, appended_to
from rlsync.runs.recipes.run_files import ASIDE, LIVES, RECEIPTS, STARTED, VERSIONS, VIDEOS
from rlsync.seams import whole_file

#: What goes on from whatever an earlier beginning has left: no version number is given out twice.
_STAYS = (ASIDE, LIVES, STARTED, VERSIONS)


def set_aside(run: Path, checkpoint: Path) -> None:
    """Move what the files of a run say of later than a checkpoint to a folder of its own."""
    sizes = AboutRun.of(checkpoint).bytes
    if not sizes:  # an earlier rlsync wrote it, and nobody knows what came later
        return
    longer = {}
    for name, size in appended_to(run).items():
        if size > sizes.get(name, 0):
            longer[name] = sizes.get(name, 0)
    if not longer:
        return
    folder = _next_folder(run)
    for name, size in longer.items():
        file = run / name
        tail = folder / name
        tail.parent.mkdir(parents=True, exist_ok=True)
        tail.write_bytes(file.read_bytes()[size:])
        with file.open("r+b") as opened:
            opened.truncate(size)
    for receipt in _receipts_in(folder / RECEIPTS):
        film = video_of_version(run / VIDEOS, receipt.get("version", 0))
        if film.is_file():
            (folder / VIDEOS).mkdir(exist_ok=True)
            shutil.move(film, folder / VIDEOS)
    _note(folder, _frames_in(run / RECEIPTS), _frames_in(folder / RECEIPTS))


def set_all_aside(run: Path) -> None:
    """Move all that a run has left which was killed before its first checkpoint."""
    names = [path for path in run.iterdir() if path.name not in _STAYS and path.name[0] != "."]
    folder = _next_folder(run)
    for path in names:
        shutil.move(path, folder / path.name)
    _note(folder, 0, _frames_in(folder / RECEIPTS))


def _next_folder(run: Path) -> Path:
    number = 1 + max((int(path.name) for path in (run / ASIDE).glob("[0-9]*")), default=0)
    folder = run / ASIDE / str(number)
    folder.mkdir(parents=True)
    return folder


def _note(folder: Path, from_frames: int, to_frames: int) -> None:
    text = json.dumps(asdict(Repeated(from_frames, max(from_frames, to_frames))))
    whole_file.write_whole(folder / REPEATED, lambda beside: beside.write_text(text))


def _frames_in(receipts: Path) -> int:
    """After how many frames the last of these receipts was written."""
    frames = (int(receipt["frames"]) for receipt in _receipts_in(receipts) if "frames" in receipt)
    return next(frames, 0)


def _receipts_in(file: Path) -> Iterator[dict[str, Any]]:
    """What is whole in the lines of a file, whichever rlsync has written it; the newest first."""
    if not file.is_file():
        return
    for line in reversed(file.read_bytes().splitlines()):
        with suppress(ValueError):  # a process was killed while it wrote
            yield json.loads(line)
