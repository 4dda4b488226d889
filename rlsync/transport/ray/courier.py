"""The learner's thread that puts images into Ray's object store and talks to the mailbox."""

from __future__ import annotations

import threading
import time
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from rlsync.tensors.layout import Layout
from rlsync.transport.ray.mailbox_actor import Question
from rlsync.transport.ray.sheets import Sheets
from rlsync.transport.ray.store import put_image
from rlsync.transport.relay.image import Sheet
from rlsync.transport.relay.letter import Letter
from rlsync.transport.relay.mailbox import Receipt
from rlsync.transport.relay.sender import Sender

#: How long the mailbox may take to answer. Only the thread waits, and then it goes on without the answer.
ANSWER_S = 1.0

#: How long a version waits for pulls to end when three images are kept. Then one of them is freed.
_LET_PULLS_END_S = 0.1


class Courier:
    """Sends the newest sheet, in a daemon thread, and skips those that come faster than it can.

    Args:
        mailbox: the mailbox's handle.
        repeat_s: how often the newest letter is posted again, seconds.
    """

    def __init__(self, mailbox: Any, repeat_s: float) -> None:
        self.sender = Sender(put_image, lambda address: None, self._post, repeat_s)
        self.question = Question()
        self.failure: BaseException | None = None  #: the error that has ended the thread
        self._mailbox = mailbox
        self._sheets = Sheets()
        self._posted: ray.ObjectRef | None = None
        self._closed = self._asks_now = False
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="rlsync-ray-publish", daemon=True)
        self._thread.start()

    @property
    def layout(self) -> Layout | None:
        """What the coming versions carry."""
        return self._sheets.layout

    @property
    def newest(self) -> Sheet | None:
        """The newest version; ``None`` before the first."""
        return self._sheets.newest

    def lay_out(self, layout: Layout) -> None:
        """Make sheets for another layout."""
        with self._wake:
            self._sheets.lay_out(layout)

    def free_sheet(self) -> Sheet:
        """A sheet to write the next version on."""
        with self._wake:
            return self._sheets.free()

    def send(self, sheet: Sheet) -> None:
        """Make a sheet that was written the newest version, and let it be sent; returns at once."""
        with self._wake:
            self._sheets.publish(sheet)
            self._wake.notify()

    def ask(self, lowest: int) -> int:
        """Ask all workers; see :meth:`rlsync.transport.contract.Transport.ask`."""
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
                    if not (self._closed or self._asks_now or self._sheets.waiting is not None):
                        self._wake.wait(self.sender.repeat_s)
                    sheet = None if self._closed else self._sheets.take()
                    asks, self._asks_now = self._asks_now, False
                if sheet is not None:
                    self._make_room()
                    self.sender.send(sheet.stamp, sheet.sealed(), time.monotonic())
                elif asks:
                    self.sender.post_again(time.monotonic())
                else:
                    self.sender.repeat(time.monotonic())
                self._hear()
        except BaseException as failure:  # noqa: BLE001  # ends the thread; the next publish raises it
            self.failure = failure

    def _make_room(self) -> None:
        """Let pulls end, for a moment, before an image takes the place of one that is pulled."""
        until_s = time.monotonic() + _LET_PULLS_END_S
        while self.sender.full and time.monotonic() < until_s and not self._closed:
            self.sender.post_again(time.monotonic())
            self._hear()
            time.sleep(_LET_PULLS_END_S / 10)

    def _post(self, letter: Letter) -> None:
        self._posted = self._mailbox.post.remote(letter, self.question)

    def _hear(self) -> None:
        """Wait for the mailbox's answer, so that an image is freed only when nobody pulls it."""
        posted, self._posted = self._posted, None
        if posted is None or self.sender.letter is None:
            return
        try:
            receipt: Receipt | None = ray.get(posted, timeout=ANSWER_S)
        except (GetTimeoutError, RayError):
            return  # it was killed, or is being started again: repeated later
        if receipt is not None:
            self.sender.told(self.sender.letter, receipt)
