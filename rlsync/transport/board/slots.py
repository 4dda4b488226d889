"""The writer's slots: where their images and layouts lie, which are free, and which can be given back."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from rlsync.core.errors import PublishError
from rlsync.tensors.layout import Layout
from rlsync.transport.board import format as fmt
from rlsync.transport.board.format import SlotState
from rlsync.transport.shared_file import SharedFile, whole_pages

FIRST_SLOTS = 3


@dataclass
class LaidOut:
    """A layout on the board, where its text lies, and the leaves of each slot that has it."""

    layout: Layout
    at: int
    text_bytes: int
    views: dict[int, list[Tensor]] = field(default_factory=dict)


class BoardSlots:
    """The slots of a board; only its writer has them. ``max_slots`` bounds those of one layout."""

    def __init__(self, file: SharedFile, words: memoryview, max_slots: int) -> None:
        self._file = file
        self._words = words
        self._max_slots = max_slots
        self._end = fmt.DATA_AT
        self._now: LaidOut | None = None
        self._retiring: list[LaidOut] = []
        self._free_lines: list[int] = []
        self.others_write = False  #: whether other processes write into slots, too

    @property
    def layout(self) -> Layout | None:
        return None if self._now is None else self._now.layout

    @property
    def count(self) -> int:
        """Slots in use for the present layout."""
        return 0 if self._now is None else len(self._now.views)

    @property
    def newest(self) -> int:
        """The slot that head names, or -1 before the first publish."""
        version, slot = fmt.unpack_head(self._words[fmt.HEAD])
        return slot if version else -1

    def leaves(self, slot: int) -> tuple[Layout, list[Tensor]]:
        """The layout of a slot in use, and its leaves: one for each entry that owns its bytes."""
        for laid_out in (self._now, *self._retiring):
            if laid_out is not None and slot in laid_out.views:
                return laid_out.layout, laid_out.views[slot]
        raise PublishError(f"slot {slot} is not in use", "BoardSlots.leaves", "publish first")

    def lay_out(self, layout: Layout) -> None:
        """Begin with slots of another layout; the first ones are touched now.

        PublishError: too many slots are leased.
        """
        self.retire()
        if self._free_line_count() < FIRST_SLOTS:
            raise PublishError(
                f"all {fmt.MAX_SLOTS} slots are leased", "lay_out", "let the workers adopt first"
            )
        if self._now is not None:
            self._retiring.append(self._now)
            self.retire()
        text = layout.to_json()
        self._now = LaidOut(layout, self._reserve(len(text)), len(text))
        self._file.write(text, self._now.at)
        for _ in range(FIRST_SLOTS):
            self._add(self._now, touch=True)

    def take(self) -> int | None:
        """Lock a slot for writing: not the newest, and leased by nobody. ``None`` when there is none."""
        assert self._now is not None  # the board asks after lay_out only
        newest = self.newest
        for slot in self._now.views:
            if slot != newest and self._lock(slot):
                return slot
        if self.count >= self._max_slots or not self._free_line_count():
            return None
        slot = self._add(self._now, touch=False)
        return slot if self._lock(slot) else None

    def _lock(self, slot: int) -> bool:
        """Lock a slot for writing, unless a worker leases it or a rank still writes to it."""
        if not self._file.try_lock(fmt.SLOT_LOCK + slot, exclusive=True):
            return False
        if self.others_write and self._file.is_locked(fmt.RANK_LOCK + slot):
            self._file.unlock(fmt.SLOT_LOCK + slot)
            return False
        return True

    def retire(self) -> None:
        """Give back the memory of earlier layouts and of their slots that nobody leases any more."""
        for old in list(self._retiring):
            for slot in list(old.views):
                if slot != self.newest and self._lock(slot):
                    line = fmt.slot_line(slot)
                    self._words[line + fmt.SLOT_STATE] = SlotState.RETIRED
                    at, size = line + fmt.SLOT_IMAGE_AT, line + fmt.SLOT_IMAGE_BYTES
                    self._file.discard(self._words[at], self._words[size])
                    self._file.unlock(fmt.SLOT_LOCK + slot)
                    del old.views[slot]
                    self._free_lines.append(slot)
            if not old.views:  # who reads the text holds a lease on one of its slots
                self._file.discard(old.at, whole_pages(old.text_bytes))
                self._retiring.remove(old)

    def forget(self) -> None:
        """Let go of the mappings."""
        self._now, self._retiring = None, []

    def _free_line_count(self) -> int:
        return len(self._free_lines) + fmt.MAX_SLOTS - self._words[fmt.SLOT_COUNT]

    def _add(self, laid_out: LaidOut, *, touch: bool) -> int:
        if self._free_lines:
            slot = self._free_lines.pop()
        else:
            slot = self._words[fmt.SLOT_COUNT]
            self._words[fmt.SLOT_COUNT] = slot + 1
        layout = laid_out.layout
        size = whole_pages(max(1, layout.image_bytes))  # leaves without bytes have a page, too
        at = self._reserve(size)
        line = fmt.slot_line(slot)
        self._words[line + fmt.SLOT_STATE] = SlotState.EMPTY
        self._words[line + fmt.SLOT_IMAGE_AT] = at
        self._words[line + fmt.SLOT_IMAGE_BYTES] = size
        self._words[line + fmt.SLOT_LAYOUT_AT] = laid_out.at
        self._words[line + fmt.SLOT_LAYOUT_BYTES] = laid_out.text_bytes
        image = self._file.map(size, at, writable=True, populate=touch)
        laid_out.views[slot] = layout.owned_views(image)
        return slot

    def _reserve(self, size_bytes: int) -> int:
        at = self._end
        self._end += whole_pages(size_bytes)
        self._file.resize(self._end)
        return at
