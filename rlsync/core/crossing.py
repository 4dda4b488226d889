"""Which devices the leaves of a plan are on, and how many bytes go from one device to another."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

CPU = "cpu"


@dataclass(frozen=True, slots=True)
class Crossing:
    """Leaves whose sources are on one device, and whose destinations are on one device."""

    source: str  #: empty if it is not known
    destination: str  #: several, with commas, where workers differ; empty if unknown
    through_host: bool  #: whether every version passes through host memory, as on a board
    aliased_leaves: int = 0
    copied_bytes: int = 0

    @property
    def publish_bytes(self) -> int:
        """Bytes that go from one device to another at a publish."""
        to = CPU if self.through_host else self.destination
        if self.source and to and self.source != to:
            return self.copied_bytes
        return 0

    @property
    def adoption_bytes(self) -> int:
        """Bytes that go from host memory to its device when one worker adopts."""
        if self.through_host and self.destination not in ("", CPU):
            return self.copied_bytes
        return 0

    def __str__(self) -> str:
        ends = self.source or "unknown", self.destination or "unknown"
        if self.through_host:
            path = " -> ".join((ends[0], "host memory", ends[1]))
        else:
            path = " -> ".join(dict.fromkeys(ends))
        if self.aliased_leaves:
            parts = [f"{self.aliased_leaves} leaves aliased, 0 bytes"]
        else:
            parts = []
        if self.publish_bytes and self.adoption_bytes:
            parts.append(
                f"{self.publish_bytes:,} bytes cross at a publish, {self.adoption_bytes:,} at each adoption"
            )
        elif self.publish_bytes:
            parts.append(f"{self.publish_bytes:,} bytes cross at a publish")
        elif self.adoption_bytes:
            parts.append(f"{self.adoption_bytes:,} bytes cross at each adoption")
        elif self.copied_bytes:
            on_the_device = self.source and self.destination and not self.through_host
            if on_the_device:
                parts.append(f"{self.copied_bytes:,} bytes copied on the device")
            else:
                parts.append(f"{self.copied_bytes:,} bytes copied")
        return f"{path}: {'; '.join(parts) or 'nothing moves'}"


def crossings(leaves: Iterable[Crossing]) -> tuple[Crossing, ...]:
    """Crossings of single leaves, added up by their devices."""
    by_devices: dict[tuple[str, str, bool], Crossing] = {}
    for leaf in leaves:
        key = leaf.source, leaf.destination, leaf.through_host
        so_far = by_devices.setdefault(key, Crossing(*key))
        by_devices[key] = replace(
            so_far,
            aliased_leaves=so_far.aliased_leaves + leaf.aliased_leaves,
            copied_bytes=so_far.copied_bytes + leaf.copied_bytes,
        )
    return tuple(by_devices.values())
