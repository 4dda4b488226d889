"""A small transport for tests: a queue between threads. Nothing outside this file knows of it."""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass

from torch import Tensor

from rlsync.core.errors import BoardClosed, PublishError
from rlsync.core.ledger import NOTHING, Stamp
from rlsync.tensors.layout import Layout
from rlsync.transport.contract import Apply, Note, ReaderStatus
from rlsync.transport.rules import await_adoption, check_newer, completed, keyed


@dataclass(frozen=True)
class Image:
    """One version: copies of its tensors, never written to again."""

    stamp: Stamp
    layout: Layout
    tensors: list[Tensor]


class QueueTransport:
    """The learner's end: each publish puts one image into the queue of every reader."""

    background = False
    through_host = False

    def __init__(self) -> None:
        self.layout: Layout | None = None
        self.closed = False
        self.question, self.lowest = 0, 0
        self.readers: dict[int, QueueReader] = {}
        self._newest: Image | None = None

    @property
    def handle(self) -> QueueTransport:
        return self

    @property
    def newest_stamp(self) -> Stamp:
        return NOTHING if self._newest is None else self._newest.stamp

    def subscribe(self, apply: Apply, reader: int | None = None) -> QueueReader:
        if self.closed:
            raise BoardClosed("this transport was closed", "subscribe", "make a new one")
        number = len(self.readers) if reader is None else reader
        if number in self.readers:
            raise PublishError(f"worker {number} reads already", "subscribe", "give it another number")
        self.readers[number] = QueueReader(self, apply, number)
        if self._newest is not None:
            self.readers[number].arrived.put(self._newest)
        return self.readers[number]

    def lay_out(self, layout: Layout) -> None:
        if self.closed:
            raise BoardClosed("this transport was closed", "lay_out", "make a new one")
        self.layout = layout

    def publish(
        self, tensors: Sequence[Tensor | None], later: Set[int] = frozenset(), *, stamp: Stamp
    ) -> int | None:
        if self.closed or self.layout is None:
            raise BoardClosed("closed, or nothing is laid out", "publish", "lay out first")
        kept = {} if self._newest is None else keyed(self._newest.layout, self._newest.tensors)
        whole = completed(tensors, self.layout, kept)
        self.layout.check(whole)
        check_newer(stamp, self.newest_stamp)
        pairs = zip(whole, self.layout.owned, strict=True)
        copies = [tensor.detach().clone().to(entry.leaf.dtype) for tensor, entry in pairs]
        self._newest = Image(stamp, self.layout, copies)
        for reader in self.readers.values():
            reader.arrived.put(self._newest)
        return stamp.version

    def join(self) -> None:
        """Nothing to wait for."""

    def newest_leaves(self) -> tuple[Layout, list[Tensor]] | None:
        return None if self._newest is None else (self._newest.layout, self._newest.tensors)

    def leaves_before(self) -> None:
        return None

    def status(self) -> list[ReaderStatus]:
        return [reader.status() for reader in self.readers.values()]

    def wait(self, version: int, timeout_s: float, readers: Iterable[int] | None = None) -> None:
        await_adoption(self.status, version, timeout_s, readers, lambda: self.newest_stamp.version)

    def ask(self, lowest: int) -> int:
        self.question, self.lowest = self.question + 1, lowest
        return self.question

    def note(self, reader: int, kind: Note) -> bytes | None:
        return self.readers[reader].notes.get(kind) if reader in self.readers else None

    def close(self) -> None:
        self.closed = True


class QueueReader:
    """A worker's end, in a thread of its own."""

    def __init__(self, transport: QueueTransport, apply: Apply, number: int) -> None:
        self.arrived: queue.SimpleQueue[Image] = queue.SimpleQueue()
        self.notes: dict[Note, bytes] = {}
        self.closed = False
        self._transport, self._apply, self._number = transport, apply, number
        self._stamp = NOTHING
        self._held: Image | None = None
        self._seen_at = time.monotonic()

    @property
    def version(self) -> int:
        return self._stamp.version

    @property
    def newest(self) -> int:
        return self._transport.newest_stamp.version

    @property
    def asked(self) -> int:
        return self._transport.question if self.version >= max(1, self._transport.lowest) else 0

    @property
    def closed_by_learner(self) -> bool:
        return self._transport.closed

    @property
    def learner_died(self) -> bool:
        return False

    def begin(self) -> int:
        return self.adopt()

    def adopt(self) -> int:
        self._seen_at = time.monotonic()
        image = None
        while not self.arrived.empty():
            image = self.arrived.get()
        if image is not None:
            if image.stamp.generation < self._stamp.generation:
                raise PublishError("an older generation", f"worker {self._number}", "end the older learner")
            self._apply(image.stamp.version, image.layout, image.layout.spread(image.tensors))
            self._stamp, self._held = image.stamp, image
        return self.version

    def leave_note(self, note: bytes, kind: Note) -> None:
        self.notes[kind] = note

    def forget(self) -> None:
        if self._held is not None and self.arrived.empty():
            self.arrived.put(self._held)

    def status(self) -> ReaderStatus:
        lag, age_s = max(0, self.newest - self.version), time.monotonic() - self._seen_at
        return ReaderStatus(self._number, os.getpid(), True, "running", self.version, lag, age_s)

    def close(self) -> None:
        self.closed = True
        self._transport.readers.pop(self._number, None)
