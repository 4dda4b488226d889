"""The contract of a transport: a publisher, a subscriber, and the laws between them.

Laws, which ``tests/test_transport_contract.py`` holds every transport to:

1. A publish makes a new version visible as a whole, or raises and changes nothing.
2. Versions grow by one and are never reused.
3. An adoption takes the newest version; a subscriber's version never falls.
4. What an adoption hands out is exactly what was published under that version, leaf for leaf, until the
   next adoption.
5. Neither side waits for the other, however the other died.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from rlsync.tensors.layout import Layout

#: Writes the views of one version into what acts. Returns whether it goes on reading the views, in which
#: case they stay as they are until the next adoption.
Apply = Callable[[int, Layout, Sequence[Tensor]], bool]


class Publisher(Protocol):
    """The learner's end."""

    @property
    def version(self) -> int:
        """The newest published version; 0 before the first."""

    def publish(self, tensors: Sequence[Tensor]) -> int | None:
        """Publish ``tensors``, one for each entry of the layout that owns its bytes, in order.

        Returns:
            The new version, or ``None`` when the publish was coalesced: no room was free, nothing was
            written, and the next publish carries the weights.
        """


class Subscriber(Protocol):
    """A worker's end."""

    def adopt(self) -> int:
        """Adopt the newest version, in the caller's thread.

        Returns:
            The version that acts from now on; 0 when nothing was published yet.
        """
