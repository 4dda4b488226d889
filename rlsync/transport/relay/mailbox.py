"""The mailbox: one letter, about the newest version, and what each node says of itself."""

from __future__ import annotations

from dataclasses import dataclass

from rlsync.core.ledger import NOTHING, Stamp
from rlsync.transport.relay.letter import Letter, Put


@dataclass(frozen=True, slots=True)
class NodeReport:
    """What an agent says of its node when it asks.

    Args:
        node: its name.
        stamp: the newest version on its board.
        lost: the last image that it could not get, or got damaged, if it has nothing newer.
    """

    node: str
    stamp: Stamp = NOTHING
    lost: Put | None = None


@dataclass(frozen=True, slots=True)
class Receipt:
    """What the mailbox answers to a letter.

    Args:
        taken: whether this is the letter here now.
        pulled: images that nodes may still be pulling. From now on, nobody is told of an older version
            than this letter's, so no other image of an older version is needed any more.
        lost: the image of the letter here, if a node could not get it.
    """

    taken: bool
    pulled: frozenset[Put] = frozenset()
    lost: Put | None = None


@dataclass(slots=True)
class _Heard:
    report: NodeReport
    at_s: float
    given: Put | None  # the image that the node was told of in its last answer, and may be pulling


class Mailbox:
    """Holds the newest letter. It may be killed at any time: learner and agents repeat what they said.

    Laws: the stamp of its letter never falls. It holds one letter, and one report of each node that it has
    heard of in the last ``forget_s`` seconds.

    Args:
        forget_s: a node that says nothing for so long is forgotten. Longer than a pull may take.

    Example:
        >>> box = Mailbox()
        >>> box.post(Letter(Stamp(1, 2), digest=0, image_bytes=64, address="b"), now_s=0.0).taken
        True
        >>> older = Letter(Stamp(1, 1), digest=0, image_bytes=64, address="a")
        >>> box.post(older, now_s=0.0).taken, box.refused
        (False, 1)
        >>> box.ask(NodeReport("node 1"), now_s=0.1).address
        'b'
        >>> [put.stamp.version for put in box.pulled]
        [2]
        >>> box.ask(NodeReport("node 1", stamp=Stamp(1, 2)), now_s=0.2) is None, box.pulled
        (True, frozenset())
    """

    def __init__(self, forget_s: float = 90.0) -> None:
        self.forget_s = forget_s
        self.letter: Letter | None = None
        self.refused = 0
        self._heard: dict[str, _Heard] = {}

    def post(self, letter: Letter, now_s: float) -> Receipt:
        """Take a letter, unless a newer one is here. Posting the same again does no harm.

        Args:
            letter: word of a version.
            now_s: the time.
        """
        self._forget(now_s)
        if self.letter is not None and letter.stamp < self.letter.stamp:
            self.refused += 1
            return Receipt(taken=False)
        self.letter = letter
        return Receipt(True, self.pulled, self.lost)

    def ask(self, report: NodeReport, now_s: float) -> Letter | None:
        """The letter, if it is about a newer version than the node has.

        A node is not told again of an image that it could not get: the learner has to put it again.

        Args:
            report: what the agent says of its node. Who asks pulls nothing.
            now_s: the time.
        """
        letter = self.letter
        if letter is not None and (letter.stamp <= report.stamp or letter.put == report.lost):
            letter = None
        self._heard[report.node] = _Heard(report, now_s, None if letter is None else letter.put)
        self._forget(now_s)
        return letter

    @property
    def nodes(self) -> list[NodeReport]:
        """The last report of each node."""
        return [heard.report for heard in self._heard.values()]

    @property
    def pulled(self) -> frozenset[Put]:
        """Images that nodes may be pulling: each was told of one when it asked last."""
        return frozenset(heard.given for heard in self._heard.values() if heard.given is not None)

    @property
    def lost(self) -> Put | None:
        """The image of the letter here, if a node could not get it."""
        here = None if self.letter is None else self.letter.put
        return here if any(report.lost == here for report in self.nodes) else None

    def _forget(self, now_s: float) -> None:
        self._heard = {n: heard for n, heard in self._heard.items() if now_s - heard.at_s <= self.forget_s}
