"""The bytes of a rollout ring, and how they are read: shared by the learner's end and the workers'.

::

    page 0    header, never changed: magic, format, ring id
    control   what the learner tells the workers (closed, running, seed), how long it has waited, and the bells
    slots     one line a slot: state, when it was filled, by whom
    writers   one line a writer: pid, rollouts written, time waited, size of its last words
    words     room for the last words of each writer, sparse: why it ended
    then      page-aligned slot images

All words are 64 bits. What a word says of a slot holds under the lock on the slot's byte; without it, it is
a hint.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlsync.seams import Layout, shared_file

MAGIC = 0x474E_4952_4C52  # "RLRING"
FORMAT = 3

#: Those of all workers in their rollouts and waiting for their versions, and of batches that are learned from.
MAX_SLOTS = 4096
MAX_WRITERS = 1022
LINE_WORDS = 8

_CONTROL = shared_file.PAGE_BYTES // 8
CLOSED = _CONTROL
RUNNING = _CONTROL + 1
SEED = _CONTROL + 2
SEEDED = _CONTROL + 3  # how often the learner has given a seed
LEARNER_WAITED_NS = _CONTROL + 4
TAKEN = _CONTROL + 5
DROPPED = _CONTROL + 6  # completed rollouts that the learner dropped
FRAMES_BEFORE = _CONTROL + 7  # frames that were learned from before this ring was made
# Bells: the learner has freed a slot, or said something to those that wait for one; a writer has filled a slot.
FREED = _CONTROL + 8
FILLED = _CONTROL + 9
_SLOT_LINES = _CONTROL + 2 * LINE_WORDS
_WRITER_LINES = _SLOT_LINES + MAX_SLOTS * LINE_WORDS
CONTROL_BYTES = shared_file.whole_pages((_WRITER_LINES + MAX_WRITERS * LINE_WORDS) * 8)

LAST_WORDS_BYTES = 1 << 16
# File offsets, not memory: untouched pages cost nothing.
IMAGES_AT = CONTROL_BYTES + MAX_WRITERS * LAST_WORDS_BYTES

SLOT_STATE, SLOT_FILLED_NS, SLOT_WRITER, SLOT_NUMBER, SLOT_LIFE = range(5)
WRITER_PID, WRITER_WRITTEN, WRITER_WAITED_NS, WRITER_HEARTBEAT_NS = range(4)
WRITER_READY, WRITER_LAST_WORDS, WRITER_DROPPED = range(4, 7)

# Lock offsets lie far behind the data: advisory locks need no bytes under them.
SLOT_LOCK = 1 << 44
WRITER_LOCK = 1 << 45
LEARNER_LOCK = 1 << 46


#: What happens when no slot is free: the writer waits, or the oldest or its own rollout is dropped.
WhenFull = Literal["block", "drop_oldest", "drop_newest"]


class RolloutState(IntEnum):
    """What a slot line says; WRITING or READING without a lock on its byte means that the slot is free."""

    FREE = 0
    WRITING = 1
    FULL = 2
    READING = 3


def slot_line(slot: int) -> int:
    """Index of the first word of a slot's line."""
    return _SLOT_LINES + slot * LINE_WORDS


def writer_line(writer: int) -> int:
    """Index of the first word of a writer's line."""
    return _WRITER_LINES + writer * LINE_WORDS


def slot_lines(words: memoryview, slots: int) -> NDArray[np.uint64]:
    """The lines of all slots, ``[slots, LINE_WORDS]``: the same memory, for looks at all of them at once."""
    lines = np.frombuffer(words, np.uint64)[slot_line(0) : slot_line(slots)]
    return lines.reshape(slots, LINE_WORDS)


def last_words_at(writer: int) -> int:
    """Offset of a writer's last words."""
    return CONTROL_BYTES + writer * LAST_WORDS_BYTES


def image_stride(layout: Layout) -> int:
    """Bytes from one slot image to the next: whole pages."""
    return shared_file.whole_pages(layout.image_bytes)


@dataclass(frozen=True, slots=True)
class RingHandle:
    """How a worker finds a ring: small, picklable, valid while the learner lives."""

    address: shared_file.FileAddress
    ring_id: int
    layout: bytes  #: of one slot, as JSON
    slots: int
    writers: int  #: how many there may be
    when_full: WhenFull = "block"

    def open(self) -> tuple[shared_file.SharedFile, memoryview]:
        """Open the ring, with a descriptor and locks of one's own, and map its control words."""
        return shared_file.Mark(MAGIC, FORMAT, self.ring_id).open(
            self.address, CONTROL_BYTES, "rollout ring"
        )


class RolloutImages:
    """The slots of a ring as this process sees them, mapped as they are needed.

    The number behind the last of the ``slots`` stands for memory of this process, which nobody else reads.
    """

    def __init__(self, file: shared_file.SharedFile, layout: Layout, slots: int) -> None:
        self._file = file
        self._slots = slots
        self._layout = layout
        self._stride = image_stride(layout)
        self._images: dict[int, Tensor] = {}
        self._views: dict[int, dict[str, Tensor]] = {}

    def image(self, slot: int) -> Tensor:
        """The bytes of a slot, up to the end of its last page."""
        if slot not in self._images and slot == self._slots:
            self._images[slot] = torch.zeros(self._stride, dtype=torch.uint8, device="cpu")
        elif slot not in self._images:
            # Writable: a stray write in place would end the process, and spoils nothing but this rollout.
            at = IMAGES_AT + slot * self._stride
            self._images[slot] = self._file.map(self._stride, at, writable=True)
        return self._images[slot]

    def views(self, slot: int) -> dict[str, Tensor]:
        if slot not in self._views:
            names = [entry.leaf.name for entry in self._layout.entries]
            self._views[slot] = dict(zip(names, self._layout.views(self.image(slot)), strict=True))
        return self._views[slot]

    def forget(self) -> None:
        self._images = {}
        self._views = {}


class Lost(NamedTuple):
    """What workers have lost to a full ring since it began: a part of its counters."""

    worker_wait_s: float
    dropped: int


@dataclass(frozen=True, slots=True)
class RingCounters:
    """A ring at one moment: slots in each state, and what was counted since it began."""

    free: int
    writing: int
    full: int
    reading: int
    written: int  #: rollouts that were ever completed
    taken: int  #: rollouts that the learner ever took
    worker_wait_s: float  #: of all workers together, for a free slot or their version
    learner_wait_s: float  #: for a full one
    #: rollouts dropped because no slot was free, or the learner found them too old
    dropped: int = 0


@dataclass(frozen=True, slots=True)
class WriterStatus:
    """What a ring knows of one writer."""

    writer: int  #: its number, a worker's index
    pid: int  #: its process; 0 before the first attached
    alive: bool  #: whether a process holds its line
    ready: bool  #: whether that process has said that it is ready
    written: int  #: rollouts that writers of this number ever completed
    heartbeat_age_s: float  #: seconds since it last gave a sign of life
    last_words: str  #: why it ended, in its own words; empty while there are none
