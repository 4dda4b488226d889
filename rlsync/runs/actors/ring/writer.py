"""The worker's end of a rollout ring."""

from __future__ import annotations

import math
import os
import time

import numpy as np
from torch import Tensor

from rlsync import ConfigError, PublishError
from rlsync.runs.actors.ring import format as fmt
from rlsync.runs.actors.ring.format import RingHandle, RolloutImages, RolloutState
from rlsync.seams import Layout, bell


class RingWriter:
    """Fills slots of a ring, one at a time; blocks while none is free, unless the ring drops the newest.

    One open file, one line on the ring, both held for life: when the process dies the kernel frees them. A
    writer of this number was started ``life`` times before. BoardClosed if the learner has closed the ring or
    died, ConfigError if the ring has no line for the number ``writer``, PublishError if a living process
    holds it.
    """

    def __init__(self, handle: RingHandle, writer: int, life: int = 0) -> None:
        if not 0 <= writer < handle.writers:
            problem = f"the ring has no line for worker {writer}"
            raise ConfigError(
                problem, f"pid {os.getpid()}", f"number workers from 0 to {handle.writers - 1}"
            )
        self._file, self._words = handle.open()
        if not self._file.claim(fmt.WRITER_LOCK + writer):
            self._file.close()
            problem = f"a living process already writes to the ring as worker {writer}"
            raise PublishError(problem, f"pid {os.getpid()}", "give each worker its own number")
        self._layout = Layout.from_json(handle.layout)
        self._states = fmt.slot_lines(self._words, handle.slots)[:, fmt.SLOT_STATE]
        self._images = RolloutImages(self._file, self._layout, handle.slots)
        self._taken: int | None = None
        self._freed = bell.Bell(self._words, fmt.FREED)
        self._filled = bell.Bell(self._words, fmt.FILLED)
        self._drops = handle.when_full == "drop_newest"
        self._spare = handle.slots  # stands for memory of this process
        self._writer = writer
        #: What its rollouts say of their life.
        self.life = life
        self._line = fmt.writer_line(writer)
        self._seen_seeds = 0
        self._words[self._line + fmt.WRITER_HEARTBEAT_NS] = time.monotonic_ns()
        self._words[self._line + fmt.WRITER_PID] = os.getpid()

    @property
    def slot(self) -> int | None:
        """The slot that is being filled; the number behind the last one if it will be dropped."""
        return self._taken

    @property
    def closing(self) -> bool:
        """Whether the learner has closed the ring: one 8-byte read, for every step."""
        return bool(self._words[fmt.CLOSED])

    @property
    def learner_gone(self) -> bool:
        """Whether the learner has closed the ring or died."""
        return self.closing or not self._file.is_locked(fmt.LEARNER_LOCK)

    @property
    def closed(self) -> bool:
        return self._file.fd < 0

    def announce_ready(self) -> None:
        self._words[self._line + fmt.WRITER_READY] = 1

    def new_seed(self) -> int | None:
        """The seed that the learner has given since this was asked last, if it has."""
        count = self._words[fmt.SEEDED]
        if count == self._seen_seeds:
            return None
        self._seen_seeds = count
        return self._words[fmt.SEED]

    @property
    def written(self) -> int:
        """The rollouts that writers of this number have completed."""
        return self._words[self._line + fmt.WRITER_WRITTEN]

    @property
    def frames_before(self) -> int:
        """The frames that the run had before the first of this ring."""
        return self._words[fmt.FRAMES_BEFORE]

    def take(self, timeout_s: float | None = None) -> dict[str, Tensor] | None:
        """Wait until the learner runs and a slot is free, and take its arrays; None when the learner is gone.

        A full ring that drops the newest gives memory of this process: :meth:`commit` counts it as dropped.
        Waiting is counted on the writer's line as it passes.
        """
        self.abandon()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        waited_from = time.monotonic_ns()
        was_rung = False
        while True:
            heard = self._freed.read()
            # A slot that a dead writer left is free, too. Its lock tells, which is a call of the system for each
            # slot that is being filled: too much each time that the learner has freed another one.
            if self._try_take(also_left=not was_rung):
                break
            if self.learner_gone:
                return None
            if self._drops and self._words[fmt.RUNNING]:
                self._taken = self._spare
                break
            left_s = math.inf
            if deadline is not None:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    return None
            was_rung = self._freed.wait(heard, left_s)
            waited_from = self.count_wait(waited_from)
        assert self._taken is not None, "it has left the loop"
        return self._images.views(self._taken)

    def memory_of_its_own(self) -> tuple[int, dict[str, Tensor]]:
        """Arrays as a slot has, which nobody else reads, and the number that stands for them."""
        return self._spare, self._images.views(self._spare)

    def commit(self) -> None:
        """Let the learner have what was written, or count it as dropped if no slot was free for it."""
        if self._taken is None:
            raise PublishError("no slot was taken", f"worker {self._writer}", "take one first")
        if self._taken == self._spare:
            self._words[self._line + fmt.WRITER_DROPPED] += 1
            self._words[self._line + fmt.WRITER_HEARTBEAT_NS] = time.monotonic_ns()
            self._taken = None
            return
        line = fmt.slot_line(self._taken)
        self._words[line + fmt.SLOT_WRITER] = self._writer
        self._words[line + fmt.SLOT_NUMBER] = self.written
        self._words[line + fmt.SLOT_LIFE] = self.life
        self._words[line + fmt.SLOT_FILLED_NS] = time.monotonic_ns()
        self._words[line + fmt.SLOT_STATE] = RolloutState.FULL
        # Counted before the learner can take it. If this process is killed in between, the learner counts it.
        self._words[self._line + fmt.WRITER_WRITTEN] += 1
        self._file.unlock(fmt.SLOT_LOCK + self._taken)
        self._filled.ring()
        self._words[self._line + fmt.WRITER_HEARTBEAT_NS] = time.monotonic_ns()
        self._taken = None

    def abandon(self) -> None:
        """Give the slot back as it is; nobody reads it."""
        if self._taken is not None and self._taken != self._spare:
            self._words[fmt.slot_line(self._taken) + fmt.SLOT_STATE] = RolloutState.FREE
            self._file.unlock(fmt.SLOT_LOCK + self._taken)
            self._freed.ring(1)
        self._taken = None

    def leave_last_words(self, text: str) -> None:
        """Say why this worker ends; the beginning of a long text is kept."""
        data = text.encode()[: fmt.LAST_WORDS_BYTES]
        self._file.write(data, fmt.last_words_at(self._writer))
        self._words[self._line + fmt.WRITER_LAST_WORDS] = len(data)

    def close(self) -> None:
        """Give the line, and a slot that is not complete, back."""
        if self._file.fd >= 0:
            self.abandon()
            self._file.close()
        self._images.forget()

    def _try_take(self, *, also_left: bool) -> bool:
        """Take the first free slot; ``also_left``: or else one that a dead writer left."""
        if not self._words[fmt.RUNNING] or self.closing:
            return False
        return self._take_one(RolloutState.FREE) or (
            also_left and self._take_one(RolloutState.WRITING)
        )

    def _take_one(self, state: RolloutState) -> bool:
        for slot in map(int, np.flatnonzero(self._states == int(state))):
            if not self._file.try_lock(fmt.SLOT_LOCK + slot, exclusive=True):
                continue
            # Only under the lock the state holds: another writer may have filled the slot meanwhile.
            at = fmt.slot_line(slot) + fmt.SLOT_STATE
            if self._words[at] in (RolloutState.FREE, RolloutState.WRITING):
                self._words[at] = RolloutState.WRITING
                self._taken = slot
                return True
            self._file.unlock(fmt.SLOT_LOCK + slot)
            self._filled.ring()  # the learner may have found it locked
        return False

    def count_wait(self, since_ns: int) -> int:
        """Give a sign of life, and count that this worker has waited since then; returns the time of now."""
        now = time.monotonic_ns()
        if self._words[fmt.RUNNING]:
            self._words[self._line + fmt.WRITER_WAITED_NS] += now - since_ns
        self._words[self._line + fmt.WRITER_HEARTBEAT_NS] = now
        return now
