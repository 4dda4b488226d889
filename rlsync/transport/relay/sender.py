"""The learner's side: each version goes into the store once, and a message about it into the mailbox."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from rlsync.core.ledger import NOTHING, Stamp
from rlsync.tensors.layout import Layout
from rlsync.transport.relay.image import digest_in, pack
from rlsync.transport.relay.mailbox import ImageId, Message, Reply
from rlsync.transport.rules import check_newer

#: Images that a sender keeps in the store at most: the newest, and two that agents may still be pulling.
KEPT_IMAGES = 3


class Sender:
    """Puts images into the store and posts messages about them.

    ``put`` copies a flat image into the store and returns its address, ``free`` gives an address back.
    ``post`` sends a message on its way to the mailbox: it does not wait, and the message may get lost. The
    newest one is posted again every ``repeat_s`` seconds, because the mailbox may have been killed.

    Laws: an image is in the store before its message is posted. The sender never keeps more than
    ``KEPT_IMAGES`` images there. It frees one that a node is pulling only if two older images are pulled when
    a new one comes; then the older of them stays.
    """

    def __init__(
        self,
        put: Callable[[Tensor], Any],
        free: Callable[[Any], object],
        post: Callable[[Message], object],
        repeat_s: float = 1.0,
    ) -> None:
        self._put = put
        self._free = free
        self._post = post
        self.repeat_s = repeat_s
        self._kept: dict[ImageId, Any] = {}  # the address of each image, in the order in which they were put
        self._pulled: frozenset[ImageId] = frozenset()
        self._replied: ImageId | None = None  # the image of the newest message that the mailbox has answered
        self._lost: ImageId | None = None
        self._count = 0
        self._image: Tensor | None = None
        self._message: Message | None = None
        self._posted_at_s = 0.0

    @property
    def stamp(self) -> Stamp:
        """The newest version that was posted."""
        return NOTHING if self._message is None else self._message.stamp

    @property
    def message(self) -> Message | None:
        return self._message

    @property
    def full(self) -> bool:
        """Whether the next version takes the place of an image that a node may be pulling.

        A pull may have ended since the mailbox last said so: :meth:`post_again` asks.
        """
        return len(self._kept) >= KEPT_IMAGES

    @property
    def kept(self) -> list[Stamp]:
        """The versions whose images this sender keeps in the store. Any thread may ask."""
        # list() copies in one step: another thread may put an image meanwhile.
        return [image_id.stamp for image_id in list(self._kept)]

    def publish(self, stamp: Stamp, layout: Layout, tensors: Sequence[Tensor], now_s: float) -> None:
        """Pack one version, one tensor for each entry of ``layout`` that owns its bytes, and send it.

        PublishError if the stamp is not greater than the newest one, LayoutMismatch if a tensor does not fit.
        """
        check_newer(stamp, self.stamp)
        self.send(stamp, pack(stamp, layout, tensors), now_s)

    def send(self, stamp: Stamp, image: Tensor, now_s: float) -> None:
        """Send one packed version. The image must stay as it is until the next one: it may be put again."""
        check_newer(stamp, self.stamp)
        self._image = image
        self._send(stamp, image, now_s)

    def replied(self, message: Message, reply: Reply) -> None:
        """Free the images that no node needs any more, as the mailbox has answered to ``message``."""
        if not reply.accepted or (self._replied is not None and message.image_id < self._replied):
            return  # this answer was overtaken by a newer one
        self._replied, self._pulled, self._lost = message.image_id, reply.pulled, reply.lost
        for image_id in [image_id for image_id in self._kept if image_id < message.image_id]:
            if image_id not in reply.pulled:
                self._free(self._kept.pop(image_id))

    def repeat(self, now_s: float) -> None:
        """Post the newest message again when that is due; put its image again if a node could not get it."""
        if self._message is None or self._image is None or now_s - self._posted_at_s < self.repeat_s:
            return
        if self._lost == self._message.image_id:
            self._send(self._message.stamp, self._image, now_s)
        else:
            self.post_again(now_s)

    def post_again(self, now_s: float) -> None:
        """Post the newest message again now, if there is one."""
        if self._message is not None:
            self._posted_at_s = now_s
            self._post(self._message)

    def _send(self, stamp: Stamp, image: Tensor, now_s: float) -> None:
        while len(self._kept) >= KEPT_IMAGES:
            self._free(self._kept.pop(self._needed_least()))
        self._count += 1
        self._message = Message(stamp, digest_in(image), image.numel(), self._put(image), self._count)
        self._kept[self._message.image_id] = self._message.address
        self._posted_at_s = now_s
        self._post(self._message)

    def _needed_least(self) -> ImageId:
        """Never the newest, which nodes are told of now. Of pulls, the oldest is let end."""
        older = list(self._kept)[:-1]
        not_pulled = [image_id for image_id in older if image_id not in self._pulled]
        return not_pulled[0] if not_pulled else older[-1]

    def close(self) -> None:
        while self._kept:
            self._free(self._kept.pop(next(iter(self._kept))))
        self._message = self._image = None
