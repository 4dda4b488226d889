"""The learner's side: each version goes into the store once, and word of it into the mailbox."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from rlsync.core.ledger import NOTHING, Stamp
from rlsync.tensors.layout import Layout
from rlsync.transport.relay.image import digest_in, pack
from rlsync.transport.relay.letter import Letter
from rlsync.transport.rules import check_newer

#: Images that the store holds at most: the newest, and two that agents may still be pulling.
KEPT_IMAGES = 3


class Sender:
    """Puts images into the store and posts letters about them.

    Laws: an image is in the store before its letter is posted. The store never holds more than
    ``KEPT_IMAGES`` images of one sender.

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
        >>> [letter.stamp.version for letter in posted], sorted(store)
        ([1, 2, 3, 4], [1, 2, 3])
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
        self._kept: deque[Any] = deque()
        self._image: Tensor | None = None
        self._letter: Letter | None = None
        self._posted_at_s = 0.0

    @property
    def stamp(self) -> Stamp:
        """The newest version that was posted."""
        return NOTHING if self._letter is None else self._letter.stamp

    def publish(self, stamp: Stamp, layout: Layout, tensors: Sequence[Tensor], now_s: float) -> None:
        """Send one version.

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
        self._image = pack(stamp, layout, tensors)
        self._send(stamp, self._image, now_s)

    def repeat(self, now_s: float, lost: Letter | None = None) -> None:
        """Post the newest letter again when that is due; put its image again when a node could not get it.

        Args:
            now_s: the time.
            lost: what the mailbox says. A letter that this sender has replaced by now is of no interest.
        """
        if self._letter is None or self._image is None or now_s - self._posted_at_s < self.repeat_s:
            return
        if lost == self._letter:
            self._send(self._letter.stamp, self._image, now_s)
        else:
            self._posted_at_s = now_s
            self._post(self._letter)

    def _send(self, stamp: Stamp, image: Tensor, now_s: float) -> None:
        while len(self._kept) >= KEPT_IMAGES:
            self._free(self._kept.popleft())
        address = self._put(image)
        self._kept.append(address)
        self._letter = Letter(stamp, digest_in(image), image.numel(), address)
        self._posted_at_s = now_s
        self._post(self._letter)

    def close(self) -> None:
        """Take all images out of the store."""
        while self._kept:
            self._free(self._kept.popleft())
