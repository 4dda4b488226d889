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
import secrets
import time
import zlib
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from rlsync.core.errors import BoardClosed, ConfigError, PublishError
from rlsync.tensors.layout import Layout
from rlsync.transport import board_format as fmt
from rlsync.transport.board_format import Note, ReaderStatus, SlotState
from rlsync.transport.board_handle import BoardHandle
from rlsync.transport.board_reader import BoardReader
from rlsync.transport.board_watch import BoardWatch
from rlsync.transport.shared_file import SharedFile

__all__ = ["BoardHandle", "BoardReader", "ReaderStatus", "WeightBoard"]

_FIRST_SLOTS = 3


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
        if not _FIRST_SLOTS <= max_slots <= fmt.MAX_SLOTS:
            raise ConfigError(
                f"max_slots is between {_FIRST_SLOTS} and {fmt.MAX_SLOTS}, got {max_slots}",
                f"WeightBoard(max_slots={max_slots})",
                "leave it out, or allow 2 * workers + 2",
            )
        self.max_slots = max_slots
        self.layout: Layout | None = None
        self._version = 0
        self._slots: list[int] = []
        self._views: dict[int, list[Tensor]] = {}
        self._pid = os.getpid()
        self._file = SharedFile.create("rlsync-board")
        self._end = fmt.DATA_AT
        self._file.resize(self._end)
        self._words = self._file.words(fmt.CONTROL_BYTES, 0)
        self._words[fmt.HEADER_FORMAT] = fmt.FORMAT
        self._words[fmt.HEADER_ID] = secrets.randbits(64)
        self._words[fmt.HEADER_MAGIC] = fmt.MAGIC
        self._file.try_lock(fmt.WRITER_LOCK, exclusive=True)
        self._layout_at = self._layout_bytes = 0
        self._retiring: list[int] = []
        self._free_lines: list[int] = []
        self._watch = BoardWatch(self._file, self._words)

    @property
    def handle(self) -> BoardHandle:
        """What a worker needs to attach; send it to as many as you like, at any time."""
        return BoardHandle(self._file.address, self._words[fmt.HEADER_ID])

    @property
    def version(self) -> int:
        """The newest published version; 0 before the first."""
        return self._version

    @property
    def slot_count(self) -> int:
        """Slots in use for the present layout."""
        return len(self._slots)

    def advance_to(self, version: int) -> None:
        """Never give out ``version`` or a lower one again: a resumed run goes on counting."""
        self._version = max(self._version, version)

    def lay_out(self, layout: Layout) -> None:
        """Say what the coming publishes carry; slots of an earlier layout are retired.

        The first three slots are touched now, so that no publish pays for page faults.
        """
        self._check_open()
        if layout == self.layout:
            return
        self._retiring += self._slots
        self._slots = []
        self._retire()
        if self._free_line_count() < _FIRST_SLOTS:
            raise PublishError(
                f"all {fmt.MAX_SLOTS} slots are leased", "WeightBoard.lay_out", "let the workers adopt first"
            )
        text = layout.to_json()
        self._layout_at = self._reserve(len(text))
        self._layout_bytes = len(text)
        self._file.write(text, self._layout_at)
        self.layout = layout
        self._views = {}
        for _ in range(_FIRST_SLOTS):
            self._add_slot(layout, touch=True)

    def publish(self, tensors: Sequence[Tensor], digest: int = 0) -> int | None:
        """Publish one version; see :class:`rlsync.transport.base.Publisher`.

        Args:
            tensors: one for each entry of the layout that owns its bytes; other dtypes are cast.
            digest: kept beside the version; 0 for none.

        Raises:
            BoardClosed: the board was closed, or nothing is laid out yet.
            LayoutMismatch: a tensor has not the shape of its leaf.
        """
        self._check_open()
        if self.layout is None:
            raise BoardClosed("nothing is laid out yet", "WeightBoard.publish", "call lay_out first")
        self.layout.check(tensors)
        slot = self._take_free_slot(self.layout)
        if slot is None:
            return None
        line, version = fmt.slot_line(slot), self._version + 1
        words = self._words
        words[line + fmt.SLOT_STATE] = SlotState.WRITING
        try:
            with torch.no_grad():
                torch._foreach_copy_(self._views[slot], list(tensors))
            words[line + fmt.SLOT_VERSION] = version
            words[line + fmt.SLOT_TIME_NS] = time.monotonic_ns()
            words[line + fmt.SLOT_DIGEST] = digest
            words[line + fmt.SLOT_STATE] = SlotState.READY
        finally:
            self._file.unlock(fmt.SLOT_LOCK + slot)
        self._version = version
        words[fmt.HEAD] = fmt.pack_head(version, slot)
        if self._retiring:
            self._retire()
        return version

    def newest_views(self) -> list[Tensor]:
        """The newest version's leaves as this process sees them, one for each owning entry; read only.

        Raises:
            BoardClosed: nothing was published yet, or the board was closed.
        """
        self._check_open()
        newest = self._newest_slot
        if newest not in self._views:
            raise BoardClosed("nothing was published yet", "WeightBoard.newest_views", "publish first")
        return self._views[newest]

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
        """
        self._check_open()
        self._words[fmt.ASKED_FROM] = self.newest
        self._words[fmt.ASKED] += 1
        return self._words[fmt.ASKED]

    def note(self, reader: int, kind: Note = Note.STANDS) -> bytes | None:
        """What a reader left with :meth:`BoardReader.leave_note`; ``None`` while it leaves nothing."""
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
            self._words[fmt.CLOSED] = 1
            self._file.close()
        self._views = {}

    def __del__(self) -> None:
        if "_watch" in self.__dict__ and os is not None:  # constructed, and Python is not shutting down
            self.close()

    def _check_open(self) -> None:
        if self._file.fd < 0:
            raise BoardClosed("this board was closed", f"process {os.getpid()}", "make a new one")

    def _take_free_slot(self, layout: Layout) -> int | None:
        newest = self._newest_slot
        for slot in self._slots:
            if slot != newest and self._file.try_lock(fmt.SLOT_LOCK + slot, exclusive=True):
                return slot
        if len(self._slots) >= self.max_slots or not self._free_line_count():
            return None
        slot = self._add_slot(layout, touch=False)
        return slot if self._file.try_lock(fmt.SLOT_LOCK + slot, exclusive=True) else None

    @property
    def _newest_slot(self) -> int:
        """The slot that head names; -1 before the first publish."""
        version, slot = fmt.unpack_head(self._words[fmt.HEAD])
        return slot if version else -1

    def _free_line_count(self) -> int:
        return len(self._free_lines) + fmt.MAX_SLOTS - self._words[fmt.SLOT_COUNT]

    def _add_slot(self, layout: Layout, *, touch: bool) -> int:
        if self._free_lines:
            slot = self._free_lines.pop()
        else:
            slot = self._words[fmt.SLOT_COUNT]
            self._words[fmt.SLOT_COUNT] = slot + 1
        size = fmt.whole_pages(layout.image_bytes)
        at = self._reserve(size)
        line = fmt.slot_line(slot)
        self._words[line + fmt.SLOT_STATE] = SlotState.EMPTY
        self._words[line + fmt.SLOT_IMAGE_AT] = at
        self._words[line + fmt.SLOT_IMAGE_BYTES] = size
        self._words[line + fmt.SLOT_LAYOUT_AT] = self._layout_at
        self._words[line + fmt.SLOT_LAYOUT_BYTES] = self._layout_bytes
        image = self._file.map(size, at, writable=True, populate=touch)
        views = layout.views(image)
        entries = layout.entries
        self._views[slot] = [v for v, e in zip(views, entries, strict=True) if not e.leaf.tie]
        self._slots.append(slot)
        return slot

    def _retire(self) -> None:
        """Give back the memory of slots of an earlier layout that nobody leases any more."""
        newest = self._newest_slot
        for slot in list(self._retiring):
            if slot != newest and self._file.try_lock(fmt.SLOT_LOCK + slot, exclusive=True):
                line = fmt.slot_line(slot)
                self._words[line + fmt.SLOT_STATE] = SlotState.RETIRED
                at, size = line + fmt.SLOT_IMAGE_AT, line + fmt.SLOT_IMAGE_BYTES
                self._file.discard(self._words[at], self._words[size])
                self._file.unlock(fmt.SLOT_LOCK + slot)
                self._retiring.remove(slot)
                self._free_lines.append(slot)

    def _reserve(self, size_bytes: int) -> int:
        at = self._end
        self._end += fmt.whole_pages(size_bytes)
        self._file.resize(self._end)
        return at
