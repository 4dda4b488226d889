"""RolloutRing: many workers fill shared slots with rollouts, one learner takes them; no bytes are pickled.

The protocol, and why no rollout is torn, lost or held by the dead::

    writer    s = a slot that says FREE or WRITING and whose byte can be locked without waiting
              state[s] = WRITING; fill the image; state[s] = FULL; unlock
    learner   s = the slot that says FULL and was filled first, if its byte can be locked
              state[s] = READING; read; state[s] = FREE; unlock

A slot changes hands only under the exclusive lock on its byte. The locks belong to open files: a process
that dies, however it dies, holds nothing. What it left WRITING is free again; what it had completed is FULL
and still good. When no slot is free, ``when_full`` says what happens, and it is counted:

- ``block``: the writer waits. Nothing is ever dropped.
- ``drop_newest``: the writer makes its rollout in memory of its own, and drops it. The ring is not touched.
- ``drop_oldest``: the writer waits. When the learner takes a rollout or gives one back, and no slot is free
  or being filled, it drops the one that was filled first. So here, too, only the learner takes a slot out of
  FULL.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rlsync import BoardClosed, ConfigError
from rlsync.runs.actors.ring import format as fmt
from rlsync.runs.actors.ring.format import (
    Lost,
    RingCounters,
    RingHandle,
    RolloutImages,
    RolloutState,
    WhenFull,
    WriterStatus,
)
from rlsync.seams import Layout, bell, shared_file, user_input

__all__ = ["RingCounters", "RingHandle", "RolloutRing", "TakenRollout", "WriterStatus"]


_Slots = NDArray[np.intp]  # numbers of slots
_FULL = int(RolloutState.FULL)  # numpy takes a tenth of the time for it


@dataclass(frozen=True, slots=True)
class TakenRollout:
    """A full slot in the learner's hands, until it gives it back."""

    slot: int
    writer: int  #: who filled it
    number: int  #: which of that writer's rollouts it is, from 0
    #: Its arrays by name; the ring's own memory: read them, and not after :meth:`RolloutRing.give_back`.
    views: dict[str, Tensor]
    image: Tensor  #: the same memory as one flat ``uint8`` tensor, for those who send it on
    life: int = 0  #: how often a writer of that number had been started before


class RolloutRing:
    """The learner's end of a ring of rollout slots, being written, full, and being read.

    ``layout`` has the arrays of one slot. Pages that nobody writes to cost nothing: put what is large and
    mostly empty last. ConfigError if a number is out of range, or ``when_full`` is none of the above.
    """

    def __init__(
        self, layout: Layout, slots: int, writers: int, when_full: WhenFull = "block"
    ) -> None:
        _check_range("slots", slots, fmt.MAX_SLOTS)
        _check_range("writers", writers, fmt.MAX_WRITERS)
        user_input.check_choice(
            "policy for a full ring", when_full, get_args(WhenFull), f"when_full={when_full!r}"
        )
        self._when_full: WhenFull = when_full
        self._layout = layout
        self._slot_count = slots
        self._writer_count = writers
        self._pid = os.getpid()
        self._file = shared_file.SharedFile.create("rlsync-rollouts")
        self._file.allocate(0, fmt.CONTROL_BYTES)
        self._file.allocate(fmt.IMAGES_AT, slots * fmt.image_stride(layout))
        self._words = self._file.words(fmt.CONTROL_BYTES, 0)
        lines = fmt.slot_lines(self._words, slots)
        self._states = lines[:, fmt.SLOT_STATE]
        self._filled_ns = lines[:, fmt.SLOT_FILLED_NS]
        self._writers = lines[:, fmt.SLOT_WRITER]
        self._freed = bell.Bell(self._words, fmt.FREED)
        self._filled = bell.Bell(self._words, fmt.FILLED)
        self._mark = shared_file.Mark.write(self._words, fmt.MAGIC, fmt.FORMAT)
        self._file.try_lock(fmt.LEARNER_LOCK, exclusive=True)
        self._images = RolloutImages(self._file, self._layout, slots)
        self._held: dict[int, TakenRollout] = {}  # by slot
        #: is told of each that it drops
        self.dropped: Callable[[TakenRollout], object] | None = None

    @property
    def handle(self) -> RingHandle:
        return RingHandle(
            self._file.address,
            self._mark.number,
            self._layout.to_json(),
            self._slot_count,
            self._writer_count,
            self._when_full,
        )

    @property
    def closed(self) -> bool:
        return self._file.fd < 0

    def run(self) -> None:
        """Let writers take slots; before that, and after :meth:`pause`, they wait."""
        self._check_open()
        self._words[fmt.RUNNING] = 1
        self._freed.ring()

    def pause(self) -> None:
        """Let no writer take another slot; what is being written is completed."""
        self._check_open()
        self._words[fmt.RUNNING] = 0

    def seed(self, seed: int, frames_before: int = 0) -> None:
        """Give a seed to the writers; each sees it when it takes its next slot.

        ``frames_before``: how many frames the run had, all workers together, before the first of this ring.
        """
        self._check_open()
        self._words[fmt.FRAMES_BEFORE] = frames_before
        self._words[fmt.SEED] = seed & (1 << 63) - 1
        self._words[fmt.SEEDED] += 1

    def take(self, timeout_s: float) -> TakenRollout | None:
        """The rollout that was completed first, or ``None`` if none is in time. Several may be held."""
        self._check_open()
        if self._when_full == "drop_oldest":
            self._drop_oldest()
        heard = self._filled.read()
        rollout = self._try_take()
        if rollout is not None:
            return rollout
        started_ns = now_ns = time.monotonic_ns()
        deadline_ns = started_ns + int(timeout_s * 1e9)
        while rollout is None and now_ns < deadline_ns:
            self._filled.wait(heard, (deadline_ns - now_ns) / 1e9)
            heard = self._filled.read()
            rollout = self._try_take()
            now_ns = time.monotonic_ns()
        self._words[fmt.LEARNER_WAITED_NS] += now_ns - started_ns
        return rollout

    def give_back(self, taken: TakenRollout) -> None:
        """Free the slot, whose views must not be read after that; a second call does nothing."""
        if self._held.get(taken.slot) is taken and not self.closed:
            if self._when_full == "drop_oldest":
                # while writers wait: the slot that is freed now would hide that
                self._drop_oldest()
            del self._held[taken.slot]
            self._free(taken.slot)

    def counters(self) -> RingCounters:
        """Slots by state, rollouts passed, seconds waited."""
        self._check_open()
        states = Counter(map(self._state, range(self._slot_count)))
        lost = self.lost()
        return RingCounters(
            free=states[RolloutState.FREE],
            writing=states[RolloutState.WRITING],
            full=states[RolloutState.FULL],
            reading=states[RolloutState.READING],
            written=sum(self._of_writers(fmt.WRITER_WRITTEN)),
            taken=self._words[fmt.TAKEN],
            worker_wait_s=lost.worker_wait_s,
            learner_wait_s=self._words[fmt.LEARNER_WAITED_NS] / 1e9,
            dropped=lost.dropped,
        )

    def lost(self) -> Lost:
        """What may be asked for at each batch: the system is not asked about any slot."""
        self._check_open()
        return Lost(
            sum(self._of_writers(fmt.WRITER_WAITED_NS)) / 1e9,
            self._words[fmt.DROPPED] + sum(self._of_writers(fmt.WRITER_DROPPED)),
        )

    def _of_writers(self, word: int) -> memoryview:
        """A word of each writer's line."""
        return self._words[
            fmt.writer_line(0) + word : fmt.writer_line(self._writer_count) : fmt.LINE_WORDS
        ]

    def expect(self, writer: int) -> None:
        """Forget what the last writer of a number said: a new process is about to take its place."""
        self._check_open()
        self._words[fmt.writer_line(writer) + fmt.WRITER_READY] = 0
        self._words[fmt.writer_line(writer) + fmt.WRITER_LAST_WORDS] = 0
        full = self._full()
        for slot in full[self._writers[full] == writer]:
            self._count(int(slot))

    def heartbeat_ages_s(self) -> list[float]:
        """Of each writer, the seconds since it last gave a sign of life; the system is not asked about any."""
        self._check_open()
        now_ns = time.monotonic_ns()
        beats_ns = self._of_writers(fmt.WRITER_HEARTBEAT_NS)
        return [max(0, now_ns - beat_ns) / 1e9 for beat_ns in beats_ns]

    def writer(self, writer: int) -> WriterStatus:
        self._check_open()
        words = self._words
        line = fmt.writer_line(writer)
        text = b""
        size = words[line + fmt.WRITER_LAST_WORDS]
        if size:
            text = self._file.read(size, fmt.last_words_at(writer))
        heartbeat_age_ns = max(0, time.monotonic_ns() - words[line + fmt.WRITER_HEARTBEAT_NS])
        return WriterStatus(
            writer=writer,
            pid=words[line + fmt.WRITER_PID],
            alive=self._file.is_locked(fmt.WRITER_LOCK + writer),
            ready=bool(words[line + fmt.WRITER_READY]),
            written=words[line + fmt.WRITER_WRITTEN],
            heartbeat_age_s=heartbeat_age_ns / 1e9,
            last_words=text.decode(errors="replace"),
        )

    def close(self) -> None:
        """Close the ring; writers see it at their next step. What is held stays readable."""
        if not self.closed and os.getpid() == self._pid:
            self._words[fmt.CLOSED] = 1
            self._freed.ring()
            self._file.close()
            self._held.clear()
        self._images.forget()

    def __del__(self) -> None:
        # constructed, and Python is not shutting down
        if "dropped" in self.__dict__ and os is not None:
            self.close()

    def _check_open(self) -> None:
        if self.closed:
            raise BoardClosed(
                "this rollout ring was closed", f"process {os.getpid()}", "make a new one"
            )

    def _try_take(self) -> TakenRollout | None:
        full = self._completed()
        while len(full):
            slot = self._first_of(full)
            if self._file.try_lock(fmt.SLOT_LOCK + slot, exclusive=True):
                self._words[fmt.slot_line(slot) + fmt.SLOT_STATE] = RolloutState.READING
                self._words[fmt.TAKEN] += 1
                self._count(slot)
                rollout = self._in_slot(slot)
                self._held[slot] = rollout
                return rollout
            # The lock of a full slot may be held for a moment, by its writer or by one that looks for a free
            # slot. A later rollout of the same writer has to wait for it; those of others need not.
            full = full[self._writers[full] != self._writers[slot]]
        return None

    def _drop_oldest(self) -> None:
        """If writers wait, free the full slot that was filled first, unless it is the only one."""
        if not np.isin(self._states, (_FULL, int(RolloutState.READING))).all():
            return
        full = self._completed()
        if len(full) < 2:
            return
        slot = self._first_of(full)
        if self._file.try_lock(fmt.SLOT_LOCK + slot, exclusive=True):
            self._words[fmt.DROPPED] += 1
            self._count(slot)
            if self.dropped is not None:
                self.dropped(self._in_slot(slot))
            self._free(slot)

    def _free(self, slot: int) -> None:
        """Let the writer that waits longest have a slot that is locked here."""
        self._words[fmt.slot_line(slot) + fmt.SLOT_STATE] = RolloutState.FREE
        self._file.unlock(fmt.SLOT_LOCK + slot)
        self._freed.ring(1)

    def _state(self, slot: int) -> RolloutState:
        """The state of a slot; one that a dead writer left is free."""
        state = RolloutState(self._words[fmt.slot_line(slot) + fmt.SLOT_STATE])
        if state is RolloutState.WRITING and not self._file.is_locked(fmt.SLOT_LOCK + slot):
            return RolloutState.FREE
        return state

    def _in_slot(self, slot: int) -> TakenRollout:
        line = fmt.slot_line(slot)
        words = self._words
        return TakenRollout(
            slot=slot,
            writer=words[line + fmt.SLOT_WRITER],
            number=words[line + fmt.SLOT_NUMBER],
            views=self._images.views(slot),
            image=self._images.image(slot),
            life=words[line + fmt.SLOT_LIFE],
        )

    def _count(self, slot: int) -> None:
        """Count a full slot on its writer's line, if a killed writer has not; before a successor starts."""
        line = fmt.slot_line(slot)
        written = fmt.writer_line(self._words[line + fmt.SLOT_WRITER]) + fmt.WRITER_WRITTEN
        if self._words[written] == self._words[line + fmt.SLOT_NUMBER]:
            self._words[written] += 1

    def _completed(self) -> _Slots:
        """The full slots, without some of the newest ones.

        It looks twice, for one look may pass a slot before it is filled, and find a later rollout of the same
        writer. The second sees all that came before what the first found: only the learner takes a slot out
        of FULL. Newer ones wait.
        """
        first_look = self._full()
        if not len(first_look):
            return first_look
        full = self._full()
        if len(full) > 1:
            full = full[self._filled_ns[full] <= self._filled_ns[first_look].max()]
        return full

    def _full(self) -> _Slots:
        """The slots that are full. Nobody but the learner takes one out of that: it needs no lock."""
        return (self._states == _FULL).nonzero()[0]

    def _first_of(self, slots: _Slots) -> int:
        """The slot of these that was filled first."""
        if len(slots) == 1:
            return int(slots[0])
        return int(slots[self._filled_ns[slots].argmin()])


def _check_range(what: str, value: int, most: int) -> None:
    if not 1 <= value <= most:
        raise ConfigError(
            f"a rollout ring has between 1 and {most} {what}, got {value}",
            f"RolloutRing({what}={value})",
            "give as many slots as workers, and a few for the learner",
        )
