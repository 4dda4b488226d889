"""What a rollout ring says of itself: who waits for whom, how much has passed, who lives."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass

from rlsync.transport.ring import format as fmt
from rlsync.transport.ring.format import RolloutState
from rlsync.transport.shared_file import SharedFile


@dataclass(frozen=True, slots=True)
class RingCounters:
    """A ring at one moment: slots in each state, and what was counted since it began."""

    free: int
    writing: int
    full: int
    reading: int
    written: int  #: rollouts that were ever completed
    taken: int  #: rollouts that the learner ever took
    worker_wait_s: float  #: of all workers together, for a free slot
    learner_wait_s: float  #: for a full one
    dropped: int = 0  #: rollouts dropped because no slot was free, or the learner found them too old


@dataclass(frozen=True, slots=True)
class WriterStatus:
    """What a ring knows of one writer."""

    writer: int  #: its number, a worker's index
    pid: int  #: its process; 0 before the first attached
    alive: bool  #: whether a process holds its line
    ready: bool  #: whether that process has said that it is ready
    written: int  #: rollouts that writers of this number ever completed
    wait_s: float  #: seconds they have waited for a free slot
    heartbeat_age_s: float  #: seconds since it last gave a sign of life
    last_words: str  #: why it ended, in its own words; empty while there are none


class RingWatch:
    """Reads the lines of a ring.

    Any process of the same user may watch a ring from outside: ``RingWatch(*handle.open(), handle.slots,
    handle.writers)``.
    """

    def __init__(self, file: SharedFile, words: memoryview, slots: int, writers: int) -> None:
        self._file = file
        self._words = words
        self._slots = range(slots)
        self._writers = range(writers)

    def state(self, slot: int) -> RolloutState:
        """The state of a slot; one that a dead writer left is free."""
        state = RolloutState(self._words[fmt.slot_line(slot) + fmt.SLOT_STATE])
        if state is RolloutState.WRITING and not self._file.is_locked(fmt.SLOT_LOCK + slot):
            return RolloutState.FREE
        return state

    def counters(self) -> RingCounters:
        states = Counter(self.state(slot) for slot in self._slots)
        lines = [fmt.writer_line(writer) for writer in self._writers]
        return RingCounters(
            free=states[RolloutState.FREE],
            writing=states[RolloutState.WRITING],
            full=states[RolloutState.FULL],
            reading=states[RolloutState.READING],
            written=sum(self._words[line + fmt.WRITER_WRITTEN] for line in lines),
            taken=self._words[fmt.TAKEN],
            worker_wait_s=sum(self._words[line + fmt.WRITER_WAITED_NS] for line in lines) / 1e9,
            learner_wait_s=self._words[fmt.LEARNER_WAITED_NS] / 1e9,
            dropped=self._words[fmt.DROPPED] + sum(self._words[line + fmt.WRITER_DROPPED] for line in lines),
        )

    def writer(self, writer: int) -> WriterStatus:
        words, line = self._words, fmt.writer_line(writer)
        size = words[line + fmt.WRITER_LAST_WORDS]
        text = self._file.read(size, fmt.last_words_at(writer)) if size else b""
        return WriterStatus(
            writer=writer,
            pid=words[line + fmt.WRITER_PID],
            alive=self._file.is_locked(fmt.WRITER_LOCK + writer),
            ready=bool(words[line + fmt.WRITER_READY]),
            written=words[line + fmt.WRITER_WRITTEN],
            wait_s=words[line + fmt.WRITER_WAITED_NS] / 1e9,
            heartbeat_age_s=max(0, time.monotonic_ns() - words[line + fmt.WRITER_HEARTBEAT_NS]) / 1e9,
            last_words=text.decode(errors="replace"),
        )
