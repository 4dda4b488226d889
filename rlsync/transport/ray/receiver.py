"""A node's end: a thread that pulls each version once and publishes it on the node's board."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayError

from rlsync.core.errors import AdoptionTimeout, BoardClosed
from rlsync.core.ledger import Stamp
from rlsync.transport.board.writer import BoardWriter
from rlsync.transport.ray.mailbox_actor import LONG_POLL_S, Reply
from rlsync.transport.ray.store import image_at
from rlsync.transport.ray.words import NodeWord
from rlsync.transport.relay.agent import Agent, Tally
from rlsync.transport.relay.image import Image
from rlsync.transport.relay.letter import Letter

#: How often a receiver looks at its board, and at whether it is to end.
_LOOK_S = 0.05

#: How often it tells the learner what it has told already: the mailbox may have been killed.
_TELL_AGAIN_S = 2.0


class NodeReceiver:
    """Keeps an ordinary board on this node supplied with the learner's versions.

    Each version is pulled once, whatever the number of workers that read the board, checked, and published
    under the learner's own stamp. One that is late skips to the newest. What workers of this node adopt and
    leave for the learner goes the other way. Everything happens in a daemon thread of this process, which is
    the only one that publishes on the board.

    Args:
        mailbox: from :func:`rlsync.transport.ray.mailbox_actor.start_mailbox`, or
            :attr:`rlsync.transport.ray.learner.RayTransport.mailbox`.
        node: a name that no other receiver of this mailbox has.
        board: the node's board. It stays the caller's: close it after this. What it has stays there until
            something newer comes.
        numbers: the learner's number of each reader of the board, in order; by default they are the same.
        pull_s: how long an image may take to come to this node, seconds.
        again_s: how long to wait before asking again for an image that could not be had, seconds.

    Example:
        >>> import torch
        >>> from rlsync.transport.board import BoardWriter
        >>> def on_a_node(mailbox):
        ...     board = BoardWriter()
        ...     receiver = NodeReceiver(mailbox, "node 1", board)
        ...     receiver.start()
        ...     return board, receiver  # workers read board.handle
    """

    def __init__(
        self,
        mailbox: Any,
        node: str,
        board: BoardWriter,
        *,
        numbers: Sequence[int] | None = None,
        pull_s: float = 60.0,
        again_s: float = 1.0,
    ) -> None:
        self.node = node
        self._mailbox = mailbox
        self._board = board
        self._numbers = numbers
        self._agent = Agent(node, self._publish, answer_s=2 * LONG_POLL_S, pull_s=pull_s, again_s=again_s)
        self._agent.stamp = board.newest_stamp  # a board may have had another receiver before
        self._asked = 0
        self._told: object = None
        self._told_at_s = 0.0
        self._closed_by_learner = self._learner_died = False
        self._failure: BaseException | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"rlsync-receiver-{node}", daemon=True)

    @property
    def stamp(self) -> Stamp:
        """The newest version on the board; :data:`rlsync.core.ledger.NOTHING` before the first."""
        return self._agent.stamp

    @property
    def tally(self) -> Tally:
        """What became of the letters and images that reached this node."""
        return self._agent.tally

    @property
    def closed_by_learner(self) -> bool:
        """Whether the learner has closed the transport."""
        return self._closed_by_learner

    @property
    def learner_died(self) -> bool:
        """Whether the learner is gone and did not close the transport."""
        return self._learner_died

    @property
    def failure(self) -> BaseException | None:
        """The error that has ended this receiver; ``None`` while there is none."""
        return self._failure

    def start(self) -> None:
        """Begin to receive; returns at once."""
        self._thread.start()

    def close(self, timeout_s: float = 10.0) -> None:
        """Stop receiving. The board keeps what it has. Closing twice does no harm.

        Args:
            timeout_s: how long the thread may take to end, seconds.
        """
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def tell_now(self, timeout_s: float = 5.0) -> bool:
        """Tell the learner of the workers here, from any thread, and wait until the mailbox has heard it.

        Args:
            timeout_s: how long it may take, seconds.

        Returns:
            Whether it has. If not, it hears of them later: the thread repeats it.
        """
        word = NodeWord.of(self.node, self._board, self._numbers).to_bytes()
        try:
            ray.get(self._mailbox.tell.remote(self.node, word), timeout=timeout_s)
        except (GetTimeoutError, RayError):
            return False
        return True

    def await_stamp(self, stamp: Stamp, timeout_s: float, where: str) -> None:
        """Wait until a version, or a newer one, is on the board.

        Args:
            stamp: the version.
            timeout_s: give up after this many seconds.
            where: whose board it is, for errors.

        Raises:
            BoardClosed: the learner has closed the transport or died.
            AdoptionTimeout: it has not come in time.
        """
        until_s = time.monotonic() + timeout_s
        while self.stamp < stamp:
            if self.closed_by_learner or self.learner_died or self.failure is not None:
                cure = "the learner must live while workers attach"
                raise BoardClosed("the learner is gone", where, cure) from self.failure
            if time.monotonic() >= until_s:
                raise AdoptionTimeout(
                    f"version {stamp.version} has not come within {timeout_s:g} s",
                    where,
                    "look whether the learner's node can be reached, and how full its object store is",
                )
            time.sleep(_LOOK_S)

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            while not (self._stop.is_set() or self._closed_by_learner or self._learner_died):
                report = self._agent.asks(time.monotonic())
                if report is None:
                    self._tell()
                    self._stop.wait(_LOOK_S)
                    continue
                reply = self._answer(self._mailbox.ask.remote(report, self._asked))
                if reply is None:
                    self._agent.pulls(None, time.monotonic())
                    self._stop.wait(_LOOK_S)
                else:
                    self._hear(reply)
        except BaseException as failure:  # ends the thread; whoever looks sees it
            self._failure = failure
            raise
        finally:
            if not self._learner_died:
                self._mailbox.leave.remote(self.node)

    def _answer(self, asked: ray.ObjectRef) -> Reply | None:
        """What the mailbox answers; ``None`` if it does not."""
        until_s = time.monotonic() + 2 * LONG_POLL_S
        while time.monotonic() < until_s and not self._stop.is_set():
            self._tell()
            try:
                reply: Reply = ray.get(asked, timeout=_LOOK_S)
            except GetTimeoutError:
                continue
            except ActorDiedError:  # it would be started again, if its owner lived
                self._learner_died = True
                return None
            except RayError:
                return None
            return reply
        return None

    def _hear(self, reply: Reply) -> None:
        self._closed_by_learner = reply.closed
        if reply.question.number > self._asked:
            self._asked = reply.question.number
            self._board.ask_as(reply.question.number, reply.question.lowest)
        letter = self._agent.pulls(reply.letter, time.monotonic())
        if letter is not None:
            self._pull(letter)

    def _pull(self, letter: Letter) -> None:
        """Pull an image until it is there, or lost, or the agent gives it up."""
        while not self._stop.is_set():
            self._tell()
            try:
                flat = image_at(letter.address, _LOOK_S)
            except GetTimeoutError:
                self._agent.asks(time.monotonic())  # gives it up when it takes too long
                if not self._agent.pulling:
                    return
                continue
            except RayError:
                flat = None
            self._agent.got(letter, flat, time.monotonic())
            return

    def _publish(self, image: Image) -> None:
        if image.layout != self._board.layout:
            self._board.lay_out(image.layout)
        # A board with bounded slots may have no room for a moment; nothing is published then.
        while self._board.publish(image.leaves, stamp=image.stamp) is None and not self._stop.is_set():
            self._stop.wait(_LOOK_S)

    def _tell(self) -> None:
        """Tell the learner of the workers here, if there is something new or it is long ago."""
        word = NodeWord.of(self.node, self._board, self._numbers)
        now_s = time.monotonic()
        if word.news != self._told or now_s - self._told_at_s >= _TELL_AGAIN_S:
            self._told, self._told_at_s = word.news, now_s
            self._mailbox.tell.remote(self.node, word.to_bytes())
