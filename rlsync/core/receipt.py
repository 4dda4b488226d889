"""Receipt: the record of one publish."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Receipt:
    """The record of one publish.

    Args:
        version: the version that this publish made; if it was coalesced, the newest version before it.
        reason: ``"start"``, ``"resume"``, ``"trigger"`` or ``"call"``.
        copied_leaves: leaves whose bytes were copied, casts and sharded leaves included.
        aliased_leaves: leaves that share memory with their destination.
        cast_leaves: leaves copied into another dtype.
        copied_bytes: bytes copied.
        aliased_bytes: bytes that were not copied, because source and destination share them.
        background_bytes: how many of ``copied_bytes`` were copied after the publish had returned.
        duration_s: seconds for which the publish held the learner.
        coalesced: no slot was free, so nothing was written; the next publish carries the weights.
        repaired: leaves that no longer shared memory with their destination; they are copied from now on.
        batches, frames, optim_steps: the learner's counters at the publish.
        time_s: seconds since the epoch.

    Example:
        >>> receipt = Receipt(2, "trigger", 4, 0, 0, 680, 0, 0, 5e-5, False, (), 1, 200, 10, 1.7e9)
        >>> receipt.version, receipt.copied_bytes, receipt.optim_steps
        (2, 680, 10)
    """

    version: int
    reason: str
    copied_leaves: int
    aliased_leaves: int
    cast_leaves: int
    copied_bytes: int
    aliased_bytes: int
    background_bytes: int
    duration_s: float
    coalesced: bool
    repaired: tuple[str, ...]
    batches: int
    frames: int
    optim_steps: int
    time_s: float

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))
