"""The ends of the relay: an agent for each node, which pulls and publishes, and the learner's sender."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rlsync.core.errors import PublishError
from rlsync.core.ledger import NOTHING, Stamp
from rlsync.transport.relay.image import Image, digest_in, unpack
from rlsync.transport.relay.mailbox import ImageId, Message, Reply, Request
from rlsync.transport.rules import check_newer


@dataclass(eq=False)
class Agent:
    """Decides for one node; whoever runs it sends what it returns, and brings it answers and the time.

    Laws: the stamps that it publishes rise; it publishes what a learner packed, bit for bit, or nothing; it
    pulls one image at a time. It asks again ``answer_s``, ``pull_s`` or ``again_s`` after what may be lost.
    """

    node: str
    publish: Callable[[Image], object]
    answer_s: float = 30.0
    pull_s: float = 60.0
    again_s: float = 1.0

    def __post_init__(self) -> None:
        self.stamp = NOTHING
        self._ask_at_s = 0.0
        self._pulling: Message | None = None
        self._pull_until_s = 0.0
        self._lost: ImageId | None = None

    @property
    def pulling(self) -> bool:
        return self._pulling is not None

    def request(self, now_s: float) -> Request | None:
        """What to ask the mailbox now; ``None`` while an answer or an image is awaited."""
        if self._pulling is not None and now_s >= self._pull_until_s:
            self._give_up(self._pulling, now_s)
        if self._pulling is not None or now_s < self._ask_at_s:
            return None
        self._ask_at_s = now_s + self.answer_s
        return Request(self.node, self.stamp, self._lost)

    def to_pull(self, message: Message | None, now_s: float) -> Message | None:
        """Take the mailbox's answer, ``None`` if nothing is new; return the message whose image to pull."""
        if self._pulling is not None:  # an answer that came twice, or late
            return None
        self._ask_at_s = min(self._ask_at_s, now_s)
        if message is None or message.stamp <= self.stamp:
            return None
        self._pulling = message
        self._pull_until_s = now_s + self.pull_s
        return message

    def arrived(self, message: Message, flat: Tensor | None, now_s: float) -> None:
        """Take the image of a message, ``None`` if the store no longer has it; check it, and publish it."""
        if message is not self._pulling:
            return  # given up long ago
        image = None
        if flat is not None:
            with suppress(PublishError):  # it was damaged
                image = unpack(flat)
        if flat is None or image is None or digest_in(flat) != message.digest:
            self._give_up(message, now_s)
            return
        self.publish(image)
        self.stamp = image.stamp
        self._lost = None
        self._pulling = None
        self._ask_at_s = now_s

    def _give_up(self, message: Message, now_s: float) -> None:
        self._lost = message.image_id
        self._pulling = None
        self._ask_at_s = now_s + self.again_s


#: Images that a sender keeps in the store at most: the newest, and two that agents may still be pulling.
KEPT_IMAGES = 3


@dataclass(eq=False)
class Sender:
    """Puts images into the store and posts messages of them, the newest again every ``repeat_s``.

    ``put`` returns an address, ``free`` gives it back; ``post`` does not wait, and may lose one. Laws: an
    image is stored before its message is posted. At most ``KEPT_IMAGES`` are stored. One that a node pulls is
    freed only if two older images are pulled when a new one comes; then the older of them stays.
    """

    put: Callable[[Tensor], Any]
    free: Callable[[Any], object]
    post: Callable[[Message], object]
    repeat_s: float = 1.0

    def __post_init__(self) -> None:
        # the address of each image, in the order in which they were put
        self._kept: dict[ImageId, Any] = {}
        self._pulled: frozenset[ImageId] = frozenset()
        # the image of the newest message that the mailbox has answered
        self._replied: ImageId | None = None
        self._lost: ImageId | None = None
        #: Whether the newest version spreads from node to node: a newer one would begin at the learner again.
        self.spreading = False
        self._count = 0
        self._image: Tensor | None = None
        self.message: Message | None = None
        self._posted_at_s = 0.0

    @property
    def stamp(self) -> Stamp:
        """The newest version that was posted."""
        if self.message is None:
            return NOTHING
        return self.message.stamp

    @property
    def full(self) -> bool:
        """Whether the next version takes the place of an image that a node may still be pulling."""
        return len(self._kept) >= KEPT_IMAGES

    @property
    def kept(self) -> list[Stamp]:
        """The versions whose images this sender keeps in the store. Any thread may ask."""
        # list() copies in one step: another thread may put an image meanwhile.
        return [image_id.stamp for image_id in list(self._kept)]

    def send(self, stamp: Stamp, image: Tensor, now_s: float) -> None:
        """Send one packed version. The image must stay as it is until the next one: it may be put again."""
        check_newer(stamp, self.stamp)
        self._image = image
        self._send(stamp, image, now_s)

    def replied(self, message: Message, reply: Reply) -> None:
        """Free the images that no node needs any more, as the mailbox has answered to ``message``."""
        if not reply.accepted or (self._replied is not None and message.image_id < self._replied):
            return  # this answer was overtaken by a newer one
        self._replied = message.image_id
        self._pulled = reply.pulled
        self._lost = reply.lost
        self.spreading = reply.spreading
        for image_id in list(self._kept):
            if image_id < message.image_id and image_id not in reply.pulled:
                self.free(self._kept.pop(image_id))

    def repeat(self, now_s: float) -> None:
        """Post the newest message again when that is due; put its image again if a node could not get it."""
        if self.message is None or self._image is None or now_s - self._posted_at_s < self.repeat_s:
            return
        if self._lost == self.message.image_id:
            self._send(self.message.stamp, self._image, now_s)
        else:
            self.post_again(now_s)

    def post_again(self, now_s: float) -> None:
        """Post the newest message now, if there is one, for the first time or again."""
        if self.message is not None:
            self._posted_at_s = now_s
            self.post(self.message)

    def _send(self, stamp: Stamp, image: Tensor, now_s: float) -> None:
        while len(self._kept) >= KEPT_IMAGES:
            # Not the newest, which nodes are told of now. Of pulls, the oldest is let end.
            *older, _ = self._kept
            surplus = older[-1]
            not_pulled = [image_id for image_id in older if image_id not in self._pulled]
            if not_pulled:
                surplus = not_pulled[0]
            self.free(self._kept.pop(surplus))
        self._count += 1
        self.message = Message(stamp, digest_in(image), image.numel(), self.put(image), self._count)
        self._kept[self.message.image_id] = self.message.address
        self.post_again(now_s)

    def close(self) -> None:
        while self._kept:
            self.free(self._kept.pop(next(iter(self._kept))))
        self.message = self._image = None
