"""A node's agent: asks for the newest version, pulls its image, and publishes it on the node's board."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from rlsync.core.errors import PublishError
from rlsync.core.ledger import NOTHING, Stamp
from rlsync.transport.relay.image import Image, digest_in, unpack
from rlsync.transport.relay.mailbox import ImageId, Message, Request


@dataclass(slots=True)
class AgentCounts:
    """What became of the messages and images that reached an agent."""

    published: int = 0  #: versions published on the node's board
    skipped: int = 0  #: versions that came and went between two of these
    old: int = 0  #: messages of a version that the node already had, or of an older one
    older_generation: int = 0  #: those of them that were of a lower generation
    damaged: int = 0  #: images whose digest did not match
    lost: int = 0  #: images that the store no longer had, or that did not come in time


class Agent:
    """Decides for one node. Whoever runs it sends what it returns, and brings it answers and the time.

    Laws: the stamps that it publishes rise. It publishes what a learner packed, bit for bit, or nothing. It
    pulls one image at a time. After any message was lost it asks again: the mailbox may take ``answer_s``
    seconds to answer, an image ``pull_s``, and ``again_s`` pass before it asks again for one that was lost.
    """

    def __init__(
        self,
        node: str,
        publish: Callable[[Image], object],
        *,
        answer_s: float = 30.0,
        pull_s: float = 60.0,
        again_s: float = 1.0,
    ) -> None:
        self.node = node
        self.stamp = NOTHING
        self.counts = AgentCounts()
        self._publish = publish
        self._answer_s = answer_s
        self._pull_s = pull_s
        self._again_s = again_s
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
            self.counts.lost += 1
            self._give_up(self._pulling, now_s)
        if self._pulling is not None or now_s < self._ask_at_s:
            return None
        self._ask_at_s = now_s + self._answer_s
        return Request(self.node, self.stamp, self._lost)

    def to_pull(self, message: Message | None, now_s: float) -> Message | None:
        """Take the mailbox's answer, ``None`` if nothing is new; return the message whose image to pull."""
        if self._pulling is not None:  # an answer that came twice, or late
            return None
        self._ask_at_s = min(self._ask_at_s, now_s)
        if message is None or self._is_old(message.stamp):
            return None
        self._pulling = message
        self._pull_until_s = now_s + self._pull_s
        return message

    def arrived(self, message: Message, flat: Tensor | None, now_s: float) -> None:
        """Take the image of a message, ``None`` if the store no longer has it; check it, and publish it."""
        if message is not self._pulling:
            return  # given up long ago
        if flat is None:
            self.counts.lost += 1
            self._give_up(message, now_s)
            return
        try:
            image = unpack(flat)
        except PublishError:
            image = None
        if image is None or digest_in(flat) != message.digest:
            self.counts.damaged += 1
            self._give_up(message, now_s)
            return
        self._publish(image)
        self.counts.published += 1
        if image.stamp.generation == self.stamp.generation:
            self.counts.skipped += image.stamp.version - self.stamp.version - 1
        self.stamp, self._lost = image.stamp, None
        self._pulling, self._ask_at_s = None, now_s

    def _is_old(self, stamp: Stamp) -> bool:
        if stamp > self.stamp:
            return False
        self.counts.old += 1
        self.counts.older_generation += stamp.generation < self.stamp.generation
        return True

    def _give_up(self, message: Message, now_s: float) -> None:
        self._lost = message.image_id
        self._pulling, self._ask_at_s = None, now_s + self._again_s
