"""The learner's end on a Ray cluster: a publish is one copy, and a thread does the rest."""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import replace

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from torch import Tensor

from rlsync.core.errors import BoardClosed, ConfigError, PublishError
from rlsync.core.ledger import NOTHING, Stamp
from rlsync.tensors.layout import Layout
from rlsync.transport.contract import Note, ReaderStatus, Transport
from rlsync.transport.ray.mailbox_actor import Question, start_mailbox
from rlsync.transport.ray.receiver import BoardReport, RayHandle
from rlsync.transport.relay.ends import Sender
from rlsync.transport.relay.image import ImageBuffer
from rlsync.transport.relay.mailbox import Message, Reply
from rlsync.transport.rules import await_adoption, whole

_FRESH_S = 0.2  #: how old the nodes' reports may be when the learner reads of their workers

_SILENT_S = 15.0  #: a worker whose node has not reported for so long is not known to act any more


class Actors:
    """Asks each actor, by number, for a sign of life. Ray answers for a dead one, a busy one later."""

    def __init__(self, actors: Mapping[int, ActorHandle]) -> None:
        self._actors = dict(actors)
        self._asked: dict[int, ray.ObjectRef] = {}
        self._dead: set[int] = set()

    def dead(self) -> frozenset[int]:
        """The numbers of those known to be dead; returns at once."""
        for number in self._actors.keys() - self._dead:
            if number not in self._asked:
                self._asked[number] = self._actors[number].__ray_ready__.remote()
            ready, _ = ray.wait([self._asked[number]], timeout=0)
            if ready:
                try:
                    ray.get(self._asked.pop(number))
                except RayActorError:
                    self._dead.add(number)
        return frozenset(self._dead)


class RayTransport(Transport):
    """Publishes to the boards of any number of nodes; see :class:`rlsync.transport.contract.Transport`.

    A publish copies the leaves into one flat image. A daemon thread puts the newest one into Ray's object
    store and posts a message to the mailbox, again every ``repeat_s`` seconds. Every node pulls the image.
    """

    background = False
    through_host = True

    def __init__(self, *, repeat_s: float = 1.0) -> None:
        if not ray.is_initialized():
            problem = "Ray is not initialised in this process"
            raise ConfigError(problem, "RayTransport()", "call ray.init() before")
        #: The mailbox's handle, for :class:`rlsync.transport.ray.receiver.NodeReceiver`.
        self.mailbox: ActorHandle = start_mailbox()
        self._pid = os.getpid()
        self._reports: dict[str, BoardReport] = {}  #: by node
        self._reports_at_s = 0.0
        self._known: dict[int, ReaderStatus] = {}  #: the last status of each worker
        self._actors = Actors({})
        self._closed = False
        self.thread = SenderThread(self.mailbox, repeat_s)

    @property
    def handle(self) -> RayHandle:
        return RayHandle(self.mailbox, self.newest_stamp)

    @property
    def layout(self) -> Layout | None:
        return self.thread.layout

    @property
    def newest_stamp(self) -> Stamp:
        """The stamp of the newest version. Nodes may still be pulling it."""
        buffer = self.thread.newest
        if buffer is None:
            return NOTHING
        return buffer.stamp

    @property
    def nodes(self) -> dict[str, BoardReport]:
        """The last report of each node; refreshed by this call, if the mailbox answers."""
        self._refresh()
        return dict(self._reports)

    def lay_out(self, layout: Layout) -> None:
        """Say what the coming publishes carry; nodes go on with what they have."""
        self._check_open()
        if layout != self.layout:
            self.thread.lay_out(layout)

    def publish(
        self, tensors: Sequence[Tensor | None], later: Set[int] = frozenset(), *, stamp: Stamp
    ) -> int | None:
        """Publish by one copy, ``later`` too; PublishError if the thread that sends images has failed."""
        self._check_open()
        self.thread.publish(stamp, whole(self, tensors, stamp))
        return stamp.version

    def newest_leaves(self) -> tuple[Layout, Sequence[Tensor]] | None:
        buffer = self.thread.newest
        if buffer is None:
            return None
        return (buffer.layout, buffer.leaves)

    def status(self) -> list[ReaderStatus]:
        """The workers on all nodes, as these said last; the mailbox is asked a few times a second at most."""
        if time.monotonic() - self._reports_at_s > _FRESH_S:
            self._refresh()
        newest = self.newest_stamp.version
        dead = self._actors.dead()
        by_reader: dict[int, ReaderStatus] = {}
        for report in self._reports.values():
            for status in report.readers:
                by_reader[status.reader] = status
        self._known |= by_reader

        # The mailbox forgets a node that is silent. Ray may take longer than that to say that it is dead.
        for reader in dead & self._known.keys():
            by_reader[reader] = replace(self._known[reader], alive=False, state="dead")

        statuses = []
        for status in by_reader.values():
            lag = max(0, newest - status.adopted_version)
            statuses.append(replace(status, lag_versions=lag))
        return statuses

    def wait(self, version: int, timeout_s: float, readers: Iterable[int] | None = None) -> None:
        await_adoption(
            self._status_now, version, timeout_s, readers, lambda: self.newest_stamp.version
        )

    def await_arrival(self, timeout_s: float, readers: Iterable[int]) -> None:
        """Wait until the newest version is on the boards of ``readers``; see :meth:`wait`."""
        newest = self.newest_stamp.version

        def there() -> list[ReaderStatus]:
            known = {status.reader: status for status in self._status_now()}
            statuses = []
            for report in self._reports.values():
                if report.stamp.generation == self.newest_stamp.generation:
                    version = report.stamp.version
                    for status in report.readers:
                        reader = known[status.reader]
                        statuses.append(replace(reader, adopted_version=version))
            return statuses

        await_adoption(there, newest, timeout_s, readers, lambda: newest)

    def ask(self, lowest: int) -> int:
        self._check_open()
        return self.thread.ask(lowest)

    def note(self, reader: int, kind: Note) -> bytes | None:
        note = None
        if time.monotonic() - self._reports_at_s <= _FRESH_S:
            note = self._note(reader, kind)
        if note is None:
            self._refresh()
            note = self._note(reader, kind)
        return note

    def watch(self, actors: Mapping[int, ActorHandle]) -> None:
        """Ask Ray, too, which workers are dead: ``actors`` has the actor of each reader, by its number."""
        self._actors = Actors(actors)

    def close(self) -> None:
        """Close. Nodes learn of it, and keep what they act with. Closing twice does no harm."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        self.thread.close()

    def end_mailbox(self) -> None:
        """End the mailbox, after :meth:`close`; nodes that have not heard of that take it for a death."""
        if ray.is_initialized():
            with suppress(RayError):  # it is dead
                ray.kill(self.mailbox, no_restart=True)

    def _status_now(self) -> list[ReaderStatus]:
        """The workers on all nodes, for who waits for them."""
        self._reports_at_s = 0.0
        return self.status()

    def _note(self, reader: int, kind: Note) -> bytes | None:
        for report in self._reports.values():
            note = report.notes.get((reader, kind))
            if note is not None:
                return note
        return None

    def _check_open(self) -> None:
        if self._closed:
            raise BoardClosed(
                "this transport was closed", f"process {os.getpid()}", "make a new one"
            )
        if not ray.is_initialized():
            raise BoardClosed("Ray was shut down", "RayTransport", "publish before ray.shutdown()")
        failure = self.thread.failure
        if failure is not None:
            problem = f"the thread that sends images has failed: {failure!r}"
            cure = "look at the error above; the run cannot publish any more"
            raise PublishError(problem, "RayTransport", cure) from failure

    def _refresh(self) -> None:
        """Read the nodes' reports, if the mailbox answers in time; else those before stand."""
        try:
            packed_reports = ray.get(self.mailbox.reports.remote(), timeout=ANSWER_S)
        except (GetTimeoutError, RayError):
            return
        reports: dict[str, BoardReport] = {}
        for node, (age_s, packed) in packed_reports.items():
            report: BoardReport = pickle.loads(packed)
            readers = tuple(_aged(status, age_s) for status in report.readers)
            reports[node] = replace(report, readers=readers)
        self._reports = reports
        self._reports_at_s = time.monotonic()


def _aged(status: ReaderStatus, age_s: float) -> ReaderStatus:
    """A reader as it is known now, from a report of its node that is ``age_s`` old."""
    if age_s > _SILENT_S and status.state == "running":
        state = "silent"
    else:
        state = status.state
    return replace(status, state=state, heartbeat_age_s=status.heartbeat_age_s + age_s)


#: How long the mailbox may take to answer. Only the thread waits, and then it goes on without the answer.
ANSWER_S = 1.0

#: How long a version waits for pulls to end when three images are kept. Then one of them is freed.
_LET_PULLS_END_S = 0.1

#: How often the mailbox is asked whether a version still spreads.
_LOOK_AT_SPREAD_S = 0.02


class SenderThread:
    """Sends the newest version, in a daemon thread, and skips what comes faster than it can."""

    def __init__(self, mailbox: ActorHandle, repeat_s: float) -> None:
        # An image stays in the object store while somebody has its address.
        self.sender = Sender(
            lambda flat: ray.put(flat.numpy()), lambda address: None, self._post, repeat_s
        )
        self.layout: Layout | None = None
        self.newest: ImageBuffer | None = None  #: the newest version
        self.failure: BaseException | None = None  #: the error that has ended the thread
        self._mailbox = mailbox
        self._question = Question()
        self._buffers: list[ImageBuffer] = []
        self._waiting: ImageBuffer | None = None  # the newest version, until the thread takes it
        # stays as it is until the next is taken: it may be put again
        self._taken: ImageBuffer | None = None
        self._posted: ray.ObjectRef | None = None
        self._closed = self._asks_now = False
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="rlsync-ray-publish", daemon=True)
        self._thread.start()

    def lay_out(self, layout: Layout) -> None:
        """Make buffers for another layout; those in use stay until they are replaced."""
        with self._wake:
            self.layout = layout
            self._buffers = [ImageBuffer(layout) for _ in range(3)]

    def publish(self, stamp: Stamp, tensors: Sequence[Tensor]) -> None:
        """Copy a version into a free buffer, make it the newest, and let it be sent; returns then."""
        with self._wake:
            buffer = next(b for b in self._buffers if b is not self.newest and b is not self._taken)
        buffer.write(stamp, tensors)
        with self._wake:
            self.newest = self._waiting = buffer
            self._wake.notify()

    def ask(self, lowest: int) -> int:
        with self._wake:
            self._question = Question(self._question.number + 1, lowest)
            self._asks_now = True
            self._wake.notify()
        return self._question.number

    def close(self) -> None:
        """End the thread, and take all images out of the store."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join(2 * ANSWER_S)
        if ray.is_initialized():
            ray.wait([self._mailbox.close.remote()], timeout=ANSWER_S)
        self.sender.close()

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            while not self._closed and ray.is_initialized():  # calls would start another Ray
                with self._wake:
                    if not (self._closed or self._asks_now or self._waiting is not None):
                        self._wake.wait(self.sender.repeat_s)
                if self._waiting is not None:
                    self._let_spread()
                with self._wake:
                    buffer = None
                    if not self._closed:
                        buffer = self._take()
                    asks = self._asks_now
                    self._asks_now = False
                if buffer is not None:
                    self._make_room()
                    self.sender.send(buffer.stamp, buffer.sealed(), time.monotonic())
                elif asks:
                    self.sender.post_again(time.monotonic())
                else:
                    self.sender.repeat(time.monotonic())
                self._await_reply()
        except BaseException as failure:  # noqa: BLE001  # ends the thread; the next publish raises it
            self.failure = failure

    def _take(self) -> ImageBuffer | None:
        """The newest version; ``None`` if it was taken."""
        buffer = self._waiting
        self._waiting = None
        self._taken = buffer or self._taken
        return buffer

    def _let_spread(self) -> None:
        """Wait while the version before spreads; then the newest one is sent."""
        while self.sender.spreading and not self._closed and ray.is_initialized():
            self.sender.post_again(time.monotonic())
            if not self._await_reply():
                return
            if self.sender.spreading:
                time.sleep(_LOOK_AT_SPREAD_S)

    def _make_room(self) -> None:
        """Let pulls end, for a moment, before an image takes the place of one that is pulled."""
        until_s = time.monotonic() + _LET_PULLS_END_S
        while self.sender.full and time.monotonic() < until_s and not self._closed:
            self.sender.post_again(time.monotonic())
            self._await_reply()
            time.sleep(_LET_PULLS_END_S / 10)

    def _post(self, message: Message) -> None:
        self._posted = self._mailbox.post.remote(message, self._question)

    def _await_reply(self) -> bool:
        """Wait for the mailbox's answer, so that an image is freed only when nobody pulls it; whether it came."""
        posted = self._posted
        self._posted = None
        if posted is None or self.sender.message is None:
            return False
        try:
            reply: Reply | None = ray.get(posted, timeout=ANSWER_S)
        except (GetTimeoutError, RayError):
            return False  # it was killed, or is being started again: repeated later
        if reply is None:
            return False
        self.sender.replied(self.sender.message, reply)
        return True
