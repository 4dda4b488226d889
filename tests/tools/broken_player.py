"""A canary that breaks the part of rlsync that publishes on a node's board, wherever it is unpickled.

It proves that the canary on nodes can fail: the nodes' agents import this, the learner does not break.
"""

from __future__ import annotations

import os
from typing import Any

from rlsync.transport.ray.receiver import NodeReceiver
from rlsync.transport.relay.image import Image
from tests.tools.cluster_player import CanaryPlayer

#: How the versions of a node are broken, in turn.
HARMS = ("torn", "misnamed")


class BrokenPlayer(CanaryPlayer):
    """In an agent, every version is torn or misnamed, in turn; see :class:`CanaryPlayer`."""

    def __init__(self) -> None:
        super().__init__()
        self._made_in = os.getpid()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if os.getpid() != self._made_in:
            NodeReceiver._publish = publish_broken  # type: ignore[method-assign]


_published: list[Image] = []


def publish_broken(receiver: NodeReceiver, image: Image) -> None:
    """Publish a version whose leaves are partly, or all, those of the version before."""
    board = receiver.board
    before = _published[-1].leaves if _published else image.leaves
    harm = HARMS[len(_published) % len(HARMS)]
    _published[:] = [*_published, image]
    if image.layout != board.layout:
        board.lay_out(image.layout)
    leaves = [*image.leaves[:-1], before[-1]] if harm == "torn" else before
    board.publish(leaves, stamp=image.stamp)
