"""A replay buffer in checkpoints: every row is written to disk once, in a segment with the new ones.

A checkpoint has hard links to older segments, which cost no room. So each is complete by itself, and the file
system frees a segment with its last name. TorchRL's own checkpointer writes the whole storage each time.
"""

from __future__ import annotations

import errno
import json
import os
import pickle
import uuid
import weakref
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import TensorDictReplayBuffer, TensorStorageCheckpointer
from torchrl.data.replay_buffers import TensorStorage

from rlsync import ConfigError, RlsyncError, RlsyncWarning
from rlsync.runs.compat import replay
from rlsync.seams import first_line, machine, warn, whole_file

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
    merged: bool = False  # whether it has the rows of many small segments
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


def write(rows: TensorDictBase, folder: Path, first: int, *, merged: bool) -> Segment:
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


def read(folder: Path, segment: Segment) -> TensorDict:
    """The rows of a segment, memory-mapped; ConfigError if the file is missing or damaged."""
    file = folder / segment.file
    try:
        if file.stat().st_size != segment.file_bytes:
            raise ValueError(f"it has {file.stat().st_size:,} of {segment.file_bytes:,} bytes")
        # which is what torch writes, with a checksum of each tensor
        with zipfile.ZipFile(file) as archive:
            damaged = archive.testzip()
        if damaged is not None:
            raise ValueError("its checksum is wrong")
        rows = torch.load(file, mmap=True, map_location="cpu", weights_only=True)
        return TensorDict(rows, [segment.end - segment.first])
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


INDEX = "rows.json"  #: says which rows a checkpoint has, and in which segments they are
#: A segment has at most so many bytes of rows. A segment stays until its last row leaves the buffer, so this
#: also bounds how much of a checkpoint is rows that nobody needs any more.
SEGMENT_BYTES = 64 * 2**20
#: with so many segments of single checkpoints, these are written once more, as one
MOST_SEGMENTS = 1_000


class RowSegments(TensorStorageCheckpointer):
    """Writes only the new rows of a round-robin buffer.

    It links older segments or writes them again, once at most. Stored rows must not change:
    ``TensorDictReplayBuffer.extend`` is the only way in.
    """

    def __init__(
        self,
        buffer: TensorDictReplayBuffer,
        *,
        most_segments: int = MOST_SEGMENTS,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        super().__init__()
        self._buffer = buffer
        self._most_segments = most_segments
        self._segment_bytes = segment_bytes
        self._segments: list[Segment] = []
        self._folders: list[Folder] = []
        self._has_warned = False

    def dumps(self, storage: TensorStorage, path: str | Path) -> None:
        """Write the rows that no segment has, and link the others; RlsyncError if that fails."""
        folder = Path(path)
        folder.mkdir(exist_ok=True)
        known = self._segments
        end = replay.rows_given(self._buffer)
        if end is None or (known and known[-1].end > end):
            known = []  # the rows are numbered anew, so nothing on disk is of use
        if end is None:
            end = len(storage)
        first = end - len(storage)

        # Segments of which a row is left are linked; many small ones are written once more, as one.
        alive = [segment for segment in known if segment.end > first]
        single = [segment for segment in alive if not segment.merged]
        merging = len(single) >= self._most_segments
        linked = []
        for segment in alive:
            if (segment.merged or not merging) and self._link(segment, folder):
                linked.append(segment)

        new = self._written(storage, folder, _gaps(first, end, linked), merged=merging)
        segments = sorted(linked + new, key=lambda segment: segment.first)
        index = {
            "capacity": storage.max_size,
            "first": first,
            "end": end,
            "segments": list(map(asdict, segments)),
        }
        (folder / INDEX).write_text(json.dumps(index))
        self._segments = segments
        self._remember(folder)

    def _written(
        self,
        storage: TensorStorage,
        folder: Path,
        gaps: Iterable[tuple[int, int]],
        *,
        merged: bool,
    ) -> list[Segment]:
        """The rows that no segment has, in new ones."""
        row_bytes = 0
        if len(storage):
            for leaf in storage.get(slice(0, 1)).values(True, True):
                row_bytes += leaf.nbytes
        rows = max(1, self._segment_bytes // max(1, row_bytes))
        segments = []
        for first, end in gaps:
            for number, place in _pieces(first, end, rows, storage.max_size):
                segments.append(write(storage.get(place), folder, number, merged=merged))
        return segments

    def loads(self, storage: TensorStorage, path: str | Path) -> None:
        """Put a checkpoint's rows, TorchRL's too, at their places; ConfigError if any is damaged.

        Of rows that an earlier rlsync stored, what the newest ones have is kept.
        """
        folder = Path(path)
        self._segments = []
        if not (folder / INDEX).exists() and (folder / "storage_metadata.json").exists():
            super().loads(storage, folder)
            return
        first, segments = _read_index(folder / INDEX, storage.max_size)
        replay.forget_rows(storage)
        all_rows = [read(folder, segment) for segment in segments]
        newest = []
        if all_rows:
            newest = list(all_rows[-1].keys(True, True))
        for segment, whole in zip(segments, all_rows, strict=True):
            rows = whole.select(*newest, strict=False)[max(0, first - segment.first) :]
            at = max(first, segment.first) % storage.max_size
            storage.set(slice(at, at + len(rows)), rows.to(storage.device))
        self._segments = segments
        self._remember(folder)

    def _remember(self, folder: Path) -> None:
        """Look for segments in this folder from now on, and no more in folders that were deleted."""
        still = [other for other in self._folders if not other.is_gone()]
        self._folders = [*still[-3:], Folder(folder)]

    def _link(self, segment: Segment, into: Path) -> bool:
        """Give a segment a second name, in a checkpoint that is being written. False if that cannot be."""
        for folder in reversed(self._folders):
            try:
                if folder.link(segment, into):
                    return True
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise unwritten(into, error) from error
                if error.errno != errno.EXDEV and not self._has_warned:
                    self._has_warned = True
                    problem = "the replay buffer's rows are written again, in full: files cannot be linked"
                    cure = "give a run_dir on a disk with hard links, or recipe.buffer_checkpointed=false"
                    warn(RlsyncWarning(f"{problem} ({error.strerror})", str(into.parent), cure))
        return False


def digests_in(index: Path) -> dict[str, str]:
    """The digests of the segments that an index names, by file, as far as they are known."""
    segments = json.loads(index.read_text())["segments"]
    return {segment["file"]: segment["digest"] for segment in segments if segment["digest"]}


def _gaps(first: int, end: int, segments: Iterable[Segment]) -> Iterator[tuple[int, int]]:
    """The rows from ``first`` to before ``end`` that are in no segment; segments in their order."""
    for segment in segments:
        if first < segment.first:
            yield first, segment.first
        first = max(first, segment.end)
    if first < end:
        yield first, end


def _pieces(first: int, end: int, rows: int, capacity: int) -> Iterator[tuple[int, slice]]:
    """Parts of at most ``rows`` rows that lie in one piece: the number of the first row, and the places."""
    while first < end:
        at = first % capacity
        count = min(end - first, rows, capacity - at)
        yield first, slice(at, at + count)
        first += count


def _read_index(file: Path, capacity: int) -> tuple[int, list[Segment]]:
    """The first row, and the segments that have it and all after it."""
    try:
        index = json.loads(file.read_text())
        rows = index["capacity"]
        first = index["first"]
        end = index["end"]
        segments = [Segment(**segment) for segment in index["segments"]]
    except FileNotFoundError as error:
        raise unread("is missing", file) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise unread(f"is damaged: {first_line(error)}", file) from error
    if rows != capacity:
        problem = (
            f"the checkpoint has a replay buffer of {rows:,} rows, and this one holds {capacity:,}"
        )
        raise ConfigError(problem, str(file.parent), f"give recipe.buffer_frames={rows}")
    if list(_gaps(first, end, segments)):
        raise unread("is damaged: some rows are in no segment", file)
    return first, segments
