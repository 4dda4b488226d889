"""A flat byte layout for leaves: offset, shape, dtype and alignment.

Depends only on torch and the standard library, because the transports use it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Literal

import torch

from rlsync.core.errors import LayoutMismatch

ALIGN_BYTES = 64
Kind = Literal["parameter", "buffer", "extra_state"]


@dataclass(frozen=True, slots=True)
class LeafSpec:
    """A leaf without its bytes. Leaves are equal whatever their device."""

    name: str  #: dotted, unique in its destination
    kind: Kind
    shape: tuple[int, ...]
    dtype: torch.dtype
    tie: str = ""  #: name of an earlier leaf that has the same memory; empty when there is none
    excluded: bool = False  #: copied at a worker's first adoption, then never again
    #: Where it was seen, for example ``"cuda:0"``; several, with commas, where workers differ; or empty.
    device: str = field(default="", compare=False)
    #: Of a part of a tensor that is made of parts: what that tensor is besides their numbers. Else empty.
    whole: str = ""

    @property
    def payload_bytes(self) -> int:
        """Bytes of the leaf."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def dtype_name(self) -> str:
        """The dtype without its ``torch.`` prefix."""
        return dtype_name(self.dtype)


@dataclass(frozen=True, slots=True)
class Entry:
    """A leaf's place in a slot image."""

    destination: str  #: of the map
    leaf: LeafSpec
    offset: int  #: where its bytes begin in the image
    #: the number of the published tensor that holds its bytes; tied leaves have the same
    owner: int


@dataclass(frozen=True, slots=True)
class Layout:
    """All leaves of all destinations in one flat image, 64-byte aligned. Tied leaves share their bytes.

    ``owned`` lists the entries that own their bytes, in the order of the tensors of a publish.

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
        owned: list[Entry] = []
        at = 0
        for destination, leaves in destinations.items():
            placed: dict[str, Entry] = {}
            for leaf in leaves:
                if leaf.tie:
                    first = placed[leaf.tie]
                    entries.append(Entry(destination, leaf, first.offset, first.owner))
                    continue
                entry = Entry(destination, leaf, at, owner=len(owned))
                placed[leaf.name] = entry
                entries.append(entry)
                owned.append(entry)
                at += -(-leaf.payload_bytes // ALIGN_BYTES) * ALIGN_BYTES
        return cls(tuple(entries), at, tuple(owned))

    @property
    def destinations(self) -> dict[str, list[LeafSpec]]:
        """The leaves by destination."""
        leaves: dict[str, list[LeafSpec]] = {}
        for entry in self.entries:
            leaves.setdefault(entry.destination, []).append(entry.leaf)
        return leaves

    def to_json(self) -> bytes:
        """The layout as canonical JSON: layouts that are equal, devices included, give equal bytes."""
        return specs_to_json(self.destinations)

    @classmethod
    def of_arrays(
        cls, destination: str, arrays: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    ) -> Layout:
        """Lay out arrays of these shapes and dtypes, in the order given."""
        leaves = []
        for name, (shape, dtype) in arrays.items():
            leaves.append(LeafSpec(name, "buffer", shape, dtype))
        return cls.build({destination: leaves})

    @classmethod
    def from_json(cls, data: bytes) -> Layout:
        """The inverse of :meth:`to_json`."""
        return cls.build(specs_from_json(data))

    def views(self, image: torch.Tensor) -> list[torch.Tensor]:
        """Typed views of a flat ``uint8`` image, one for each entry, in order."""
        return [_view(image, entry) for entry in self.entries]

    def owned_views(self, image: torch.Tensor) -> list[torch.Tensor]:
        """Typed views of a flat ``uint8`` image, one for each entry that owns its bytes."""
        return [_view(image, entry) for entry in self.owned]

    def check(self, tensors: Sequence[torch.Tensor]) -> None:
        """Refuse a wrong number of tensors, or one without the shape of its leaf (LayoutMismatch)."""
        self.check_count(tensors)
        for entry, tensor in zip(self.owned, tensors, strict=True):
            if tensor.shape != entry.leaf.shape:
                raise LayoutMismatch(
                    f"{entry.leaf.name} had shape {list(entry.leaf.shape)} and has {list(tensor.shape)} now",
                    entry.destination,
                    "register the sync again after changing the module",
                )

    def check_count(self, tensors: Sequence[object]) -> None:
        """Refuse more or fewer tensors than there are entries that own their bytes (LayoutMismatch)."""
        if len(tensors) != len(self.owned):
            problem = f"{len(tensors)} tensors for {len(self.owned)} leaves"
            cure = "give one tensor for each leaf that is not tied to another"
            raise LayoutMismatch(problem, ", ".join(self.destinations) or "an empty layout", cure)

    def spread(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """One tensor for each entry; tied entries repeat the same tensor."""
        return [tensors[entry.owner] for entry in self.entries]


def specs_to_json(destinations: Mapping[str, Sequence[LeafSpec]]) -> bytes:
    """Leaves by destination as canonical JSON; a destination without leaves is in it, too."""
    rows = {destination: list(map(_row, leaves)) for destination, leaves in destinations.items()}
    return json.dumps(rows, separators=(",", ":")).encode()


#: What :func:`specs_to_json` writes of a leaf.
_row = attrgetter("name", "kind", "shape", "dtype_name", "tie", "excluded", "device", "whole")


def specs_from_json(data: bytes) -> dict[str, list[LeafSpec]]:
    """The inverse of :func:`specs_to_json`."""
    specs: dict[str, list[LeafSpec]] = {}
    for destination, rows in json.loads(data).items():
        specs[destination] = []
        for name, kind, shape, dtype, tie, excluded, device, whole in rows:
            leaf = LeafSpec(
                name, kind, tuple(shape), dtype_named(dtype), tie, excluded, device, whole
            )
            specs[destination].append(leaf)
    return specs


def _view(image: torch.Tensor, entry: Entry) -> torch.Tensor:
    leaf = entry.leaf
    if leaf.payload_bytes == 0:
        return torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu")
    flat = image[entry.offset : entry.offset + leaf.payload_bytes]
    return flat.view(leaf.dtype).view(leaf.shape)


def dtype_name(dtype: object) -> str:
    """A torch dtype, or its name, without the ``torch.`` prefix."""
    return str(dtype).removeprefix("torch.")


_DTYPES = {dtype_name(d): d for d in vars(torch).values() if isinstance(d, torch.dtype)}


def dtype_named(name: str) -> torch.dtype:
    return _DTYPES[name]
