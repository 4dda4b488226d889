"""A flat byte layout for leaves: offset, shape, dtype and alignment, and the hash of it all.

Depends on torch and the standard library only, as the transports do.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from rlsync.core.errors import LayoutMismatch

ALIGN_BYTES = 64
Kind = Literal["parameter", "buffer", "extra_state"]


@dataclass(frozen=True, slots=True)
class LeafSpec:
    """What is known of a leaf without its bytes.

    Args:
        name: dotted name, unique in its destination.
        kind: ``"parameter"``, ``"buffer"`` or ``"extra_state"``.
        shape: its shape.
        dtype: its dtype.
        tie: name of the earlier leaf that is the same memory; empty when there is none.
        once: no publish brings it any more: a worker takes it at its first adoption, and keeps its own.
    """

    name: str
    kind: Kind
    shape: tuple[int, ...]
    dtype: torch.dtype
    tie: str = ""
    once: bool = False

    @property
    def payload_bytes(self) -> int:
        """Bytes of the leaf."""
        count = 1
        for size in self.shape:
            count *= size
        return count * self.dtype.itemsize

    @property
    def dtype_name(self) -> str:
        """The dtype without its ``torch.`` prefix."""
        return dtype_name(self.dtype)


@dataclass(frozen=True, slots=True)
class Entry:
    """A leaf's place in a slot image.

    Args:
        destination: which destination of the map it belongs to.
        leaf: what it is.
        offset: where its bytes begin in the image.
        owner: which of the tensors of a publish carries its bytes; tied leaves share one.
    """

    destination: str
    leaf: LeafSpec
    offset: int
    owner: int


@dataclass(frozen=True, slots=True)
class Layout:
    """All leaves of all destinations, flat, 64-byte aligned; tied leaves share their bytes.

    ``owned`` are the entries that own their bytes, in the order in which a publish takes their tensors.

    Example:
        >>> spec = LeafSpec("w", "parameter", (2, 3), torch.float32)
        >>> layout = Layout.build({"policy": [spec]})
        >>> layout.image_bytes, layout.entries[0].offset
        (64, 0)
        >>> Layout.from_json(layout.to_json()) == layout
        True
    """

    entries: tuple[Entry, ...]
    image_bytes: int
    owned: tuple[Entry, ...] = ()

    @classmethod
    def build(cls, destinations: Mapping[str, Sequence[LeafSpec]]) -> Layout:
        """Lay out the leaves of each destination in the order given."""
        entries: list[Entry] = []
        at = owners = 0
        for destination, leaves in destinations.items():
            placed: dict[str, Entry] = {}
            for leaf in leaves:
                if leaf.tie:
                    first = placed[leaf.tie]
                    entries.append(Entry(destination, leaf, first.offset, first.owner))
                    continue
                placed[leaf.name] = Entry(destination, leaf, at, owners)
                entries.append(placed[leaf.name])
                owners += 1
                at += -(-leaf.payload_bytes // ALIGN_BYTES) * ALIGN_BYTES
        return cls(tuple(entries), at, tuple(e for e in entries if not e.leaf.tie))

    @property
    def destinations(self) -> dict[str, list[LeafSpec]]:
        """The leaves by destination."""
        found: dict[str, list[LeafSpec]] = {}
        for entry in self.entries:
            found.setdefault(entry.destination, []).append(entry.leaf)
        return found

    @property
    def schema_hash(self) -> int:
        """64-bit hash of names, shapes, dtypes and offsets."""
        return int.from_bytes(hashlib.blake2b(self.to_json(), digest_size=8).digest(), "little")

    def to_json(self) -> bytes:
        """The layout as canonical JSON; equal layouts give equal bytes."""
        rows = [
            [e.destination, leaf.name, leaf.kind, leaf.shape, leaf.dtype_name, leaf.tie, leaf.once]
            for e in self.entries
            for leaf in (e.leaf,)
        ]
        return json.dumps(rows, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Layout:
        """The inverse of :meth:`to_json`."""
        destinations: dict[str, list[LeafSpec]] = {}
        for destination, name, kind, shape, dtype, tie, once in json.loads(data):
            leaf = LeafSpec(name, kind, tuple(shape), dtype_named(dtype), tie, once)
            destinations.setdefault(destination, []).append(leaf)
        return cls.build(destinations)

    def views(self, image: torch.Tensor) -> list[torch.Tensor]:
        """Typed views of a flat ``uint8`` image, one for each entry, in order."""
        return [_view(image, entry) for entry in self.entries]

    def check(self, tensors: Sequence[torch.Tensor]) -> None:
        """Refuse tensors that are not those of a publish: one for each owning entry, of its shape.

        Raises:
            LayoutMismatch: names the first that does not fit.
        """
        owners = self.owned
        if len(tensors) != len(owners):
            raise LayoutMismatch(
                f"{len(tensors)} tensors for {len(owners)} leaves",
                ", ".join(self.destinations) or "an empty layout",
                "give one tensor for each leaf that is not tied to another",
            )
        for entry, tensor in zip(owners, tensors, strict=True):
            if tensor.shape != entry.leaf.shape:
                raise LayoutMismatch(
                    f"{entry.leaf.name} had shape {list(entry.leaf.shape)} and has {list(tensor.shape)} now",
                    entry.destination,
                    "register the sync again after changing the module",
                )

    def spread(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors of a publish, one for each entry, tied ones repeated."""
        return [tensors[entry.owner] for entry in self.entries]


def _view(image: torch.Tensor, entry: Entry) -> torch.Tensor:
    leaf = entry.leaf
    if leaf.payload_bytes == 0:
        return torch.empty(leaf.shape, dtype=leaf.dtype)
    flat = image[entry.offset : entry.offset + leaf.payload_bytes]
    return flat.view(leaf.dtype).view(leaf.shape)


def dtype_name(dtype: object) -> str:
    """A torch dtype, or its name, without the ``torch.`` prefix.

    Example:
        >>> dtype_name(torch.bfloat16), dtype_name("bfloat16")
        ('bfloat16', 'bfloat16')
    """
    return str(dtype).removeprefix("torch.")


_DTYPES = {dtype_name(d): d for d in vars(torch).values() if isinstance(d, torch.dtype)}


def dtype_named(name: str) -> torch.dtype:
    """The torch dtype called ``name``.

    Example:
        >>> dtype_named("bfloat16")
        torch.bfloat16
    """
    return _DTYPES[name]
