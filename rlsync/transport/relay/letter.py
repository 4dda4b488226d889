"""What the learner leaves in the mailbox: word of one version, and where its image is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from rlsync.core.ledger import Stamp


class Put(NamedTuple):
    """Names one image in the store: a version may be put there again.

    Args:
        stamp: generation and number of the version.
        number: counts the images that a sender has put.
    """

    stamp: Stamp
    number: int


@dataclass(frozen=True, slots=True)
class Letter:
    """Word of a version.

    Args:
        stamp: its generation and number.
        digest: of its flat image.
        image_bytes: how large that is.
        address: where the store has it; only whoever runs the relay knows what that means.
        number: counts the images that the sender has put.
    """

    stamp: Stamp
    digest: int
    image_bytes: int
    address: Any
    number: int = 1

    @property
    def put(self) -> Put:
        """Which image this letter is about."""
        return Put(self.stamp, self.number)
