"""Local transport: learner and worker in one process, perhaps in two threads."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace

from torch import Tensor

from rlsync.core.errors import BoardClosed, ConfigError
from rlsync.core.ledger import NOTHING, Stamp
from rlsync.tensors.device import NOTHING_QUEUED, Moment, queued_devices
from rlsync.tensors.layout import Layout, LeafSpec
from rlsync.transport.contract import Apply, Note, ReaderStatus, Subscriber, Transport
from rlsync.transport.rules import await_adoption, check_newer, keyed, laid_out


@dataclass(frozen=True, slots=True)
class Staged:
    """What one publish brings; if it waits for the running rollout to end, its tensors are copies."""

    stamp: Stamp
    layout: Layout
    tensors: list[Tensor]
    #: when the tensors hold the version, on the accelerators that they are on
    there: Moment = NOTHING_QUEUED

    @classmethod
    def of(cls, layout: Layout, tensors: Sequence[Tensor | None], stamp: Stamp) -> Staged:
        """What a publish brings, without the entries that it leaves as they are (``None``)."""
        layout.check_count(tensors)
        brought = [tensor for tensor in tensors if tensor is not None]
        if len(brought) < len(tensors):
            chosen: dict[str, list[LeafSpec]] = {}
            for entry in layout.entries:
                if tensors[entry.owner] is not None:
                    chosen.setdefault(entry.destination, []).append(entry.leaf)
            layout = Layout.build(chosen)
        layout.check(brought)
        return cls(stamp, layout, brought)

    def copied(self) -> Staged:
        """The same with tensors of its own."""
        tensors = [tensor.detach().clone() for tensor in self.tensors]
        return replace(self, tensors=tensors, there=Moment.now(queued_devices(tensors)))

    def over(self, older: Staged | None) -> Staged:
        """This version, with what only an older one brings that was never taken."""
        if older is None:
            return self
        mine = keyed(self.layout, self.tensors)
        left = keyed(older.layout, older.tensors)
        if left.keys() <= mine.keys():
            return self
        # No leaf is tied here: the one that it is tied to may come from the other version.
        entries = [e for e in older.layout.entries if (e.destination, e.leaf.name) not in mine]
        chosen: dict[str, list[LeafSpec]] = {}
        for entry in (*entries, *self.layout.entries):
            chosen.setdefault(entry.destination, []).append(replace(entry.leaf, tie=""))
        layout = Layout.build(chosen)
        both = left | mine
        tensors = [both[e.destination, e.leaf.name] for e in layout.owned]
        older.there.order()
        return Staged(self.stamp, layout, tensors, Moment.now(queued_devices(tensors)))


class LocalTransport(Transport):
    """Hands versions to the one reader in this process, between its rollouts and never during one.

    When no rollout is running, a publish calls the reader's ``apply`` at once, with the learner's own
    tensors. When one is running in another thread (``collector.start()``), the publish leaves a copy, and
    the reader takes it at its next rollout. It keeps no image: a publish changes the leaves that it brings,
    and others stay as they are.

    Example:
        >>> import torch
        >>> from rlsync.tensors.layout import LeafSpec
        >>> acts = torch.zeros(2)
        >>> transport = LocalTransport()
        >>> reader = transport.subscribe(lambda version, layout, views: bool(acts.copy_(views[0]) is None))
        >>> transport.lay_out(Layout.build({"policy": [LeafSpec("w", "parameter", (2,), torch.float32)]}))
        >>> transport.publish([torch.ones(2)], stamp=Stamp(1, 1))
        1
        >>> acts.tolist()
        [1.0, 1.0]
    """

    background = False
    through_host = False
    layout: Layout | None = None
    newest_stamp: Stamp = NOTHING

    def __init__(self) -> None:
        self._staged: Staged | None = None
        self._reader: LocalReader | None = None
        self._acting = threading.Lock()
        self._guard = threading.Lock()
        self._closed = False
        self._question = 0
        self._lowest = 0
        self._notes: dict[Note, bytes] = {}

    @property
    def handle(self) -> LocalTransport:
        """What the reader subscribes with: this object."""
        return self

    def subscribe(self, apply: Apply, reader: int | None = None) -> LocalReader:
        """Attach the one reader.

        Args:
            apply: writes a version into what acts. Its views are good until it returns, so it must copy.
            reader: 0, or ``None``.

        Raises:
            ConfigError: there is a reader already.
            BoardClosed: this transport was closed.
        """
        self._check_open()
        if self._reader is not None:
            raise ConfigError(
                "a local transport has one reader", "LocalTransport.subscribe", "make another"
            )
        self._reader = LocalReader(self, apply)
        return self._reader

    def lay_out(self, layout: Layout) -> None:
        """Say what the coming publishes carry; a staged version keeps the layout it was published under."""
        self._check_open()
        with self._guard:
            self.layout = layout

    def publish(
        self, tensors: Sequence[Tensor | None], later: Set[int] = frozenset(), *, stamp: Stamp
    ) -> int | None:
        """Publish one version; never coalesces. See :meth:`rlsync.transport.contract.Transport.publish`.

        ``later`` is not used: everything is copied before this returns.
        """
        self._check_open()
        layout = laid_out(self)
        brought = Staged.of(layout, tensors, stamp)
        with self._guard:
            check_newer(stamp, self.newest_stamp)
            if self._acting.acquire(blocking=False):
                try:
                    self._apply(brought.over(self._staged))
                    self._staged = None
                finally:
                    self._acting.release()
            else:
                self._staged = brought.copied().over(self._staged)
            self.newest_stamp = stamp
        return stamp.version

    def status(self) -> list[ReaderStatus]:
        if self._reader is None:
            return []
        return [self._reader.status()]

    def wait(self, version: int, timeout_s: float, readers: Iterable[int] | None = None) -> None:
        """Wait until the reader acts with ``version``; it does when its running rollout has ended."""
        status = self._status_between_rollouts
        await_adoption(status, version, timeout_s, readers, lambda: self.newest_stamp.version)

    def ask(self, lowest: int) -> int:
        self._question = self._question + 1
        self._lowest = lowest
        return self._question

    def note(self, reader: int, kind: Note) -> bytes | None:
        if reader == 0:
            return self._notes.get(kind)
        return None

    def close(self) -> None:
        """Let go of the reader."""
        self._closed = True
        self._reader = None
        self._staged = None

    def _check_open(self) -> None:
        if self._closed:
            raise BoardClosed(
                "this transport was closed", f"process {os.getpid()}", "make a new one"
            )

    def _status_between_rollouts(self) -> list[ReaderStatus]:
        if self._reader is not None and self._acting.acquire(blocking=False):
            try:
                self._take_staged()
            finally:
                self._acting.release()
        return self.status()

    def _take_staged(self) -> None:
        """Apply what is staged; under the acting lock."""
        with self._guard:
            if self._staged is not None:
                self._apply(self._staged)
                self._staged = None

    def _apply(self, staged: Staged) -> None:
        if self._reader is not None:
            self._reader.apply(staged)


class LocalReader(Subscriber):
    """The worker's end of a :class:`LocalTransport`, in the same process."""

    version: int = 0
    learner_died = False  # the learner is this process

    def __init__(self, transport: LocalTransport, apply: Apply) -> None:
        self._transport = transport
        self._apply = apply
        self._rollout_at = time.monotonic()

    @property
    def newest(self) -> int:
        return self._transport.newest_stamp.version

    @property
    def asked(self) -> int:
        if self.version >= max(1, self._transport._lowest):
            return self._transport._question
        return 0

    def adopt(self) -> int:
        with self.acting() as version:
            return version

    @contextmanager
    def acting(self) -> Iterator[int]:
        """Adopt the newest version and hold it for the duration of a rollout."""
        with self._transport._acting:
            self._transport._take_staged()
            self._rollout_at = time.monotonic()
            yield self.version

    def apply(self, staged: Staged) -> None:
        """Write a version into what acts; called by the transport between rollouts."""
        # it may have been staged in another thread, which has streams of its own
        staged.there.order()
        self._apply(staged.stamp.version, staged.layout, staged.layout.spread(staged.tensors))
        self.version = staged.stamp.version

    @property
    def closed_by_learner(self) -> bool:
        return self._transport._closed

    @property
    def closed(self) -> bool:
        return self._transport._reader is not self

    def leave_note(self, note: bytes, kind: Note) -> None:
        self._transport._notes[kind] = note

    def status(self) -> ReaderStatus:
        """What the transport knows of this reader."""
        lag = max(0, self.newest - self.version)
        age_s = time.monotonic() - self._rollout_at
        return ReaderStatus(0, os.getpid(), True, "running", self.version, lag, age_s)

    def close(self) -> None:
        if not self.closed:
            self._transport._reader = None
