"""One version as a flat image: a digest in front, then its stamp, its layout and the bytes of all leaves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlsync.core.errors import PublishError
from rlsync.core.ledger import NOTHING, Stamp
from rlsync.tensors.digest import digest
from rlsync.tensors.layout import ALIGN_BYTES, Layout

_HEAD_WORDS = 4  # digest, generation, version, bytes of the layout's JSON
_HEAD_BYTES = 8 * _HEAD_WORDS


@dataclass(frozen=True, slots=True)
class Image:
    """A version that was taken out of its flat image."""

    stamp: Stamp
    layout: Layout
    #: one for each entry of the layout that owns its bytes; views of the flat image
    leaves: list[Tensor]


class ImageBuffer:
    """Memory for the flat image of one version at a time."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.stamp = NOTHING
        json_bytes = layout.to_json()
        at = _leaves_at(len(json_bytes))
        flat = torch.empty(at + layout.image_bytes, dtype=torch.uint8, device="cpu")
        self._flat = flat.zero_()  # touches every page
        packed = torch.frombuffer(bytearray(json_bytes), dtype=torch.uint8)
        self._flat[_HEAD_BYTES : _HEAD_BYTES + len(json_bytes)] = packed
        self._head = self._flat[:_HEAD_BYTES].view(torch.int64)
        self._head[3] = len(json_bytes)
        #: One tensor for each entry of the layout that owns its bytes.
        self.leaves = layout.owned_views(self._flat[at:])

    @torch.no_grad()
    def write(self, stamp: Stamp, tensors: Sequence[Tensor]) -> None:
        """Copy a version here, one tensor for each entry that owns its bytes; LayoutMismatch: wrong shape."""
        self.layout.check(tensors)
        torch._foreach_copy_(self.leaves, list(tensors))
        self._head[1] = stamp.generation
        self._head[2] = stamp.version
        self.stamp = stamp

    def sealed(self) -> Tensor:
        """The flat image, with its digest: a one-dimensional ``uint8`` tensor in this memory."""
        self._head[0] = digest_of(self._flat)
        return self._flat


def unpack(flat: Tensor) -> Image:
    """Take a version out of a sealed flat image; PublishError if its digest does not match."""
    if flat.numel() < _HEAD_BYTES or digest_of(flat) != digest_in(flat):
        problem = "an image of weights was damaged on its way: its digest does not match"
        cure = "nothing to do: the image is not used, and is asked for again"
        raise PublishError(problem, f"{flat.numel():,} bytes from the store", cure)
    _, generation, version, json_bytes = flat[:_HEAD_BYTES].view(torch.int64).tolist()
    layout = Layout.from_json(bytes(flat[_HEAD_BYTES : _HEAD_BYTES + json_bytes].tolist()))
    return Image(
        Stamp(generation, version), layout, layout.owned_views(flat[_leaves_at(json_bytes) :])
    )


def digest_in(flat: Tensor) -> int:
    """The digest that a flat image carries."""
    return int(flat[:8].view(torch.int64))


def digest_of(flat: Tensor) -> int:
    """The digest of everything behind the digest, as a signed 64-bit number."""
    number = digest([flat[8:]])
    if number >> 63:
        return number - (1 << 64)
    return number


def _leaves_at(layout_bytes: int) -> int:
    return -(-(_HEAD_BYTES + layout_bytes) // ALIGN_BYTES) * ALIGN_BYTES
