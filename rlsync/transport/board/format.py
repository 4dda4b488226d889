"""The bytes of a board, and how they are read: shared by the writer and the readers.

::

    page 0    header, never changed: magic, format, board id
    control   head (newest version and its slot), slot count, closed, the question to the readers, generation,
              a version that stays
    slots     one line for each slot: state, version, where its image and its layout are, generation
    readers   one line for each reader: pid, adopted version, heartbeat, sizes of its notes
    notes     room for a note of each kind for each reader, sparse
    then      page-aligned layouts (JSON) and slot images, added when they are needed

All words are 64 bits. ``head`` packs version and slot, so that one aligned read sees both.
"""

from __future__ import annotations

import time
from enum import IntEnum

import psutil

from rlsync.core.errors import BoardClosed
from rlsync.core.ledger import NOTHING, Stamp
from rlsync.transport.contract import Note, ReaderStatus
from rlsync.transport.shared_file import PAGE_BYTES, SharedFile, whole_pages

MAGIC = 0x44524F_4259_4C52  # "RLYBORD"
FORMAT = 8

# 2 * readers + 2 slots always suffice: a reader that adopts by alias holds two leases for a moment, one slot
# has the newest version, and one is written. Most runs use three.
MAX_SLOTS = 1024
MAX_READERS = 1022
#: The last line is that of a process that plays and scores versions; no worker has it.
EVALUATOR = MAX_READERS - 1
LINE_WORDS = 8

_CONTROL = PAGE_BYTES // 8
HEAD = _CONTROL
SLOT_COUNT = _CONTROL + 1
CLOSED = _CONTROL + 2
ASKED = _CONTROL + 3  # how often the learner has asked
ASKED_FROM = _CONTROL + 4  # the lowest version that an answer may be about
GENERATION = _CONTROL + 5  # of the newest version; it never falls
STAYS = _CONTROL + 6  # a version whose slot is not written to; 0: none
_SLOT_LINES = _CONTROL + LINE_WORDS
_READER_LINES = _SLOT_LINES + MAX_SLOTS * LINE_WORDS
CONTROL_BYTES = whole_pages((_READER_LINES + MAX_READERS * LINE_WORDS) * 8)

# Readers leave notes because the learner must know their leaves before it publishes. Asking over TorchRL's
# pipes while a collector starts makes a worker drop its rollout.
NOTE_BYTES = 1 << 20
# These are offsets in the file. Pages that nobody writes to take no memory.
DATA_AT = CONTROL_BYTES + len(Note) * MAX_READERS * NOTE_BYTES

# A slot's line says where its image and its layout are: a destination may join later, because its source is
# known only when the map is. The board is then laid out anew, and old slots are retired.
SLOT_STATE, SLOT_VERSION, SLOT_GENERATION = range(3)
SLOT_IMAGE_AT, SLOT_IMAGE_BYTES, SLOT_LAYOUT_AT, SLOT_LAYOUT_BYTES = range(3, 7)
READER_PID, READER_ADOPTED, READER_HEARTBEAT_NS = range(3)
_NOTES = tuple(Note)
#: What each reader adopted last, in their order.
ADOPTED_WORDS = slice(
    _READER_LINES + READER_ADOPTED, _READER_LINES + MAX_READERS * LINE_WORDS, LINE_WORDS
)
_FIRST_NOTE_WORD = 3  # of a reader's line

# Locks are at offsets far behind the data: a byte-range lock needs no bytes in the file.
SLOT_LOCK = 1 << 40
READER_LOCK = 1 << 41
WRITER_LOCK = 1 << 42
# one byte for each slot: held by ranks of the learner while they write their parts
RANK_LOCK = 1 << 43

_SLOT_BITS = 10


class SlotState(IntEnum):
    """The state of a slot's image."""

    EMPTY = 0
    WRITING = 1
    READY = 2
    RETIRED = 3  # laid out for fewer leaves than are published now; never written again


def pack_head(version: int, slot: int) -> int:
    return version << _SLOT_BITS | slot


def unpack_head(head: int) -> tuple[int, int]:
    """Version and slot of a head word; version 0 means that nothing was published."""
    return head >> _SLOT_BITS, head & (1 << _SLOT_BITS) - 1


def slot_line(slot: int) -> int:
    """Index of the first word of a slot's line."""
    return _SLOT_LINES + slot * LINE_WORDS


def reader_line(reader: int) -> int:
    """Index of the first word of a reader's line."""
    return _READER_LINES + reader * LINE_WORDS


def note_bytes(reader: int, kind: Note) -> int:
    """Index of the word that holds the size of a reader's note."""
    return reader_line(reader) + _FIRST_NOTE_WORD + _NOTES.index(kind)


def note_at(reader: int, kind: Note) -> int:
    """Offset of a reader's note in the file."""
    return CONTROL_BYTES + (len(_NOTES) * reader + _NOTES.index(kind)) * NOTE_BYTES


class BoardWatch:
    """Reads a board's reader lines, from any process of this user; asks the kernel who is alive."""

    def __init__(self, file: SharedFile, words: memoryview) -> None:
        self._file = file
        self._words = words

    @property
    def newest(self) -> int:
        """The version that readers see; 0 before the first publish."""
        return unpack_head(self._words[HEAD])[0]

    @property
    def newest_stamp(self) -> Stamp:
        if self.newest:
            return Stamp(self._words[GENERATION], self.newest)
        return NOTHING

    def let_stay(self, version: int) -> None:
        """Keep the newest version for a reader that is yet to adopt it, in place of the one that was kept."""
        self._words[STAYS] = version

    def status(self) -> list[ReaderStatus]:
        """One entry for each reader that attached and did not leave by itself."""
        pids = self._words[reader_line(0) : reader_line(MAX_READERS) : LINE_WORDS].tolist()
        there = (self.status_of(reader) for reader, pid in enumerate(pids) if pid)
        return [status for status in there if status is not None]

    def adopted(self, below: int) -> list[int]:
        count = min(below, MAX_READERS)
        return self._words[ADOPTED_WORDS][:count].tolist()

    def age_s(self, reader: int) -> float:
        beat_ns = self._words[reader_line(reader) + READER_HEARTBEAT_NS]
        return max(0, time.monotonic_ns() - beat_ns) / 1e9

    def lives(self, reader: int) -> bool:
        if self._file.fd < 0:
            raise BoardClosed(
                "this board was closed", f"looking for worker {reader}", "look before that"
            )
        return self._file.is_locked(READER_LOCK + reader)

    def status_of(self, reader: int) -> ReaderStatus | None:
        """What is known of one reader; None if there is none, or it has left by itself."""
        line = reader_line(reader)
        pid = self._words[line + READER_PID]
        if not pid:
            return None
        adopted = self._words[line + READER_ADOPTED]
        age_s = self.age_s(reader)
        state = self._state(reader, pid)
        lag = max(0, self.newest - adopted)
        return ReaderStatus(reader, pid, state != "dead", state, adopted, lag, age_s)

    def _state(self, reader: int, pid: int) -> str:
        if not self.lives(reader):
            return "dead"
        # Hidden (another PID namespace, hidepid): the lock alone shows that it lives.
        return process_state(pid) or "running"


def process_state(pid: int) -> str | None:
    """``"running"``, ``"stopped"`` or ``"dead"``; None if there is no such process, or it is hidden."""
    try:
        return _STATES.get(psutil.Process(pid).status(), "running")
    except psutil.Error:
        return None


_STATES = {
    **dict.fromkeys((psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP), "stopped"),
    **dict.fromkeys((psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD), "dead"),
}
