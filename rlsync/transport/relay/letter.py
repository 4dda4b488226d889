"""What the learner leaves in the mailbox: word of one version, and where its image is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlsync.core.ledger import Stamp


@dataclass(frozen=True, slots=True)
class Letter:
    """Word of a version.

    Args:
        stamp: its generation and number.
        digest: of its flat image.
        image_bytes: how large that is.
        address: where the store has it; only whoever runs the relay knows what that means.
    """

    stamp: Stamp
    digest: int
    image_bytes: int
    address: Any
