"""The mailbox: one message, about the newest version, and the last request of each node.

Nodes hear of a version in waves. If all heard of it at once, all would pull it from the learner, whose link
they would share: nobody would have it before nearly everybody had it. So a few are told, and the others wait
until these have it. Then Ray lets the next ones pull from them, too, and twice as many are told.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

from rlsync.core.ledger import NOTHING, Stamp


class ImageId(NamedTuple):
    """Names one image in the store: a version may be put there again, under the sender's next number."""

    stamp: Stamp
    number: int


@dataclass(frozen=True, slots=True)
class Message:
    """What the learner tells everybody: its newest version, and where the image of it is."""

    stamp: Stamp
    digest: int
    image_bytes: int
    address: Any  #: only whoever runs the relay knows what it means
    number: int = 1  #: counts the images that the sender has put

    @property
    def image_id(self) -> ImageId:
        return ImageId(self.stamp, self.number)


@dataclass(frozen=True, slots=True)
class Request:
    """What a node's agent asks the mailbox with: the newest version on the node's board."""

    node: str
    stamp: Stamp = NOTHING
    #: The last image that it could not get, or got damaged, if it has nothing newer.
    lost: ImageId | None = None


@dataclass(frozen=True, slots=True)
class Reply:
    """What the mailbox answers to a message of the learner."""

    accepted: bool  #: whether this is the message here now
    #: Images that nodes may still be pulling. From now on, nobody is told of an older version than this
    #: message's, so no other image of an older version is needed any more.
    pulled: frozenset[ImageId] = frozenset()
    lost: ImageId | None = None  #: the image of the message here, if a node could not get it
    #: Whether nodes are not told yet of the message here, or more of them pull its image than have it.
    spreading: bool = False


#: How many nodes pull a version at once while no node has it: so many are served by the learner alone.
WAVE = 3

#: How long a node that was told of a version takes a place in a wave at most: it may have died.
_PLACE_S = 30.0

#: A node that waits asks again sooner than this, or it is not counted any more: it may have died.
_WAITS_S = 10.0


class Mailbox:
    """Holds the newest message.

    It may be killed at any time: learner and agents repeat theirs. Laws: the stamp of its message never
    falls. It holds one message, and one request of each node that has asked in the last ``forget_s`` seconds,
    which must be longer than a pull may take. Of a version that ``n`` nodes have, ``wave + n`` nodes are told
    at once; whoever runs this asks for those of :meth:`next_told` again: they have waited longest.
    """

    def __init__(self, forget_s: float = 90.0, wave: int = WAVE) -> None:
        self.forget_s = forget_s
        self.wave = wave
        self.message: Message | None = None
        # Of the message here: who has its version, who was told when, and who waits, in the order of time.
        self._have: set[str] = set()
        self._told: dict[str, float] = {}
        self._waiting: dict[str, None] = {}
        #: Of each node: the request, when, and the image that it was told of then, and may be pulling.
        self._last: dict[str, tuple[Request, float, ImageId | None]] = {}

    def post(self, message: Message, now_s: float) -> Reply:
        """Take a message, unless a newer one is here. Posting the same again does no harm."""
        self._forget(now_s)
        if self.message is not None and message.stamp < self.message.stamp:
            return Reply(accepted=False)
        if self.message is None or message.image_id != self.message.image_id:
            self._have.clear()
            self._told.clear()
            self._waiting.clear()
            for node, (request, _, pulls) in self._last.items():
                if pulls is None and _is_of_use(message, request):
                    self._waiting[node] = None
        self.message = message
        waiting = [node for node in self._waiting if now_s - self._last[node][1] <= _WAITS_S]
        held_back = len(waiting) > self._room(now_s)
        spreading = held_back or len(self._told) > max(self.wave, len(self._have))
        return Reply(True, self.pulled, self.lost, spreading)

    def ask(self, request: Request, now_s: float) -> Message | None:
        """The message, if it is of use for the node, and the node's turn has come."""
        node = request.node
        message = self.message
        if message is not None and message.stamp == request.stamp:
            self._have.add(node)
        if message is not None and not _is_of_use(message, request):
            message = None
        self._told.pop(node, None)
        if message is not None and self._room(now_s) <= 0:
            message = None
            self._waiting[node] = None
        else:
            self._waiting.pop(node, None)
        if message is not None:
            self._told[node] = now_s

        pulls = None if message is None else message.image_id
        self._last.pop(node, None)  # the order of the keys is that of time
        self._last[node] = request, now_s, pulls
        self._forget(now_s)
        return message

    def next_told(self, asking: Container[str], now_s: float) -> list[str]:
        """Those of ``asking`` whose turn has come, in the order in which they began to wait."""
        waiting = (node for node in self._waiting if node in asking)
        return list(islice(waiting, max(0, self._room(now_s))))

    def _room(self, now_s: float) -> int:
        """How many more nodes may be told now."""
        while self._told:
            first = next(iter(self._told))
            if now_s - self._told[first] <= _PLACE_S:
                break
            del self._told[first]
        return self.wave + len(self._have) - len(self._told)

    @property
    def nodes(self) -> int:
        """How many nodes have asked."""
        return len(self._last)

    @property
    def requests(self) -> list[Request]:
        """The last request of each node."""
        return [request for request, _, _ in self._last.values()]

    @property
    def pulled(self) -> frozenset[ImageId]:
        """Images that nodes may be pulling: each was told of one when it asked last."""
        return frozenset(pulls for _, _, pulls in self._last.values() if pulls is not None)

    @property
    def lost(self) -> ImageId | None:
        """The image of the message here, if a node could not get it."""
        if self.message is None:
            return None
        here = self.message.image_id
        if any(request.lost == here for request in self.requests):
            return here
        return None

    def _forget(self, now_s: float) -> None:
        while self._last:
            node = next(iter(self._last))
            _, asked_at_s, _ = self._last[node]
            if now_s - asked_at_s <= self.forget_s:
                return
            del self._last[node]
            self._have.discard(node)
            self._told.pop(node, None)
            self._waiting.pop(node, None)


def _is_of_use(message: Message, request: Request) -> bool:
    """Whether it is newer than the node's version, and not of an image that the node could not get."""
    return message.stamp > request.stamp and message.image_id != request.lost
