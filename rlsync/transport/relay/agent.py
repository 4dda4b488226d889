"""A node's agent: asks for the newest version, pulls its image, and publishes it on the node's board."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from rlsync.core.errors import PublishError
from rlsync.core.ledger import NOTHING, Stamp
from rlsync.transport.relay.image import Image, digest_in, unpack
from rlsync.transport.relay.letter import Letter, Put
from rlsync.transport.relay.mailbox import NodeReport


@dataclass(slots=True)
class Tally:
    """What an agent did with the letters and images that reached it.

    Args:
        published: versions published on the node's board.
        skipped: versions that came and went between two of these.
        old: letters and images of a version that the node already had, or of an older one.
        older_generation: those of them that were of a lower generation.
        damaged: images whose digest did not match.
        lost: images that the store no longer had, or that did not come in time.
    """

    published: int = 0
    skipped: int = 0
    old: int = 0
    older_generation: int = 0
    damaged: int = 0
    lost: int = 0


class Agent:
    """Decides for one node. Whoever runs it sends what it returns, and brings it answers and the time.

    Laws: the stamps that it publishes rise. It publishes what a learner packed, bit for bit, or nothing.
    It pulls one image at a time. After any message was lost it asks again.

    Args:
        node: its name.
        publish: puts a version on the node's board.
        answer_s: how long an answer of the mailbox may take.
        pull_s: how long an image may take.
        again_s: how long to wait before asking again for an image that could not be had.

    Example:
        >>> import torch
        >>> from rlsync.tensors.layout import Layout, LeafSpec
        >>> from rlsync.transport.relay.image import pack
        >>> layout = Layout.build({"policy": [LeafSpec("w", "parameter", (2,), torch.float32)]})
        >>> flat = pack(Stamp(1, 4), layout, [torch.ones(2)])
        >>> board = []
        >>> agent = Agent("node 1", board.append)
        >>> agent.asks(now_s=0.0)
        NodeReport(node='node 1', stamp=Stamp(generation=0, version=0), lost=None)
        >>> letter = Letter(Stamp(1, 4), digest_in(flat), flat.numel(), address=None)
        >>> agent.pulls(letter, now_s=0.1) is letter
        True
        >>> agent.got(letter, flat, now_s=0.2)
        >>> agent.stamp.version, len(board)
        (4, 1)
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
        self.tally = Tally()
        self._publish = publish
        self._answer_s = answer_s
        self._pull_s = pull_s
        self._again_s = again_s
        self._ask_at_s = 0.0
        self._pulling: Letter | None = None
        self._pull_until_s = 0.0
        self._lost: Put | None = None

    @property
    def pulling(self) -> bool:
        """Whether an image is awaited."""
        return self._pulling is not None

    def asks(self, now_s: float) -> NodeReport | None:
        """What to ask the mailbox now; ``None`` while an answer or an image is awaited."""
        if self._pulling is not None and now_s >= self._pull_until_s:
            self.tally.lost += 1
            self._give_up(self._pulling, now_s)
        if self._pulling is not None or now_s < self._ask_at_s:
            return None
        self._ask_at_s = now_s + self._answer_s
        return NodeReport(self.node, self.stamp, self._lost)

    def pulls(self, letter: Letter | None, now_s: float) -> Letter | None:
        """Take an answer of the mailbox.

        Args:
            letter: word of a version; ``None`` if there is nothing new.
            now_s: the time.

        Returns:
            The letter whose image is to be pulled; ``None`` if none is.
        """
        if self._pulling is not None:  # an answer that came twice, or late
            return None
        self._ask_at_s = min(self._ask_at_s, now_s)
        if letter is None or self._is_old(letter.stamp):
            return None
        self._pulling = letter
        self._pull_until_s = now_s + self._pull_s
        return letter

    def got(self, letter: Letter, flat: Tensor | None, now_s: float) -> None:
        """Take an image, check it, and publish it.

        Args:
            letter: which was pulled.
            flat: its image; ``None`` if the store no longer has it.
            now_s: the time.
        """
        if letter is not self._pulling:
            return  # given up long ago
        if flat is None:
            self.tally.lost += 1
            self._give_up(letter, now_s)
            return
        try:
            image = unpack(flat)
        except PublishError:
            image = None
        if image is None or digest_in(flat) != letter.digest:
            self.tally.damaged += 1
            self._give_up(letter, now_s)
            return
        self._publish(image)
        self.tally.published += 1
        if image.stamp.generation == self.stamp.generation:
            self.tally.skipped += image.stamp.version - self.stamp.version - 1
        self.stamp, self._lost = image.stamp, None
        self._pulling, self._ask_at_s = None, now_s

    def _is_old(self, stamp: Stamp) -> bool:
        if stamp > self.stamp:
            return False
        self.tally.old += 1
        self.tally.older_generation += stamp.generation < self.stamp.generation
        return True

    def _give_up(self, letter: Letter, now_s: float) -> None:
        self._lost = letter.put
        self._pulling, self._ask_at_s = None, now_s + self._again_s
