"""One segment of a replay buffer's rows: a file that is written once, linked, checked and read."""

from __future__ import annotations

import os
import pickle
import uuid
import weakref
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from rlsync import ConfigError, RlsyncError
from rlsync.seams import first_line, machine, whole_file

#: What reading a damaged segment can raise.
_DAMAGED = (
    OSError,
    RuntimeError,
    ValueError,
    KeyError,
    EOFError,
    zipfile.BadZipFile,
    pickle.UnpicklingError,
)


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive rows, numbered in the order in which they came, in one file, which is never changed."""

    file: str  # its name, which no other segment has, in any run
    first: int  # the number of its first row
    end: int  # the number after that of its last row
    file_bytes: int
    merged: int = 0  # how often its rows were written again; an earlier rlsync wrote true and false
    digest: str = ""  # of the file when it was written; empty where an older rlsync wrote it


class Folder:
    """An open folder. It is the same one after TorchRL has renamed the checkpoint that it is a part of."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        weakref.finalize(self, os.close, self._descriptor)

    def link(self, segment: Segment, into: Path) -> bool:
        """Link a segment's file. False if it is not here, or not whole."""
        try:
            size = os.stat(segment.file, dir_fd=self._descriptor).st_size
            if size == segment.file_bytes:
                os.link(segment.file, into / segment.file, src_dir_fd=self._descriptor)
            return size == segment.file_bytes
        except FileExistsError:  # it was linked there before
            return True
        except FileNotFoundError:
            return False

    def is_gone(self) -> bool:
        """Whether it was deleted, which only an empty folder can be."""
        try:
            return not os.listdir(self._descriptor)  # noqa: PTH208  # it has no path that stays
        except OSError:
            return True


def write(rows: TensorDictBase, folder: Path, first: int, *, merged: int) -> Segment:
    """Write rows as a segment, which is on disk when this returns; RlsyncError if it cannot be written."""
    end = first + len(rows)
    file = folder / f"{first}-{end}.{uuid.uuid4().hex}.pt"
    try:
        # Not through a memory map: on a full disk that ends the process, and a write raises an error.
        with file.open("xb") as opened:
            torch.save(_copied(rows), opened)
            opened.flush()
            # later checkpoints rely on this file and do not write it again
            os.fsync(opened.fileno())
    except (OSError, RuntimeError) as error:  # torch turns the first into the second
        raise unwritten(folder, error) from error
    return Segment(file.name, first, end, file.stat().st_size, merged, whole_file.digest_of(file))


def _copied(rows: TensorDictBase) -> dict[str, Any]:
    """Copies in host memory. Torch would save the whole storage of which ``rows`` is a view."""
    copies = {}
    for name, part in rows.items():
        if isinstance(part, TensorDictBase):
            copies[name] = _copied(part)
        else:
            copies[name] = part.to("cpu", copy=True)
    return copies


def check(folder: Path, segment: Segment) -> None:
    """ConfigError if the file of a segment is missing or damaged."""
    file = folder / segment.file
    with _reading(file):
        if file.stat().st_size != segment.file_bytes:
            raise ValueError(f"it has {file.stat().st_size:,} of {segment.file_bytes:,} bytes")
        # which is what torch writes, with a checksum of each tensor
        with zipfile.ZipFile(file) as archive:
            damaged = archive.testzip()
        if damaged is not None:
            raise ValueError("its checksum is wrong")


def rows_in(folder: Path, segment: Segment) -> TensorDict:
    """The rows of a segment, memory-mapped; ConfigError if the file is missing or damaged."""
    file = folder / segment.file
    with _reading(file):
        rows = torch.load(file, mmap=True, map_location="cpu", weights_only=True)
        return TensorDict(rows, [segment.end - segment.first])


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    """Turn what reading a segment raises into a ConfigError."""
    try:
        yield
    except FileNotFoundError as error:
        raise unread("is missing", file) from error
    except _DAMAGED as error:
        raise unread(f"is damaged: {first_line(error)}", file) from error


def unread(what: str, file: Path) -> ConfigError:
    cure = "resume from another checkpoint, or from a whole copy of this one"
    return ConfigError(f"a part of the checkpoint's replay buffer {what}", str(file), cure)


def unwritten(folder: Path, error: Exception) -> RlsyncError:
    reason: BaseException = error
    if isinstance(error.__context__, OSError):
        reason = error.__context__
    cure = "make room there"
    refusal = machine.machines(error)
    if refusal is not None:
        cure = machine.cure_of(refusal, folder) or cure
    cure += "; the checkpoint before is whole, and resume=RUN goes on from it"
    return RlsyncError(
        f"the replay buffer could not be written: {first_line(reason)}", str(folder), cure
    )
