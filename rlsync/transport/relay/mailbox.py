"""The mailbox: one letter, about the newest version, and what each node says of itself."""

from __future__ import annotations

from dataclasses import dataclass

from rlsync.core.ledger import NOTHING, Stamp
from rlsync.transport.relay.letter import Letter


@dataclass(frozen=True, slots=True)
class NodeReport:
    """What an agent says of its node when it asks.

    Args:
        node: its name.
        stamp: the newest version on its board.
        lost: the last letter whose image it could not get, or got damaged, if it has nothing newer.
    """

    node: str
    stamp: Stamp = NOTHING
    lost: Letter | None = None


@dataclass(slots=True)
class _Heard:
    report: NodeReport
    at_s: float


class Mailbox:
    """Holds the newest letter. It may be killed at any time: learner and agents repeat what they said.

    Laws: the stamp of its letter never falls. It holds one letter, and one report of each node that it has
    heard of in the last ``forget_s`` seconds.

    Args:
        forget_s: a node that says nothing for so long is forgotten.

    Example:
        >>> box = Mailbox()
        >>> box.post(Letter(Stamp(1, 2), digest=0, image_bytes=64, address="b"), now_s=0.0)
        True
        >>> box.post(Letter(Stamp(1, 1), digest=0, image_bytes=64, address="a"), now_s=0.0), box.refused
        (False, 1)
        >>> box.ask(NodeReport("node 1"), now_s=0.1).address
        'b'
        >>> box.ask(NodeReport("node 1", stamp=Stamp(1, 2)), now_s=0.2) is None
        True
    """

    def __init__(self, forget_s: float = 60.0) -> None:
        self.forget_s = forget_s
        self.letter: Letter | None = None
        self.refused = 0
        self._heard: dict[str, _Heard] = {}

    def post(self, letter: Letter, now_s: float) -> bool:
        """Take a letter, unless a newer one is here. Posting the same again does no harm.

        Args:
            letter: word of a version.
            now_s: the time.

        Returns:
            Whether it is the letter here now.
        """
        self._forget(now_s)
        if self.letter is not None and letter.stamp < self.letter.stamp:
            self.refused += 1
            return False
        self.letter = letter
        return True

    def ask(self, report: NodeReport, now_s: float) -> Letter | None:
        """The letter, if it is about a newer version than the node has.

        Args:
            report: what the agent says of its node.
            now_s: the time.
        """
        self._heard[report.node] = _Heard(report, now_s)
        self._forget(now_s)
        if self.letter is None or self.letter.stamp <= report.stamp:
            return None
        return self.letter

    @property
    def nodes(self) -> list[NodeReport]:
        """The last report of each node."""
        return [heard.report for heard in self._heard.values()]

    @property
    def lost(self) -> Letter | None:
        """The letter here, if a node could not get its image."""
        return next((r.lost for r in self.nodes if r.lost is not None and r.lost == self.letter), None)

    def _forget(self, now_s: float) -> None:
        self._heard = {n: heard for n, heard in self._heard.items() if now_s - heard.at_s <= self.forget_s}
