"""WeightBoard: one learner writes, any number of worker processes on the host read.

The protocol, and why no read is torn::

    publish(v):   s = a slot other than the newest whose byte can be write-locked without waiting
                  state[s] = WRITING; copy all leaves; version[s] = v; state[s] = READY; unlock; head = (v, s)
    adopt():      h = head; if h is mine: return
                  read-lock h's slot byte (no waiting), else re-read head
                  if state is not READY or version[s] != h.version: unlock and retry
                  alias: point parameters at the slot's views and keep the lease until the next adoption
                  copy:  copy out, unlock

Slot data and its line change only under the exclusive lock and are read only under the shared lock; the
kernel excludes the two and orders memory. ``head`` is only a hint.
"""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Iterable, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from rlsync.core.errors import BoardClosed, ConfigError
from rlsync.tensors.layout import Layout
from rlsync.transport import board_format as fmt
from rlsync.transport.board_format import Note, ReaderStatus, SlotState
from rlsync.transport.board_handle import BoardHandle
from rlsync.transport.board_reader import BoardReader
from rlsync.transport.board_slots import FIRST_SLOTS, BoardSlots
from rlsync.transport.board_watch import BoardWatch
from rlsync.transport.mark import Mark
from rlsync.transport.shared_file import SharedFile
from rlsync.transport.untouched import Untouched

__all__ = ["BoardHandle", "BoardReader", "ReaderStatus", "WeightBoard"]


class WeightBoard:
    """The learner's end of a board.

    A publish costs one memory copy and never waits for a worker. Slots come into being as they are
    needed: three in steady state, one more for each worker that lags behind with a lease.

    Args:
        max_slots: upper bound of slots in memory. When all are leased a publish is coalesced. The default
            never coalesces: readers hold one slot each, and for the moment of an adoption two, so that
            ``2 * readers + 2`` slots always suffice.

    Raises:
        ConfigError: ``max_slots`` is out of range.

    Example:
        >>> from rlsync.tensors.layout import LeafSpec
        >>> board = WeightBoard()
        >>> spec = LeafSpec("w", "parameter", (2,), torch.float32)
        >>> board.lay_out(Layout.build({"policy": [spec]}))
        >>> board.publish([torch.ones(2)])
        1
        >>> got = []
        >>> reader = BoardReader(board.handle, lambda version, layout, views: bool(got.extend(views)))
        >>> reader.adopt(), got[0].tolist()
        (1, [1.0, 1.0])
        >>> reader.close(); board.close()
    """

    def __init__(self, max_slots: int = fmt.MAX_SLOTS) -> None:
        if not FIRST_SLOTS <= max_slots <= fmt.MAX_SLOTS:
            raise ConfigError(
                f"max_slots is between {FIRST_SLOTS} and {fmt.MAX_SLOTS}, got {max_slots}",
                f"WeightBoard(max_slots={max_slots})",
                "leave it out, or allow 2 * workers + 2",
            )
        self._version = 0
        self._pid = os.getpid()
        self._file = SharedFile.create("rlsync-board")
        self._file.resize(fmt.DATA_AT)
        self._words = self._file.words(fmt.CONTROL_BYTES, 0)
        self._mark = Mark.write(self._words, fmt.MAGIC, fmt.FORMAT)
        self._file.try_lock(fmt.WRITER_LOCK, exclusive=True)
        self._slots = BoardSlots(self._file, self._words, max_slots)
        self._copier = ThreadPoolExecutor(1, "rlsync-publish")  # its thread starts when it is needed
        self._copying: tuple[Future[None], Untouched] | None = None
        self._watch = BoardWatch(self._file, self._words)

    @property
    def handle(self) -> BoardHandle:
        """What a worker needs to attach; send it to as many as you like, at any time."""
        return BoardHandle(self._file.address, self._mark.number)

    @property
    def version(self) -> int:
        """The newest published version; 0 before the first."""
        return self._version

    @property
    def layout(self) -> Layout | None:
        """What the coming publishes carry; ``None`` before :meth:`lay_out`."""
        return self._slots.layout

    @property
    def slot_count(self) -> int:
        """Slots in use for the present layout."""
        return self._slots.count

    def advance_to(self, version: int) -> None:
        """Never give out ``version`` or a lower one again: a resumed run goes on counting.

        Args:
            version: the newest version that was given out before.
        """
        self.join()
        self._version = max(self._version, version)

    def lay_out(self, layout: Layout) -> None:
        """Say what the coming publishes carry; slots of an earlier layout are retired.

        The first three slots are touched now, so that no publish pays for page faults.

        Args:
            layout: the leaves of all destinations.

        Raises:
            BoardClosed: the board was closed.
        """
        self._check_open()
        self.join()
        if layout != self.layout:
            self._slots.lay_out(layout)

    def publish(self, tensors: Sequence[Tensor], later: Set[int] = frozenset()) -> int | None:
        """Publish one version; see :class:`rlsync.transport.base.Publisher`.

        Args:
            tensors: one for each entry of the layout that owns its bytes; other dtypes are cast.
            later: those among them, by number, that a thread copies after this has returned. Nobody may
                write to them before :meth:`join`; the version is there when they are copied.

        Raises:
            BoardClosed: the board was closed, or nothing is laid out yet.
            LayoutMismatch: a tensor has not the shape of its leaf.
        """
        self._check_open()
        self.join()
        if self.layout is None:
            raise BoardClosed("nothing is laid out yet", "WeightBoard.publish", "call lay_out first")
        self.layout.check(tensors)
        slot = self._slots.take()
        if slot is None:
            return None
        version, views = self._version + 1, self._slots.leaves(slot)[1]
        self._words[fmt.slot_line(slot) + fmt.SLOT_STATE] = SlotState.WRITING
        if not later:
            self._finish(slot, version, views, tensors)
            return version
        now = [i for i in range(len(views)) if i not in later]
        try:
            _copy([views[i] for i in now], [tensors[i] for i in now])
        except BaseException:
            self._file.unlock(fmt.SLOT_LOCK + slot)
            raise
        rest, into = [tensors[i] for i in later], [views[i] for i in later]
        untouched = Untouched.now(rest, version)
        copying = self._copier.submit(self._finish, slot, version, into, rest, untouched)
        self._copying = copying, untouched
        return version

    def join(self) -> None:
        """Wait until a version that is still being copied is there.

        Raises:
            PublishError: a tensor was written to before this.
        """
        if self._copying is not None:
            (copying, untouched), self._copying = self._copying, None
            copying.result()
            untouched.check()  # also what was being written to while the copy ended

    def newest_leaves(self) -> tuple[Layout, list[Tensor]]:
        """What the newest version carries, as this process sees it; read only.

        Returns:
            Its layout, which is not the present one between :meth:`lay_out` and the next publish, and its
            leaves, one for each entry that owns its bytes.

        Raises:
            BoardClosed: nothing was published yet, or the board was closed.
        """
        self._check_open()
        if self._slots.newest < 0:
            raise BoardClosed("nothing was published yet", "WeightBoard.newest_leaves", "publish first")
        return self._slots.leaves(self._slots.newest)

    def newest_views(self) -> list[Tensor]:
        """The newest version's leaves under the present layout, one for each owning entry; read only.

        Raises:
            BoardClosed: nothing was published with this layout yet, or the board was closed.
        """
        layout, views = self.newest_leaves()
        if layout is not self.layout:
            raise BoardClosed(
                "nothing was published with this layout yet", "WeightBoard.newest_views", "publish first"
            )
        return views

    def status(self) -> list[ReaderStatus]:
        """One entry for each reader that ever attached and did not leave by itself."""
        return self._watch.status()

    @property
    def newest(self) -> int:
        """The version that readers see; behind :attr:`version` after :meth:`advance_to`."""
        return self._watch.version

    def ask(self) -> int:
        """Ask all readers what they act with, of the newest version or a later one.

        Returns:
            The number of the question, which the answers (:attr:`Note.ANSWER`) carry.

        Raises:
            BoardClosed: the board was closed.
        """
        self._check_open()
        self._words[fmt.ASKED_FROM] = self.newest
        self._words[fmt.ASKED] += 1
        return self._words[fmt.ASKED]

    def note(self, reader: int, kind: Note = Note.STANDS) -> bytes | None:
        """What a reader left with :meth:`BoardReader.leave_note`; ``None`` while it leaves nothing.

        Args:
            reader: its number.
            kind: which of its notes.
        """
        size = self._words[fmt.reader_line(reader) + kind]
        if not size:
            return None
        try:
            return zlib.decompress(self._file.read(size, fmt.note_at(reader, kind)))
        except zlib.error:
            return None  # it is being replaced at this moment

    def wait(self, version: int, timeout_s: float, readers: Iterable[int] | None = None) -> None:
        """Wait until every reader has adopted ``version`` or a newer one.

        Args:
            version: the version to wait for.
            timeout_s: give up after this many seconds.
            readers: the worker numbers expected; by default those that are attached now.

        Raises:
            WorkerLost: at once, when a reader is dead.
            AdoptionTimeout: the deadline passed; names each missing worker, its pid and state.
        """
        self._watch.wait(version, timeout_s, readers)

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

    def __del__(self) -> None:
        if "_watch" in self.__dict__ and os is not None:  # constructed, and Python is not shutting down
            self.close()

    def _check_open(self) -> None:
        if self._file.fd < 0:
            raise BoardClosed("this board was closed", f"process {os.getpid()}", "make a new one")

    def _finish(
        self,
        slot: int,
        version: int,
        views: Sequence[Tensor],
        tensors: Sequence[Tensor],
        untouched: Untouched | None = None,
    ) -> None:
        """Copy what is left to copy and let readers see it, unless it was written to meanwhile."""
        line, words = fmt.slot_line(slot), self._words
        try:
            _copy(views, tensors)
            if untouched is not None:
                untouched.check()
            words[line + fmt.SLOT_VERSION] = version
            words[line + fmt.SLOT_TIME_NS] = time.monotonic_ns()
            words[line + fmt.SLOT_STATE] = SlotState.READY
        finally:
            self._file.unlock(fmt.SLOT_LOCK + slot)
        self._version = version
        words[fmt.HEAD] = fmt.pack_head(version, slot)
        self._slots.retire()


@torch.no_grad()
def _copy(views: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    if views:
        torch._foreach_copy_(list(views), list(tensors))
