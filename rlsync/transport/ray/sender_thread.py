"""The learner's thread that puts images into Ray's object store and talks to the mailbox."""

from __future__ import annotations

import threading
import time
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from torch import Tensor

from rlsync.tensors.layout import Layout
from rlsync.transport.ray.mailbox_actor import Question
from rlsync.transport.relay.image import ImageBuffer
from rlsync.transport.relay.mailbox import Message, Reply
from rlsync.transport.relay.sender import Sender

#: How long the mailbox may take to answer. Only the thread waits, and then it goes on without the answer.
ANSWER_S = 1.0

#: How long a version waits for pulls to end when three images are kept. Then one of them is freed.
_LET_PULLS_END_S = 0.1


class ImageBuffers:
    """Three buffers of one layout: one is written, one is the newest version, one is on its way to the store.

    They are made once, so that no publish pays for page faults. Used under the lock of :class:`SenderThread`.

    Example:
        >>> import torch
        >>> from rlsync.core.ledger import Stamp
        >>> from rlsync.tensors.layout import LeafSpec
        >>> buffers = ImageBuffers()
        >>> buffers.lay_out(Layout.build({"policy": [LeafSpec("w", "parameter", (2,), torch.float32)]}))
        >>> for version in (1, 2):
        ...     buffer = buffers.free()
        ...     buffer.write(Stamp(1, version), [torch.ones(2)])
        ...     buffers.publish(buffer)
        >>> buffers.take().stamp.version, buffers.take()
        (2, None)
    """

    def __init__(self) -> None:
        self.layout: Layout | None = None
        self.newest: ImageBuffer | None = None  #: the newest version
        self.waiting: ImageBuffer | None = None  #: the newest version, while it was not taken
        self._taken: ImageBuffer | None = None
        self._buffers: list[ImageBuffer] = []

    def lay_out(self, layout: Layout) -> None:
        """Make buffers for another layout; those in use stay until they are replaced."""
        self.layout = layout
        self._buffers = [ImageBuffer(layout) for _ in range(3)]

    def free(self) -> ImageBuffer:
        """One that is neither the newest version nor what was taken last."""
        return next(b for b in self._buffers if b is not self.newest and b is not self._taken)

    def publish(self, buffer: ImageBuffer) -> None:
        """Make a buffer that was written the newest version."""
        self.newest = self.waiting = buffer

    def take(self) -> ImageBuffer | None:
        """The newest version, which stays as it is until the next is taken; ``None`` if it was taken."""
        buffer, self.waiting = self.waiting, None
        if buffer is not None:
            self._taken = buffer
        return buffer


class SenderThread:
    """Sends the newest version, in a daemon thread, and skips those that come faster than it can."""

    def __init__(self, mailbox: Any, repeat_s: float) -> None:
        self.sender = Sender(_put, lambda address: None, self._post, repeat_s)
        self.question = Question()
        self.failure: BaseException | None = None  #: the error that has ended the thread
        self._mailbox = mailbox
        self._buffers = ImageBuffers()
        self._posted: ray.ObjectRef | None = None
        self._closed = self._asks_now = False
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="rlsync-ray-publish", daemon=True)
        self._thread.start()

    @property
    def layout(self) -> Layout | None:
        return self._buffers.layout

    @property
    def newest(self) -> ImageBuffer | None:
        return self._buffers.newest

    def lay_out(self, layout: Layout) -> None:
        with self._wake:
            self._buffers.lay_out(layout)

    def free_buffer(self) -> ImageBuffer:
        with self._wake:
            return self._buffers.free()

    def send(self, buffer: ImageBuffer) -> None:
        """Make a buffer that was written the newest version, and let it be sent; returns at once."""
        with self._wake:
            self._buffers.publish(buffer)
            self._wake.notify()

    def ask(self, lowest: int) -> int:
        with self._wake:
            self.question = Question(self.question.number + 1, lowest)
            self._asks_now = True
            self._wake.notify()
        return self.question.number

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
                    if not (self._closed or self._asks_now or self._buffers.waiting is not None):
                        self._wake.wait(self.sender.repeat_s)
                    buffer = None if self._closed else self._buffers.take()
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

    def _make_room(self) -> None:
        """Let pulls end, for a moment, before an image takes the place of one that is pulled."""
        until_s = time.monotonic() + _LET_PULLS_END_S
        while self.sender.full and time.monotonic() < until_s and not self._closed:
            self.sender.post_again(time.monotonic())
            self._await_reply()
            time.sleep(_LET_PULLS_END_S / 10)

    def _post(self, message: Message) -> None:
        self._posted = self._mailbox.post.remote(message, self.question)

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
