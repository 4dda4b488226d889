"""The learner's thread that puts images into Ray's object store and talks to the mailbox."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from torch import Tensor

from rlsync.core.ledger import Stamp
from rlsync.tensors.layout import Layout
from rlsync.transport.ray.mailbox_actor import Question
from rlsync.transport.relay.ends import Sender
from rlsync.transport.relay.image import ImageBuffer
from rlsync.transport.relay.mailbox import Message, Reply

#: How long the mailbox may take to answer. Only the thread waits, and then it goes on without the answer.
ANSWER_S = 1.0

#: How long a version waits for pulls to end when three images are kept. Then one of them is freed.
_LET_PULLS_END_S = 0.1


class SenderThread:
    """Sends the newest version, in a daemon thread, and skips what comes faster than it can. One of three
    buffers is written, one is the newest, one is on its way; no publish pays for page faults.
    """

    def __init__(self, mailbox: Any, repeat_s: float) -> None:
        self.sender = Sender(_put, lambda address: None, self._post, repeat_s)
        self.layout: Layout | None = None
        self.newest: ImageBuffer | None = None  #: the newest version
        self.failure: BaseException | None = None  #: the error that has ended the thread
        self._mailbox = mailbox
        self._question = Question()
        self._buffers: list[ImageBuffer] = []
        self._waiting: ImageBuffer | None = None  # the newest version, until the thread takes it
        self._taken: ImageBuffer | None = None  # stays as it is until the next is taken: it may be put again
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
                    buffer = None if self._closed else self._take()
                    asks, self._asks_now = self._asks_now, False
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
        buffer, self._waiting = self._waiting, None
        self._taken = buffer or self._taken
        return buffer

    def _make_room(self) -> None:
        """Let pulls end, for a moment, before an image takes the place of one that is pulled."""
        until_s = time.monotonic() + _LET_PULLS_END_S
        while self.sender.full and time.monotonic() < until_s and not self._closed:
            self.sender.post_again(time.monotonic())
            self._await_reply()
            time.sleep(_LET_PULLS_END_S / 10)

    def _post(self, message: Message) -> None:
        self._posted = self._mailbox.post.remote(message, self._question)

    def _await_reply(self) -> None:
        """Wait for the mailbox's answer, so that an image is freed only when nobody pulls it."""
        posted, self._posted = self._posted, None
        if posted is None or self.sender.message is None:
            return
        try:
            reply: Reply | None = ray.get(posted, timeout=ANSWER_S)
        except (GetTimeoutError, RayError):
            return  # it was killed, or is being started again: repeated later
        if reply is not None:
            self.sender.replied(self.sender.message, reply)


def _put(flat: Tensor) -> ray.ObjectRef:
    """Copy a flat image into the object store, once. It stays there while somebody has its address."""
    return ray.put(flat.numpy())
