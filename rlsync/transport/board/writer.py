"""BoardWriter: one learner writes, any number of worker processes on the host read.

The protocol, and why no read is torn::

    publish(v):   s = a slot other than the newest whose byte can be write-locked without waiting
                  state[s] = WRITING; copy all leaves; version[s] = v; state[s] = READY; unlock; head = (v, s)
    adopt():      h = head; if h is mine: return
                  read-lock h's slot byte (no waiting), else re-read head
                  if state is not READY or version[s] != h.version: unlock and retry
                  alias: point parameters at the slot's views and keep the lease until the next adoption
                  copy:  copy out, unlock

A slot's data and its line change only under the exclusive lock and are read only under the shared lock. The
kernel excludes the two and orders memory. ``head`` is only a hint.
"""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Callable, Iterable, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial

from torch import Tensor

from rlsync.core.errors import BoardClosed, ConfigError, PublishError
from rlsync.core.ledger import Stamp
from rlsync.tensors.layout import Layout
from rlsync.transport.board import format as fmt
from rlsync.transport.board.format import BoardWatch, SlotState
from rlsync.transport.board.reader import BoardHandle
from rlsync.transport.board.slots import FIRST_SLOTS, BoardSlots, Fill, Staging, Untouched
from rlsync.transport.contract import Note, Transport
from rlsync.transport.rules import await_adoption, whole
from rlsync.transport.shared_file import Mark, SharedFile


class BoardWriter(BoardWatch, Transport):
    """The learner's end of a board.

    A publish costs one memory copy and never waits for a worker. An accelerator gathers its leaves first, in
    memory of its own. Slots are added when they are needed: three in steady state, one more for each worker
    that lags behind and still leases an older one.

    Args:
        max_slots: upper bound of slots in memory. When all are leased, a publish is coalesced. The default
            never coalesces: a reader holds one slot, and for the moment of an adoption two, so
            ``2 * readers + 2`` slots always suffice.

    Raises:
        ConfigError: ``max_slots`` is out of range.

    Example:
        >>> import torch
        >>> from rlsync.tensors.layout import LeafSpec
        >>> from rlsync.transport.board.reader import BoardReader
        >>> board = BoardWriter()
        >>> spec = LeafSpec("w", "parameter", (2,), torch.float32)
        >>> board.lay_out(Layout.build({"policy": [spec]}))
        >>> board.publish([torch.ones(2)], stamp=Stamp(1, 1))
        1
        >>> got = []
        >>> reader = BoardReader(board.handle, lambda version, layout, views: bool(got.extend(views)))
        >>> reader.adopt(), got[0].tolist()
        (1, [1.0, 1.0])
        >>> reader.close(); board.close()
    """

    background = True
    through_host = True

    def __init__(self, max_slots: int = fmt.MAX_SLOTS) -> None:
        if not FIRST_SLOTS <= max_slots <= fmt.MAX_SLOTS:
            problem = f"max_slots is between {FIRST_SLOTS} and {fmt.MAX_SLOTS}, got {max_slots}"
            cure = "leave it out, or allow 2 * workers + 2"
            raise ConfigError(problem, f"WeightBoard(max_slots={max_slots})", cure)
        self._pid = os.getpid()
        file = SharedFile.create("rlsync-board")
        file.allocate(0, fmt.CONTROL_BYTES)
        file.resize(fmt.DATA_AT)  # notes are not mapped
        super().__init__(file, file.words(fmt.CONTROL_BYTES, 0))
        self._mark = Mark.write(self._words, fmt.MAGIC, fmt.FORMAT)
        self._file.try_lock(fmt.WRITER_LOCK, exclusive=True)
        self._slots = BoardSlots(self._file, self._words, max_slots)
        # its thread starts when it is needed
        self._copier = ThreadPoolExecutor(1, "rlsync-publish")
        self._copying: tuple[Future[None], Untouched] | None = None
        self._staging = Staging()
        self._fill: Fill | None = None

    @property
    def handle(self) -> BoardHandle:
        """What a worker needs to attach; send it to as many as you like, at any time."""
        return BoardHandle(self._file.address, self._mark.number, self._words[fmt.GENERATION])

    @property
    def layout(self) -> Layout | None:
        return self._slots.layout

    @property
    def slot_count(self) -> int:
        """Slots in use for the present layout."""
        return self._slots.count

    def lay_out(self, layout: Layout) -> None:
        """Say what the coming publishes carry; slots of an earlier layout are retired.

        The first three slots are touched now, so that no publish pays for page faults.

        Raises:
            BoardClosed: the board was closed.
            PublishError: a version is still being copied and was not joined, or too many slots are leased.
        """
        self._check_free()
        if layout != self.layout:
            self._slots.lay_out(layout)

    def publish(
        self, tensors: Sequence[Tensor | None], later: Set[int] = frozenset(), *, stamp: Stamp
    ) -> int | None:
        """Publish one version; see :meth:`rlsync.transport.contract.Transport.publish`.

        A thread copies what is named in ``later``, and the version is visible when that is copied. Beyond the
        contract's errors there is a PublishError if the version before was not joined.
        """
        self._check_free()
        leaves = whole(self, tensors, stamp)
        slot = self._slots.take()
        if slot is None:
            return None
        self._words[fmt.slot_line(slot) + fmt.SLOT_STATE] = SlotState.WRITING
        try:
            copy = self._copy(slot, stamp, leaves, later)
        except BaseException:
            self._file.unlock(fmt.SLOT_LOCK + slot)
            raise
        if not later:
            self._finish(slot, stamp, copy)
            return stamp.version
        untouched = Untouched.now([leaves[i] for i in later], stamp.version)
        self._copying = self._copier.submit(self._finish, slot, stamp, copy, untouched), untouched
        return stamp.version

    def fill_with(self, fill: Fill) -> None:
        """Let other processes help to fill slots, by ``fill``, where a publish copies everything at once."""
        self._fill = fill
        self._slots.others_write = True

    def join(self) -> None:
        if self._copying is not None:
            (copying, untouched) = self._copying
            self._copying = None
            copying.result()
            untouched.check()  # also what was being written to while the copy ended

    def newest_leaves(self) -> tuple[Layout, list[Tensor]] | None:
        """What the newest version carries, as this process sees it; read-only.

        Its layout is not the present one between :meth:`lay_out` and the next publish.

        Raises:
            BoardClosed: the board was closed.
        """
        self._check_open()
        if self._slots.newest < 0:
            return None
        return self._slots.leaves(self._slots.newest)

    def leaves_before(self) -> tuple[Layout, list[Tensor]] | None:
        self._check_open()
        with suppress(PublishError):  # it was of a layout that is not in use any more
            return self._slots.leaves(self._slots.before)
        return None

    def ask(self, lowest: int) -> int:
        return self.ask_as(self._words[fmt.ASKED] + 1, lowest)

    def ask_as(self, number: int, lowest: int) -> int:
        """Pass on a question that was asked elsewhere, under its own number; see :meth:`ask`."""
        self._check_open()
        self._words[fmt.ASKED_FROM] = lowest
        self._words[fmt.ASKED] = number
        return number

    def note(self, reader: int, kind: Note = Note.LEAVES) -> bytes | None:
        size = self._words[fmt.note_bytes(reader, kind)]
        if not size:
            return None
        try:
            return zlib.decompress(self._file.read(size, fmt.note_at(reader, kind)))
        except zlib.error:
            return None  # it is being replaced at this moment

    def wait(self, version: int, timeout_s: float, readers: Iterable[int] | None = None) -> None:
        await_adoption(self.status, version, timeout_s, readers, lambda: self.newest)

    def order_of_arrival(self, silent_s: float | None) -> Sequence[int] | None:
        """Which worker's rollouts arrive one after the other; None: as they come.

        ``silent_s`` seconds is how long a worker may be silent; None: for ever.
        """
        return None

    def close(self) -> None:
        """Close the board. Workers keep what they act with and see that it is closed."""
        if self._file.fd >= 0 and os.getpid() == self._pid:
            try:
                self.join()
            finally:
                self._words[fmt.CLOSED] = 1
                self._copier.shutdown()
                self._file.close()
        self._slots.forget()

    def __del__(self, shutting_down: Callable[[], bool] = sys.is_finalizing) -> None:
        # While Python shuts down, modules are already taken apart; the kernel then closes the board.
        if "_fill" in self.__dict__ and not shutting_down():
            self.close()

    def _check_open(self) -> None:
        if self._file.fd < 0:
            raise BoardClosed("this board was closed", f"process {os.getpid()}", "make a new one")

    def _check_free(self) -> None:
        self._check_open()
        if self._copying is not None:
            problem = f"version {self._copying[1].version} is still being copied"
            cure = "join() it first: a board carries one version after the other"
            raise PublishError(problem, "BoardWriter", cure)

    def _copy(
        self, slot: int, stamp: Stamp, tensors: Sequence[Tensor], later: Set[int]
    ) -> Callable[[], None]:
        """What is left to do for a slot, once the copies that must not wait were made."""
        _, views = self._slots.leaves(slot)
        if self._fill is not None and not later:
            return partial(self._fill, self._slots.place(slot), stamp, views, tensors)
        copy = self._staging.copy(views, tensors)
        if later:
            copy = copy.begin(later)
        return copy.finish

    def _finish(
        self, slot: int, stamp: Stamp, copy: Callable[[], None], untouched: Untouched | None = None
    ) -> None:
        """Copy what is left to copy and let readers see it, unless it was written to meanwhile."""
        line = fmt.slot_line(slot)
        words = self._words
        try:
            copy()
            if untouched is not None:
                untouched.check()
            words[line + fmt.SLOT_VERSION] = stamp.version
            words[line + fmt.SLOT_GENERATION] = stamp.generation
            words[line + fmt.SLOT_STATE] = SlotState.READY
        finally:
            self._file.unlock(fmt.SLOT_LOCK + slot)
        words[fmt.GENERATION] = stamp.generation
        self._slots.before = self._slots.newest
        words[fmt.HEAD] = fmt.pack_head(stamp.version, slot)
        self._slots.retire()
