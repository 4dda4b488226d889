"""The mailbox: one message, about the newest version, and the last request of each node."""

from __future__ import annotations

from dataclasses import dataclass
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


class Mailbox:
    """Holds the newest message.

    It may be killed at any time: learner and agents repeat theirs. Laws: the stamp of its message never
    falls. It holds one message, and one request of each node that has asked in the last ``forget_s`` seconds,
    which must be longer than a pull may take.
    """

    def __init__(self, forget_s: float = 90.0) -> None:
        self.forget_s = forget_s
        self.message: Message | None = None
        #: Of each node: the request, when, and the image that it was told of then, and may be pulling.
        self._last: dict[str, tuple[Request, float, ImageId | None]] = {}

    def post(self, message: Message, now_s: float) -> Reply:
        """Take a message, unless a newer one is here. Posting the same again does no harm."""
        self._forget(now_s)
        if self.message is not None and message.stamp < self.message.stamp:
            return Reply(accepted=False)
        self.message = message
        return Reply(True, self.pulled, self.lost)

    def ask(self, request: Request, now_s: float) -> Message | None:
        """The message, if it is newer than the node's version and not of an image that it could not get."""
        message = self.message
        if message is not None and (
            message.stamp <= request.stamp or message.image_id == request.lost
        ):
            message = None
        pulls = None if message is None else message.image_id
        self._last[request.node] = request, now_s, pulls
        self._forget(now_s)
        return message

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
        for node, (_, asked_at_s, _) in list(self._last.items()):
            if now_s - asked_at_s > self.forget_s:
                del self._last[node]
