"""The writer's slots: where they lie, which are free, and how a version gets into one.

An accelerator gathers its leaves in memory of its own, on a stream beside the learner's, who may write to
them from then on; one copy takes them to the slot, which CUDA pins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from rlsync.core.errors import PublishError
from rlsync.core.ledger import Stamp
from rlsync.tensors.device import (
    NOTHING_QUEUED,
    Lanes,
    Moment,
    Packing,
    all_on_cpu,
    is_queued,
    pin,
    queued_devices,
    shared_memory,
)
from rlsync.tensors.digest import writes
from rlsync.tensors.layout import Layout
from rlsync.transport.board import format as fmt
from rlsync.transport.board.format import SlotState
from rlsync.transport.shared_file import SharedFile, whole_pages

FIRST_SLOTS = 3
_FEW_SLOTS = 8  # to try them all costs less than to find out what readers have adopted


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
        self.kept: Callable[[], Set[int]] = set  #: versions whose slots are not written to
        self.before = -1  #: the slot of the version before the newest one, until the next publish

    @property
    def layout(self) -> Layout | None:
        if self._now is None:
            return None
        return self._now.layout

    @property
    def count(self) -> int:
        """Slots in use for the present layout."""
        if self._now is None:
            return 0
        return len(self._now.views)

    @property
    def newest(self) -> int:
        """The slot that head names, or -1 before the first publish."""
        version, slot = fmt.unpack_head(self._words[fmt.HEAD])
        if version:
            return slot
        return -1

    def leaves(self, slot: int) -> tuple[Layout, list[Tensor]]:
        """The layout of a slot in use, and its leaves: one for each entry that owns its bytes."""
        for laid_out in (self._now, *self._retiring):
            if laid_out is not None and slot in laid_out.views:
                return laid_out.layout, laid_out.views[slot]
        raise PublishError(f"slot {slot} is not in use", "BoardSlots.leaves", "publish first")

    def place(self, slot: int) -> SlotPlace:
        """Where another process finds a slot in use."""
        line = fmt.slot_line(slot)
        at = self._words[line + fmt.SLOT_IMAGE_AT]
        size_bytes = self._words[line + fmt.SLOT_IMAGE_BYTES]
        return SlotPlace(slot, at, size_bytes, self.leaves(slot)[0])

    def lay_out(self, layout: Layout) -> None:
        """Begin with slots of another layout, the first ones touched; PublishError: too many are leased."""
        self.retire()
        if self._free_line_count() < FIRST_SLOTS:
            raise PublishError(
                f"all {fmt.MAX_SLOTS} slots are leased", "lay_out", "let workers adopt first"
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
        self.before = -1  # it may be taken
        newest = self.newest
        # No version is 0, but slots that were never written to say so.
        spared = (self.kept() | {self._words[fmt.STAYS]}) - {0}
        for slot in self._by_hope(self._now.views):
            version = self._words[fmt.slot_line(slot) + fmt.SLOT_VERSION]
            if slot != newest and version not in spared and self._lock(slot):
                return slot
        if self.count >= self._max_slots or not self._free_line_count():
            return None
        slot = self._add(self._now, touch=False)
        if self._lock(slot):
            return slot
        return None

    def _by_hope(self, slots: Iterable[int]) -> Iterable[int]:
        """These slots, last those that somebody may lease: a try is a call of the system.

        Who adopted a version leases its slot, but for the dead and those that adopt by copy.
        """
        count = self._words[fmt.SLOT_COUNT]
        if count <= _FEW_SLOTS:
            return slots
        first = fmt.slot_line(0) + fmt.SLOT_VERSION
        versions = self._words[first : fmt.slot_line(count) : fmt.LINE_WORDS].tolist()
        adopted = set(self._words[fmt.ADOPTED_WORDS])
        return sorted(slots, key=lambda slot: versions[slot] in adopted)

    def _lock(self, slot: int) -> bool:
        """Lock a slot for writing, unless a worker leases it or a rank still writes to it."""
        if not self._file.try_lock(fmt.SLOT_LOCK + slot, exclusive=True):
            return False
        if self.others_write and self._file.is_locked(fmt.RANK_LOCK + slot, exclusively=False):
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
                    at = line + fmt.SLOT_IMAGE_AT
                    size = line + fmt.SLOT_IMAGE_BYTES
                    self._file.discard(self._words[at], self._words[size])
                    self._file.unlock(fmt.SLOT_LOCK + slot)
                    del old.views[slot]
                    self._free_lines.append(slot)
            if not old.views:  # who reads the text holds a lease on one of its slots
                self._file.discard(old.at, whole_pages(old.text_bytes))
                self._retiring.remove(old)

    def forget(self) -> None:
        """Let go of the mappings."""
        self._now = None
        self._retiring = []

    def _free_line_count(self) -> int:
        return len(self._free_lines) + fmt.MAX_SLOTS - self._words[fmt.SLOT_COUNT]

    def _add(self, laid_out: LaidOut, *, touch: bool) -> int:
        layout = laid_out.layout
        size = whole_pages(max(1, layout.image_bytes))  # leaves without bytes have a page, too
        at = self._reserve(size)  # before a line is taken: there may be no room
        if self._free_lines:
            slot = self._free_lines.pop()
        else:
            slot = self._words[fmt.SLOT_COUNT]
            self._words[fmt.SLOT_COUNT] = slot + 1
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
        self._file.allocate(at, whole_pages(size_bytes))
        self._end += whole_pages(size_bytes)
        return at


@dataclass(frozen=True, slots=True)
class SlotPlace:
    """Where another process finds a slot, which has the lock of its number, in the board's file."""

    slot: int
    at: int
    size_bytes: int
    layout: Layout


#: ``fill(place, stamp, views, tensors)`` writes the tensors of a publish into the views of its slot, which no
#: worker can read meanwhile. If it raises, nothing is published.
Fill = Callable[[SlotPlace, Stamp, Sequence[Tensor], Sequence[Tensor]], None]


@torch.no_grad()
def copy(views: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Copy tensors into views, cast to their dtypes."""
    if views:
        torch._foreach_copy_(list(views), list(tensors))


@dataclass(frozen=True, slots=True)
class SlotCopy:
    """Leaves on their way into a slot."""

    into: Sequence[Tensor]  #: the slot's leaves
    #: the learner's; kept here, or their memory would be reused while it is read
    tensors: Sequence[Tensor]
    here: Sequence[int]  #: those that the host copies
    soon: Moment = NOTHING_QUEUED  #: what the learner may write to now was read by the accelerators
    late: Moment = NOTHING_QUEUED  #: all that they copy has arrived

    def finish(self) -> None:
        """Copy. It waits for the accelerators, and for nothing else."""
        self.soon.wait()
        self.late.wait()
        self._copy(self.here)

    def begin(self, later: Set[int]) -> SlotCopy:
        """Make sure of all leaves but ``later``: afterwards the learner may write to them.

        Copies what is in host memory now; an accelerator does coming work after its copy. Returns the rest.
        """
        self.soon.order()
        self._copy([i for i in self.here if i not in later])
        return replace(self, here=[i for i in self.here if i in later])

    def _copy(self, which: Sequence[int]) -> None:
        if len(which) == len(self.into):
            copy(self.into, self.tensors)
        else:
            copy([self.into[i] for i in which], [self.tensors[i] for i in which])


class Staging:
    """Brings leaves into slots, one version after the other."""

    def __init__(self) -> None:
        self._lanes = Lanes()
        self._packing = Packing()

    def copy(self, into: Sequence[Tensor], tensors: Sequence[Tensor]) -> SlotCopy:
        """Begin to bring ``tensors`` into a slot. The copy before this one must be finished."""
        if all_on_cpu(tensors):
            return SlotCopy(into, tensors, range(len(into)))
        here: list[int] = []
        queued: list[int] = []
        for i, tensor in enumerate(tensors):
            if is_queued(tensor.device):
                queued.append(i)
            else:
                here.append(i)
        devices = queued_devices(tensors)
        memory = shared_memory(into)
        for device in devices:
            pin(memory, device)

        # If one accelerator has all leaves, one copy takes them over the bus.
        if not here and len(devices) == 1 and memory is not None:
            packed, views = self._packing.of(memory, into, *devices)
            soon = self._lanes.copy(views, [tensor.detach() for tensor in tensors])
            return SlotCopy(into, tensors, here, soon, self._lanes.copy([memory], [packed], soon))
        done = self._lanes.copy([into[i] for i in queued], [tensors[i].detach() for i in queued])
        return SlotCopy(into, tensors, here, done, done)


@dataclass(frozen=True, slots=True)
class Untouched:
    """Tensors that nobody is to write to for a while."""

    tensors: Sequence[Tensor]
    writes: Sequence[int]  # autograd's write counter of each, when the copy began
    version: int  # which version they are copied for

    @classmethod
    def now(cls, tensors: Sequence[Tensor], version: int) -> Untouched:
        """Snapshot the write counters; :meth:`check` compares against them."""
        return cls(tensors, list(map(writes, tensors)), version)

    def check(self) -> None:
        """Raise PublishError if a tensor was written to since then."""
        if list(map(writes, self.tensors)) != self.writes:
            problem = f"weights were written to while version {self.version} was copied from them"
            cure = "write to them at a stage before the publish, or publish with background=False"
            raise PublishError(problem, "a publish in the background", cure)
