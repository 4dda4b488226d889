"""A replay buffer in checkpoints: every row is written to disk once, in a segment with the new ones.

A checkpoint has hard links to older segments, which cost no room. So each is complete by itself, and the file
system frees a segment with its last name. TorchRL's own checkpointer writes the whole storage each time.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from tensordict import NestedKey, TensorDictBase
from torchrl.data import TensorDictReplayBuffer, TensorStorageCheckpointer
from torchrl.data.replay_buffers import TensorStorage

from rlsync import ConfigError, RlsyncWarning
from rlsync.runs.compat import replay
from rlsync.runs.recipes.replay.frames import FIRST_FRAME, FRAME, PICTURES, Frames
from rlsync.runs.recipes.replay.segment_files import (
    Folder,
    Segment,
    check,
    rows_in,
    unread,
    unwritten,
    write,
)
from rlsync.seams import first_line, warn

INDEX = "rows.json"  #: says which rows a checkpoint has, and in which segments they are
FRAMES = "frames"  #: the folder of the frames that rows read, with an index and segments of its own
#: A segment has at most so many bytes of rows. A segment stays until its last row leaves the buffer, so this
#: also bounds how much of a checkpoint is rows that nobody needs any more.
SEGMENT_BYTES = 64 * 2**20
#: So many small segments become one. A file costs 70 us of processor time in each checkpoint that links it.
MOST_SEGMENTS = 16


class Ring(Protocol):
    """Rows that are numbered in the order in which they came: row n lies at place ``n % max_size``."""

    max_size: int
    device: Any

    def get(self, places: slice) -> Any: ...

    def set(self, places: slice, rows: Any) -> Any: ...


class Segments:
    """The rows of a ring in the files of checkpoints, each row in one segment.

    A checkpoint links the segments of the one before, and writes what is new. So that files stay few,
    ``most_segments`` small ones whose rows were written equally often are written once more, as one. That is
    at most ``segment_bytes`` in a checkpoint; a row is written again as often as it takes small segments to
    grow to this size: twice for checkpoints of 1 MB.
    """

    def __init__(self, *, most_segments: int, segment_bytes: int) -> None:
        self._most_segments = most_segments
        self._segment_bytes = segment_bytes
        self._segments: list[Segment] = []
        self._folders: list[Folder] = []
        self._has_warned = False

    def save(self, ring: Ring, folder: Path, first: int, end: int, *, anew: bool = False) -> None:
        """Write the rows from ``first`` to before ``end`` that no segment has, and link the others.

        RlsyncError if that fails. ``anew``: rows have other numbers than before, so segments are of no use.
        """
        folder.mkdir(exist_ok=True)
        known = self._segments
        if anew or (known and known[-1].end > end):
            known = []

        # Segments of which a row is left are linked, but for those that become one.
        alive = [segment for segment in known if segment.end > first]
        run = self._small_run(alive)
        linked = []
        for segment in alive:
            if segment not in run and self._link(segment, folder):
                linked.append(segment)

        new: list[Segment] = []
        for gap in _gaps(first, end, linked):
            for merged, rows in _apart(gap, run):
                new += self._written(ring, folder, *rows, merged=merged)
        segments = sorted(linked + new, key=lambda segment: segment.first)
        index = {
            "capacity": ring.max_size,
            "first": first,
            "end": end,
            "segments": list(map(asdict, segments)),
        }
        (folder / INDEX).write_text(json.dumps(index))
        self._segments = segments
        self._remember(folder)

    def load(self, ring: Ring, folder: Path, index: _Index) -> None:
        """Put the rows that an index names at their places; ConfigError if any is damaged.

        All segments are checked before the first row is put, and one at a time is in memory beside the ring.
        """
        for segment in index.segments:
            check(folder, segment)
        newest: list[NestedKey] = []
        if index.segments:
            newest = list(rows_in(folder, index.segments[-1]).keys(True, True))
        for segment in index.segments:
            rows = rows_in(folder, segment).select(*newest, strict=False)
            rows = rows[max(0, index.first - segment.first) :]
            number = max(index.first, segment.first)
            for part, places in _pieces(number, segment.end, len(rows), ring.max_size):
                at = part - number
                some = rows[at : at + places.stop - places.start]
                ring.set(places, some.to(ring.device))
        self._segments = index.segments
        self._remember(folder)

    def forget(self) -> None:
        """Link no segment from now on."""
        self._segments = []

    def _small_run(self, alive: Sequence[Segment]) -> list[Segment]:
        """Small segments in a row that make one together; none where there are few of a kind."""
        small: dict[int, list[Segment]] = {}
        for segment in alive:
            if 2 * segment.file_bytes <= self._segment_bytes:
                small.setdefault(segment.merged, []).append(segment)
        for _, candidates in sorted(small.items()):
            run = []
            if len(candidates) >= self._most_segments:
                run = self._first_run(candidates)
            if run:
                return run
        return []

    def _first_run(self, candidates: Sequence[Segment]) -> list[Segment]:
        """The oldest of these, two or more, whose rows follow each other and make one segment together."""
        run: list[Segment] = []
        for segment in candidates:
            run_bytes = sum(each.file_bytes for each in run) + segment.file_bytes
            if run and (run[-1].end != segment.first or run_bytes > self._segment_bytes):
                if len(run) > 1:
                    break
                run = []
            run.append(segment)
        return run if len(run) > 1 else []

    def _written(
        self, ring: Ring, folder: Path, first: int, end: int, *, merged: int
    ) -> list[Segment]:
        """These rows, in new segments."""
        row_bytes = 0
        for leaf in ring.get(slice(0, 1)).values(True, True):
            row_bytes += leaf.nbytes
        rows = max(1, self._segment_bytes // max(1, row_bytes))
        segments = []
        for number, places in _pieces(first, end, rows, ring.max_size):
            segments.append(write(ring.get(places), folder, number, merged=merged))
        return segments

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


class RowSegments(TensorStorageCheckpointer):
    """Writes only the new rows of a round-robin buffer, and only the new ones of its ``frames``.

    Stored rows must not change: ``TensorDictReplayBuffer.extend`` is the only way in.
    """

    def __init__(
        self,
        buffer: TensorDictReplayBuffer,
        frames: Frames | None = None,
        *,
        most_segments: int = MOST_SEGMENTS,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        super().__init__()
        self._buffer = buffer
        self._frames = frames
        self._rows = Segments(most_segments=most_segments, segment_bytes=segment_bytes)
        self._pictures = Segments(most_segments=most_segments, segment_bytes=segment_bytes)

    def dumps(self, storage: TensorStorage, path: str | Path) -> None:
        """Write the rows and frames that no segment has, and link the others; RlsyncError if that fails."""
        folder = Path(path)
        end = replay.rows_given(self._buffer)
        anew = end is None
        if end is None:
            end = len(storage)
        first = end - len(storage)
        self._rows.save(storage, folder, first, end, anew=anew)
        frames = self._frames
        if frames is not None and frames.are_read_by(storage):
            self._pictures.save(frames, folder / FRAMES, frames.first, frames.end)

    def loads(self, storage: TensorStorage, path: str | Path) -> None:
        """Put a checkpoint's rows, TorchRL's too, at their places; ConfigError if any is damaged.

        Of rows that an earlier rlsync stored, what the newest ones have is kept.
        """
        folder = Path(path)
        self._rows.forget()
        self._pictures.forget()
        if not (folder / INDEX).exists() and (folder / "storage_metadata.json").exists():
            super().loads(storage, folder)
            return
        index = _Index.read(folder / INDEX)
        if index.capacity != storage.max_size:
            problem = (
                f"the checkpoint has a replay buffer of {index.capacity:,} rows, and this one holds "
                f"{storage.max_size:,}"
            )
            raise ConfigError(problem, str(folder), f"give recipe.buffer_frames={index.capacity}")
        if (folder / FRAMES / INDEX).exists():
            self._load_frames(folder / FRAMES)
        replay.forget_rows(storage)
        self._rows.load(storage, folder, index)

    def _load_frames(self, folder: Path) -> None:
        if self._frames is None:
            problem = "the checkpoint has a replay buffer of frames, and this run stores none"
            cure = "give the env that the run had: env.frame_stack or env.stack_num"
            raise ConfigError(problem, str(folder), cure)
        index = _Index.read(folder / INDEX)
        self._frames.expect(index.first, index.end)
        self._pictures.load(self._frames, folder, index)


def stored_row(checkpoint: Path, number: int) -> TensorDictBase | None:
    """A row that a checkpoint has, with its pictures; None if it lacks that one. ConfigError if it is damaged."""
    for index in checkpoint.rglob(INDEX):
        folder = index.parent
        row = None
        if folder.name != FRAMES:
            row = _row(folder, number)
        if row is None:
            continue
        if FIRST_FRAME in row:
            for key in PICTURES:
                shown = [_row(folder / FRAMES, frame) for frame in row[key].tolist()]
                row.set(key, torch.cat([each[FRAME] for each in shown if each is not None]))
        return row
    return None


def _row(folder: Path, number: int) -> TensorDictBase | None:
    for segment in _Index.read(folder / INDEX).segments:
        if segment.first <= number < segment.end:
            check(folder, segment)
            return rows_in(folder, segment)[number - segment.first]
    return None


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


def _apart(gap: tuple[int, int], run: Sequence[Segment]) -> Iterator[tuple[int, tuple[int, int]]]:
    """The rows of a gap that are of a run apart from others, and how often they were written again then."""
    first, end = gap
    parts = [(0, first, end)]
    if run:
        run_first = run[0].first
        run_end = run[-1].end
        parts = [(0, first, run_first), (run[0].merged + 1, run_first, run_end), (0, run_end, end)]
    for merged, part_first, part_end in parts:
        rows = (max(first, part_first), min(end, part_end))
        if rows[0] < rows[1]:
            yield merged, rows


@dataclass(frozen=True, slots=True)
class _Index:
    """Which rows a checkpoint has, and the segments that have them."""

    capacity: int
    first: int
    end: int
    segments: list[Segment]

    @classmethod
    def read(cls, file: Path) -> _Index:
        try:
            index = json.loads(file.read_text())
            segments = [Segment(**segment) for segment in index["segments"]]
            read = cls(index["capacity"], index["first"], index["end"], segments)
        except FileNotFoundError as error:
            raise unread("is missing", file) from error
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise unread(f"is damaged: {first_line(error)}", file) from error
        if list(_gaps(read.first, read.end, segments)):
            raise unread("is damaged: some rows are in no segment", file)
        return read
