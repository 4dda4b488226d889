"""A published version, copied out for somebody who needs it for longer than until the next publish."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from rlsync.sync.bound_map import BoundMap
from rlsync.transport.rules import Key, keyed


@dataclass(frozen=True, slots=True)
class VersionCopy:
    """The leaves that a map brings, by destination and name, of one version. Nobody writes to them."""

    version: int
    leaves: Mapping[Key, Tensor]

    def of(self, destination: str) -> dict[str, Tensor]:
        """The leaves of one destination, by name."""
        return {name: tensor for (found, name), tensor in self.leaves.items() if found == destination}


class VersionCopies:
    """Copies the newest version of a map for those who need it for longer than until the next publish.

    A board keeps the newest version, from which it is copied when it is asked for. Other transports keep
    none: there, every publish makes a copy more.
    """

    def __init__(self, bound_map: BoundMap) -> None:
        self._map = bound_map
        self._kept: VersionCopy | None = None

    def published(self) -> None:
        """The map has just been published: copy it, if the transport keeps no version."""
        publisher = self._map.endpoint.publisher
        if publisher.transport.newest_leaves() is None:
            self._kept = VersionCopy(publisher.version, self._map.copies())

    def newest(self) -> VersionCopy | None:
        """The newest version, whichever thread asks; None if nobody has kept it."""
        publisher = self._map.endpoint.publisher
        transport, brought = publisher.transport, self._map.brought()
        while True:
            stamp, held = transport.newest_stamp, transport.newest_leaves()
            if held is None:
                break
            leaves = {key: leaf.clone() for key, leaf in keyed(*held).items() if key in brought}
            if transport.newest_stamp == stamp:  # what is the newest version all the time is not written to
                return VersionCopy(stamp.version, leaves)
        kept = self._kept
        return kept if kept is not None and kept.version == publisher.version else None
