"""The bytes of a board, and how they are read: shared by the writer and the readers.

::

    page 0    header, never changed: magic, format, board id
    control   head (newest version and its slot), slot count, closed, what is asked of the readers
    slots     one line a slot: state, version, time, where its image and its layout lie
    readers   one line a reader: pid, adopted version, heartbeat, leased slot, sizes of its notes
    notes     room for two notes a reader, sparse: what stands in it, and its answer to the writer
    then      page-aligned layouts (JSON) and slot images, as they come to be needed

All words are 64 bits. ``head`` packs version and slot, so that one aligned read sees both.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from rlsync.transport.shared_file import PAGE_BYTES

MAGIC = 0x44524F_4259_4C52  # "RLYBORD"
FORMAT = 3

MAX_SLOTS = 1024
MAX_READERS = 1022
LINE_WORDS = 8

_CONTROL = PAGE_BYTES // 8
HEAD = _CONTROL
SLOT_COUNT = _CONTROL + 1
CLOSED = _CONTROL + 2
ASKED = _CONTROL + 3  # how often the writer has asked
ASKED_FROM = _CONTROL + 4  # the lowest version of which it may be answered
_SLOT_LINES = _CONTROL + LINE_WORDS
_READER_LINES = _SLOT_LINES + MAX_SLOTS * LINE_WORDS
CONTROL_BYTES = -(-(_READER_LINES + MAX_READERS * LINE_WORDS) * 8 // PAGE_BYTES) * PAGE_BYTES

NOTE_BYTES = 1 << 20
# File offsets, not memory: untouched pages cost nothing.
DATA_AT = CONTROL_BYTES + 2 * MAX_READERS * NOTE_BYTES

SLOT_STATE, SLOT_VERSION, SLOT_TIME_NS = range(3)
SLOT_IMAGE_AT, SLOT_IMAGE_BYTES, SLOT_LAYOUT_AT, SLOT_LAYOUT_BYTES = range(3, 7)
READER_PID, READER_ADOPTED, READER_HEARTBEAT_NS, READER_LEASE = range(4)
READER_NOTE_BYTES, READER_ANSWER_BYTES = range(4, 6)

# Lock offsets lie far behind the data: advisory locks need no bytes under them.
SLOT_LOCK = 1 << 40
READER_LOCK = 1 << 41
WRITER_LOCK = 1 << 42

_SLOT_BITS = 10


class Note(IntEnum):
    """What a reader tells the writer; the value is the word of its line that holds the size."""

    STANDS = READER_NOTE_BYTES  # which leaves stand in it
    ANSWER = READER_ANSWER_BYTES  # what it acts with, when it was asked


class SlotState(IntEnum):
    """What a slot line says of its image."""

    EMPTY = 0
    WRITING = 1
    READY = 2
    RETIRED = 3  # laid out for fewer leaves than are published now; never written again


def pack_head(version: int, slot: int) -> int:
    """The head word."""
    return version << _SLOT_BITS | slot


def unpack_head(head: int) -> tuple[int, int]:
    """Version and slot of a head word; version 0 means that nothing was published.

    Example:
        >>> unpack_head(pack_head(7, 3))
        (7, 3)
    """
    return head >> _SLOT_BITS, head & (1 << _SLOT_BITS) - 1


def slot_line(slot: int) -> int:
    """Index of the first word of a slot's line."""
    return _SLOT_LINES + slot * LINE_WORDS


def reader_line(reader: int) -> int:
    """Index of the first word of a reader's line."""
    return _READER_LINES + reader * LINE_WORDS


def note_at(reader: int, kind: Note) -> int:
    """Offset of a reader's note."""
    return CONTROL_BYTES + (2 * reader + (kind is Note.ANSWER)) * NOTE_BYTES


def whole_pages(size_bytes: int) -> int:
    """``size_bytes`` rounded up to whole pages, at least one."""
    return max(1, -(-size_bytes // PAGE_BYTES)) * PAGE_BYTES


@dataclass(frozen=True, slots=True)
class ReaderStatus:
    """What the board knows of one reader.

    Args:
        reader: its number, a worker's index.
        pid: its process.
        alive: whether the process still holds its line.
        state: ``"running"``, ``"stopped"`` or ``"dead"``.
        adopted_version: the version it acts with; 0 before its first adoption.
        lag_versions: newest published version minus the adopted one.
        heartbeat_age_s: seconds since it last reached a batch boundary.
    """

    reader: int
    pid: int
    alive: bool
    state: str
    adopted_version: int
    lag_versions: int
    heartbeat_age_s: float

    def __str__(self) -> str:
        return (
            f"worker {self.reader} (pid {self.pid}, {self.state}, acts with version "
            f"{self.adopted_version}, {self.lag_versions} behind, last seen "
            f"{self.heartbeat_age_s:.1f} s ago)"
        )
