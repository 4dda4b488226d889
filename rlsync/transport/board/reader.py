"""The worker's end of a WeightBoard, and how another process finds and opens one."""

from __future__ import annotations

import os
import time
import zlib
from dataclasses import dataclass

import torch

from rlsync.core.errors import BoardClosed, ConfigError, PublishError
from rlsync.core.ledger import NOTHING, Stamp
from rlsync.tensors.layout import Layout
from rlsync.transport.board import format as fmt
from rlsync.transport.board.format import SlotState
from rlsync.transport.contract import Apply, Note, Subscriber
from rlsync.transport.shared_file import FileAddress, Mark, SharedFile, whole_pages


@dataclass(frozen=True, slots=True)
class BoardHandle:
    """How a worker finds a board: small, picklable, valid while the learner lives."""

    address: FileAddress  #: where the file is
    board_id: int  #: which board it must be
    generation: int = 0  #: the learner's when this handle was made; an older board is refused

    def open(self) -> tuple[SharedFile, memoryview]:
        """Open the board with a descriptor and locks of this process's own, and map its control words.

        BoardClosed if the learner has closed the board or died, or the board is of an older generation.
        """
        mark = Mark(fmt.MAGIC, fmt.FORMAT, self.board_id)
        file, words = mark.open(self.address, fmt.CONTROL_BYTES, "board")
        if words[fmt.GENERATION] < self.generation:
            file.close()
            problem = (
                f"the board is of generation {words[fmt.GENERATION]}, older than {self.generation}"
            )
            cure = "attach to the board of the learner that runs now"
            raise BoardClosed(problem, f"opening {self.address.path}", cure)
        return file, words

    def subscribe(self, apply: Apply, reader: int | None = None) -> BoardReader:
        """Attach as a reader; see :meth:`rlsync.transport.contract.Handle.subscribe`."""
        return BoardReader(self, apply, reader)


@dataclass(frozen=True, slots=True)
class SlotImage:
    """A slot as it is mapped here."""

    at: int
    pointer: int
    image: torch.Tensor
    views: list[torch.Tensor]


class BoardReader(Subscriber):
    """Adopts versions from a board, in the caller's thread, without ever waiting for the learner.

    One open file, one line on the board, both held for life: when the process dies the kernel frees
    them, and the learner sees it. ``reader`` is this worker's number; ``None`` takes the first free one.

    Raises:
        BoardClosed: the learner has closed the board or died.
        PublishError: a living process already holds this number.
    """

    def __init__(self, handle: BoardHandle, apply: Apply, reader: int | None = None) -> None:
        self._file, self._words = handle.open()
        self._apply = apply
        self._head = 0
        self.stamp: Stamp = NOTHING  #: adopted last; what acts never falls behind it
        self._lease: int | None = None
        self._layouts: dict[int, Layout] = {}
        self._images: dict[int, SlotImage] = {}
        self.reader = self._claim_line(reader)
        self._line = fmt.reader_line(self.reader)
        self._words[self._line + fmt.READER_ADOPTED] = 0
        for kind in Note:
            self._words[fmt.note_bytes(self.reader, kind)] = 0
        self.give_sign_of_life()
        self._words[self._line + fmt.READER_PID] = os.getpid()

    @property
    def version(self) -> int:
        return fmt.unpack_head(self._head)[0]

    @property
    def newest(self) -> int:
        """The newest published version: one 8-byte read."""
        return fmt.unpack_head(self._words[fmt.HEAD])[0]

    @property
    def asked(self) -> int:
        if self.version >= max(1, self._words[fmt.ASKED_FROM]):
            return self._words[fmt.ASKED]
        return 0

    @property
    def closed_by_learner(self) -> bool:
        return bool(self._words[fmt.CLOSED]) or not self._file.is_locked(fmt.WRITER_LOCK)

    @property
    def closed(self) -> bool:
        return self._file.fd < 0

    @property
    def learner_died(self) -> bool:
        return not self._words[fmt.CLOSED] and not self._file.is_locked(fmt.WRITER_LOCK)

    def give_sign_of_life(self) -> None:
        """Tell who watches that this process does not hang; :meth:`adopt` does so, too."""
        self._words[self._line + fmt.READER_HEARTBEAT_NS] = time.monotonic_ns()

    def adopt(self) -> int:
        self.give_sign_of_life()
        while (head := self._words[fmt.HEAD]) != self._head:
            version, slot = fmt.unpack_head(head)
            if self._lease_slot(version, slot):
                self._take(head, version, slot)
        return self.version

    def adopt_version(self, version: int) -> bool:
        """Adopt a version that is not the newest; False if its slot has another one by now."""
        for slot in range(self._words[fmt.SLOT_COUNT]):
            if self._lease_slot(version, slot):
                self._take(fmt.pack_head(version, slot), version, slot)
                return True
        return False

    def leave_note(self, note: bytes, kind: Note = Note.LEAVES) -> None:
        """Tell the learner something; see the contract. PublishError: it is larger than 1 MiB, compressed."""
        packed = zlib.compress(note)
        if len(packed) > fmt.NOTE_BYTES:
            problem = f"a note of {len(packed)} bytes has no room on the board"
            cure = f"stay below {fmt.NOTE_BYTES} bytes, compressed"
            raise PublishError(problem, f"worker {self.reader}", cure)
        size = fmt.note_bytes(self.reader, kind)
        self._words[size] = 0
        self._file.write(packed, fmt.note_at(self.reader, kind))
        self._words[size] = len(packed)

    def forget(self) -> None:
        """Act as if nothing were adopted: the next :meth:`adopt` takes the newest version again."""
        self._release(self._lease)
        self._lease = None
        self._head = 0

    def close(self) -> None:
        """Give the line and the lease back."""
        if self._file.fd >= 0:
            self._words[self._line + fmt.READER_PID] = 0
            self._words[self._line + fmt.READER_ADOPTED] = 0
            self._file.close()

    def _lease_slot(self, version: int, slot: int) -> bool:
        # head is only a hint. Under the shared lock the line cannot change, and only a line that is
        # READY with the version that head named was published: any other is a reused slot.
        if not self._file.try_lock(fmt.SLOT_LOCK + slot, exclusive=False):
            return False
        line = fmt.slot_line(slot)
        ready = self._words[line + fmt.SLOT_STATE] == SlotState.READY
        if ready and self._words[line + fmt.SLOT_VERSION] == version:
            return True
        self._file.unlock(fmt.SLOT_LOCK + slot)
        return False

    def _take(self, head: int, version: int, slot: int) -> None:
        stamp = Stamp(self._words[fmt.slot_line(slot) + fmt.SLOT_GENERATION], version)
        try:
            self._refuse_older_generation(stamp)
            layout, views = self._slot_views(slot)
            keep = self._apply(stamp.version, layout, views)
        except BaseException:
            self._release(slot)
            raise
        previous = self._lease
        self._lease = slot if keep else None
        self._head = head
        self.stamp = stamp
        self._words[self._line + fmt.READER_ADOPTED] = stamp.version
        self._release(previous)
        if not keep:
            self._release(slot)

    def _refuse_older_generation(self, stamp: Stamp) -> None:
        if stamp.generation < self.stamp.generation:
            problem = f"version {stamp.version} is of generation {stamp.generation}; "
            problem += f"this worker has acted with generation {self.stamp.generation}"
            cure = "end the older learner: only the one that was resumed last may publish"
            raise PublishError(problem, f"worker {self.reader}", cure)

    def _release(self, slot: int | None) -> None:
        if slot is not None:
            self._file.unlock(fmt.SLOT_LOCK + slot)

    def _slot_views(self, slot: int) -> tuple[Layout, list[torch.Tensor]]:
        line = fmt.slot_line(slot)
        layout_at = self._words[line + fmt.SLOT_LAYOUT_AT]
        if layout_at not in self._layouts:
            size = self._words[line + fmt.SLOT_LAYOUT_BYTES]
            self._layouts = {layout_at: Layout.from_json(self._file.read(size, layout_at))}
            # Slots of an older layout are retired and never come back.
            self._images = {s: image for s, image in self._images.items() if s == self._lease}
        layout = self._layouts[layout_at]
        at = self._words[line + fmt.SLOT_IMAGE_AT]
        known = self._images.get(slot)
        # A tensor that was pickled takes its storage elsewhere.
        if known is None or known.at != at or known.image.data_ptr() != known.pointer:
            size = self._words[line + fmt.SLOT_IMAGE_BYTES]
            image = self._file.map(whole_pages(size), at, writable=False, populate=True)
            self._images[slot] = SlotImage(at, image.data_ptr(), image, layout.views(image))
        return layout, self._images[slot].views

    def _claim_line(self, wanted: int | None) -> int:
        if wanted is not None and not 0 <= wanted < fmt.MAX_READERS:
            self._file.close()
            problem = f"a board has no line for worker {wanted}"
            raise ConfigError(
                problem, f"pid {os.getpid()}", f"number workers from 0 to {fmt.MAX_READERS - 1}"
            )
        if wanted is None:
            candidates = range(fmt.MAX_READERS)
        else:
            candidates = range(wanted, wanted + 1)
        for reader in candidates:
            if self._file.claim(fmt.READER_LOCK + reader):
                return reader
        self._file.close()
        if wanted is None:
            problem = "no free line for this worker on the board"
        else:
            problem = f"a living process already reads the board as worker {wanted}"
        raise PublishError(problem, f"pid {os.getpid()}", "give each worker its own number")
