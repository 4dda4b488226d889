"""The learner's side: each version goes into the store once, and word of it into the mailbox."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from rlsync.core.ledger import NOTHING, Stamp
from rlsync.tensors.layout import Layout
from rlsync.transport.relay.image import digest_in, pack
from rlsync.transport.relay.letter import Letter, Put
from rlsync.transport.relay.mailbox import Receipt
from rlsync.transport.rules import check_newer

#: Images that a sender keeps in the store at most: the newest, and two that agents may still be pulling.
KEPT_IMAGES = 3


class Sender:
    """Puts images into the store and posts letters about them.

    Laws: an image is in the store before its letter is posted. The sender never keeps more than
    ``KEPT_IMAGES`` images there. It frees one that a node is pulling only if two older images are pulled
    when a new one comes; then the older of them stays.

    Args:
        put: copies a flat image into the store, and returns its address.
        free: gives an address back to the store.
        post: sends a letter on its way to the mailbox. It does not wait, and the letter may get lost.
        repeat_s: how often the newest letter is posted again: the mailbox may have been killed.

    Example:
        >>> import torch
        >>> from rlsync.tensors.layout import LeafSpec
        >>> store, posted = {}, []
        >>> def put(image):
        ...     store[len(posted)] = image.clone()
        ...     return len(posted)
        >>> sender = Sender(put, store.pop, posted.append)
        >>> layout = Layout.build({"policy": [LeafSpec("w", "parameter", (2,), torch.float32)]})
        >>> for version in (1, 2, 3, 4):
        ...     sender.publish(Stamp(1, version), layout, [torch.ones(2)], now_s=0.0)
        >>> [letter.stamp.version for letter in posted], len(store)
        ([1, 2, 3, 4], 3)
        >>> sender.told(posted[-1], Receipt(taken=True))  # no node pulls an older one
        >>> len(store)
        1
    """

    def __init__(
        self,
        put: Callable[[Tensor], Any],
        free: Callable[[Any], object],
        post: Callable[[Letter], object],
        repeat_s: float = 1.0,
    ) -> None:
        self._put = put
        self._free = free
        self._post = post
        self.repeat_s = repeat_s
        self._kept: dict[Put, Any] = {}  # the address of each image, in the order in which they were put
        self._pulled: frozenset[Put] = frozenset()
        self._told: Put | None = None  # what was put last before the mailbox said what is pulled
        self._lost: Put | None = None
        self._count = 0
        self._image: Tensor | None = None
        self._letter: Letter | None = None
        self._posted_at_s = 0.0

    @property
    def stamp(self) -> Stamp:
        """The newest version that was posted."""
        return NOTHING if self._letter is None else self._letter.stamp

    @property
    def letter(self) -> Letter | None:
        """The newest letter; ``None`` before the first."""
        return self._letter

    @property
    def full(self) -> bool:
        """Whether the next version takes the place of an image that a node may be pulling.

        A pull may have ended since the mailbox last said so: :meth:`post_again` asks.
        """
        return len(self._kept) >= KEPT_IMAGES

    @property
    def kept(self) -> list[Stamp]:
        """The versions whose images this sender keeps in the store. Any thread may ask."""
        return [put.stamp for put in list(self._kept)]  # copied in one step: another thread may send

    def publish(self, stamp: Stamp, layout: Layout, tensors: Sequence[Tensor], now_s: float) -> None:
        """Pack one version, and send it.

        Args:
            stamp: its generation and number.
            layout: what it carries.
            tensors: one for each entry of the layout that owns its bytes.
            now_s: the time.

        Raises:
            PublishError: the stamp is not greater than the newest one.
            LayoutMismatch: a tensor does not have the shape of its leaf.
        """
        check_newer(stamp, self.stamp)
        self.send(stamp, pack(stamp, layout, tensors), now_s)

    def send(self, stamp: Stamp, image: Tensor, now_s: float) -> None:
        """Send one version that was packed.

        Args:
            stamp: its generation and number.
            image: its flat image. It must stay as it is until the next one is sent: it may be put again.
            now_s: the time.

        Raises:
            PublishError: the stamp is not greater than the newest one.
        """
        check_newer(stamp, self.stamp)
        self._image = image
        self._send(stamp, image, now_s)

    def told(self, letter: Letter, receipt: Receipt) -> None:
        """Free the images that no node needs any more.

        Args:
            letter: what was posted.
            receipt: what the mailbox answered.
        """
        if not receipt.taken or (self._told is not None and letter.put < self._told):
            return  # this answer was overtaken by a newer one
        self._told, self._pulled, self._lost = letter.put, receipt.pulled, receipt.lost
        for put in [put for put in self._kept if put < letter.put and put not in receipt.pulled]:
            self._free(self._kept.pop(put))

    def repeat(self, now_s: float) -> None:
        """Post the newest letter again when that is due; put its image again when a node could not get it.

        Args:
            now_s: the time.
        """
        if self._letter is None or self._image is None or now_s - self._posted_at_s < self.repeat_s:
            return
        if self._lost == self._letter.put:
            self._send(self._letter.stamp, self._image, now_s)
        else:
            self.post_again(now_s)

    def post_again(self, now_s: float) -> None:
        """Post the newest letter again now, if there is one.

        Args:
            now_s: the time.
        """
        if self._letter is not None:
            self._posted_at_s = now_s
            self._post(self._letter)

    def _send(self, stamp: Stamp, image: Tensor, now_s: float) -> None:
        while len(self._kept) >= KEPT_IMAGES:
            self._free(self._kept.pop(self._needed_least()))
        self._count += 1
        self._letter = Letter(stamp, digest_in(image), image.numel(), self._put(image), self._count)
        self._kept[self._letter.put] = self._letter.address
        self._posted_at_s = now_s
        self._post(self._letter)

    def _needed_least(self) -> Put:
        """Never the newest, which nodes are told of now. Of pulls, the oldest is let end."""
        older = list(self._kept)[:-1]
        not_pulled = [put for put in older if put not in self._pulled]
        return not_pulled[0] if not_pulled else older[-1]

    def close(self) -> None:
        """Take all images out of the store."""
        while self._kept:
            self._free(self._kept.pop(next(iter(self._kept))))
        self._letter = self._image = None
