"""A node's end: a thread that pulls each version and publishes it on a board; or a worker's own end."""

from __future__ import annotations

import ctypes
import os
import pickle
import threading
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import ray
import torch
from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError, GetTimeoutError, RayError
from torch import Tensor

from rlsync.core.errors import AdoptionTimeout, BoardClosed
from rlsync.core.ledger import NOTHING, Stamp
from rlsync.transport.board.reader import BoardReader
from rlsync.transport.board.writer import BoardWriter
from rlsync.transport.contract import Apply, Note, ReaderStatus
from rlsync.transport.ray.mailbox_actor import LONG_POLL_S, NodeReply
from rlsync.transport.relay.ends import Agent
from rlsync.transport.relay.image import Image
from rlsync.transport.relay.mailbox import Message

_LOOK_S = 0.05  #: how often a receiver looks at its board, and at whether it is to end


def pause_between_reports_s(nodes: int) -> float:
    """How long a receiver gathers news before it reports them, so that the mailbox hears 200 reports a second.

    With few nodes that is less than the time between two looks. It is 5 s at most: a node whose reports are
    much older counts as silent.
    """
    return min(5.0, 5e-3 * nodes)


def report_again_s(pause_s: float) -> float:
    """When a receiver repeats its report though nothing is new: the mailbox may have been killed."""
    return max(2.0, 2 * pause_s)


@dataclass(frozen=True, slots=True)
class BoardReport:
    """What a node tells the learner of its board."""

    node: str
    stamp: Stamp  #: the newest version on the board
    readers: tuple[ReaderStatus, ...]  #: under the numbers that the learner knows them by
    notes: dict[tuple[int, Note], bytes]  #: what each of them has left for the learner

    @classmethod
    def of(cls, node: str, board: BoardWriter, numbers: Sequence[int]) -> BoardReport:
        """The report of now; ``numbers`` has the learner's number of each reader."""
        readers: list[ReaderStatus] = []
        notes: dict[tuple[int, Note], bytes] = {}
        for status in board.status():
            if status.reader >= len(numbers):
                continue
            number = numbers[status.reader]
            readers.append(replace(status, reader=number))
            for kind in Note:
                note = board.note(status.reader, kind)
                if note is not None:
                    notes[number, kind] = note
        return cls(node, board.newest_stamp, tuple(readers), notes)

    @property
    def news(self) -> object:
        """What the learner should hear of at once when it changes: all but how long ago things were."""
        readers = [(s.reader, s.pid, s.state, s.adopted_version) for s in self.readers]
        return self.stamp, readers, self.notes


@dataclass(eq=False)
class NodeReceiver:
    """Supplies a board on this node with the learner's versions, in a daemon thread.

    It alone publishes there, and tells the learner what its workers adopt and leave. Close the board after
    this. ``node`` is a name that no other receiver of ``mailbox`` has; ``numbers`` has the learner's number
    of each reader.
    """

    mailbox: ActorHandle
    node: str
    board: BoardWriter
    _: KW_ONLY
    numbers: Sequence[int]
    pull_s: float = 60.0
    again_s: float = 1.0

    def __post_init__(self) -> None:
        self._agent = Agent(self.node, self._publish, 2 * LONG_POLL_S, self.pull_s, self.again_s)
        self._agent.stamp = self.board.newest_stamp  # a board may have had another receiver before
        self._asked = 0
        self._reported: object = None
        self._reported_at_s = 0.0
        self._pause_s = 0.0  # between two reports
        self.closed_by_learner = False
        self.learner_died = False  #: whether the learner is gone and did not close the transport
        self.failure: BaseException | None = None  #: the error that has ended this receiver
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name=f"rlsync-receiver-{self.node}", daemon=True
        )
        self._thread.start()

    @property
    def stamp(self) -> Stamp:
        """The newest version on the board; :data:`rlsync.core.ledger.NOTHING` before the first."""
        return self._agent.stamp

    def close(self, timeout_s: float = 10.0) -> None:
        """Stop receiving, within ``timeout_s`` seconds. The board keeps what it has. Twice does no harm."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def report_now(self, timeout_s: float = 5.0) -> bool:
        """Report the workers here from any thread; whether the mailbox has it within ``timeout_s``."""
        report = pickle.dumps(BoardReport.of(self.node, self.board, self.numbers))
        try:
            ray.get(self.mailbox.report.remote(self.node, report), timeout=timeout_s)
        except (GetTimeoutError, RayError):
            return False
        return True

    def await_stamp(self, stamp: Stamp, timeout_s: float, where: str) -> None:
        """Wait until a version, or a newer one, is here; else BoardClosed or AdoptionTimeout."""
        until_s = time.monotonic() + timeout_s
        while self.stamp < stamp:
            if self.closed_by_learner or self.learner_died or self.failure is not None:
                cure = "the learner must live while workers attach"
                raise BoardClosed("the learner is gone", where, cure) from self.failure
            if time.monotonic() >= until_s:
                problem = f"version {stamp.version} has not come within {timeout_s:g} s"
                cure = "look whether the learner's node can be reached, and how full its object store is"
                raise AdoptionTimeout(problem, where, cure)
            time.sleep(_LOOK_S)

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            while not (self._stop.is_set() or self.closed_by_learner or self.learner_died):
                request = self._agent.request(time.monotonic())
                if request is None:
                    self._report()
                    self._stop.wait(_LOOK_S)
                    continue
                reply = self._await_reply(self.mailbox.ask.remote(request, self._asked))
                if reply is None:
                    self._agent.to_pull(None, time.monotonic())
                    self._stop.wait(_LOOK_S)
                else:
                    self._take_reply(reply)
        except BaseException as failure:  # ends the thread; whoever looks sees it
            self.failure = failure
            raise
        finally:
            if not self.learner_died:
                self.mailbox.leave.remote(self.node)

    def _await_reply(self, call: ray.ObjectRef) -> NodeReply | None:
        """What the mailbox answers; ``None`` if it does not."""
        until_s = time.monotonic() + 2 * LONG_POLL_S
        while time.monotonic() < until_s and not self._stop.is_set():
            self._report()
            try:
                reply: NodeReply = ray.get(call, timeout=_LOOK_S)
            except GetTimeoutError:
                continue
            except ActorDiedError:  # it would be started again, if its owner lived
                self.learner_died = True
                return None
            except RayError:
                return None
            return reply
        return None

    def _take_reply(self, reply: NodeReply) -> None:
        self.closed_by_learner = reply.closed
        self._pause_s = pause_between_reports_s(reply.nodes)
        if reply.question.number > self._asked:
            self._asked = reply.question.number
            self.board.ask_as(reply.question.number, reply.question.lowest)
        message = self._agent.to_pull(reply.message, time.monotonic())
        if message is not None:
            self._pull(message)

    def _pull(self, message: Message) -> None:
        """Pull an image until it is there, or lost, or the agent gives it up."""
        # Not ray.get or ray.wait with a timeout: each call that ends without the image throws away what has
        # come of it, and the next one begins from the first byte.
        pulled: Future[Any] = message.address.future()
        while not self._stop.is_set():
            self._report()
            try:
                flat = _flat(pulled.result(_LOOK_S))
            except FutureTimeoutError:
                self._agent.request(time.monotonic())  # gives it up when it takes too long
                if not self._agent.pulling:
                    return
                continue
            except RayError:
                flat = None
            self._agent.arrived(message, flat, time.monotonic())
            return

    def _publish(self, image: Image) -> None:
        if image.layout != self.board.layout:
            self.board.lay_out(image.layout)
        # A board with bounded slots may have no room for a moment; nothing is published then.
        while (
            self.board.publish(image.leaves, stamp=image.stamp) is None and not self._stop.is_set()
        ):
            self._stop.wait(_LOOK_S)

    def _report(self) -> None:
        """Report the workers here to the learner, if there is something new or the last report is old."""
        now_s = time.monotonic()
        age_s = now_s - self._reported_at_s
        if age_s < self._pause_s:
            return
        report = BoardReport.of(self.node, self.board, self.numbers)
        again_s = report_again_s(self._pause_s)
        if report.news != self._reported or age_s >= again_s:
            self._reported = report.news
            self._reported_at_s = now_s
            self.mailbox.report.remote(self.node, pickle.dumps(report))


def _flat(array: Any) -> Tensor:
    """A flat image that has come, read-only, in the memory that this node's object store has of it."""
    # Torch warns of arrays that are read-only, as these are, so it gets the memory by its address.
    memory = (ctypes.c_uint8 * array.nbytes).from_address(array.ctypes.data)
    memory.array = array  # the memory is the store's while this array lives
    return torch.frombuffer(memory, dtype=torch.uint8)


#: how long a worker waits for its first version when it attaches, seconds
FIRST_VERSION_WITHIN_S = 120.0


@dataclass(frozen=True, slots=True)
class RayHandle:
    """How a worker, in any process of the cluster, finds a :mod:`rlsync.transport.ray.learner`."""

    mailbox: ActorHandle
    #: The newest version when this handle was made. A worker that attaches has it, or a newer one, before it
    #: acts.
    newest: Stamp = NOTHING

    def subscribe(self, apply: Apply, reader: int | None = None) -> RaySubscriber:
        """Attach, with a board of one's own; see :meth:`rlsync.transport.contract.Handle.subscribe`."""
        if reader is None:
            reader = 0
        subscriber = RaySubscriber(self.mailbox, apply, reader)
        try:
            subscriber.receiver.await_stamp(self.newest, FIRST_VERSION_WITHIN_S, subscriber.where)
        except BaseException:
            subscriber.close()
            raise
        return subscriber


class RaySubscriber(BoardReader):
    """A worker's end, with a board and a receiver for this process alone."""

    def __init__(self, mailbox: ActorHandle, apply: Apply, reader: int) -> None:
        self._board = BoardWriter()
        super().__init__(self._board.handle, apply, 0)
        self.where = f"worker {reader}, process {os.getpid()}"
        name = f"{self.where}, {uuid.uuid4().hex[:6]}"
        self.receiver = NodeReceiver(mailbox, name, self._board, numbers=[reader])

    @property
    def closed_by_learner(self) -> bool:
        return self.receiver.closed_by_learner or self.receiver.learner_died

    @property
    def learner_died(self) -> bool:
        return self.receiver.learner_died

    def leave_note(self, note: bytes, kind: Note = Note.LEAVES) -> None:
        super().leave_note(note, kind)
        if kind is Note.LEAVES:  # the learner asks for it as soon as the workers stand
            self.receiver.report_now()

    def close(self) -> None:
        self.receiver.close()
        super().close()
        self._board.close()
