"""Leaves that are sharded over the ranks of a learner (FSDP 2, tensor parallelism), and each rank's part.

A rank is one process of the learner, numbered by ``torch.distributed``. A sharded leaf is a ``DTensor``: each
rank of its mesh holds a part. Nothing here communicates, and ``torch.distributed.tensor`` is not imported
before somebody has made a DTensor.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from rlsync.core.errors import LayoutMismatch

#: A stretch of one dimension: where it begins in the part, where it begins in the whole leaf, its length.
Stretch = tuple[int, int, int]

Block = tuple[Stretch, ...]  #: a block of a leaf: one stretch for each dimension


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor, of whatever placements."""
    known = sys.modules.get("torch.distributed.tensor")
    return known is not None and isinstance(tensor, known.DTensor)


def any_sharded(tensors: Iterable[Tensor | None]) -> bool:
    """Whether one of many tensors is a DTensor; costs about 20 ns a tensor."""
    known = sys.modules.get("torch.distributed.tensor")
    if known is None:
        return False
    return any(issubclass(kind, known.DTensor) for kind in set(map(type, tensors)))


def own_part(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor: the local shard of a DTensor, any other tensor as it is."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        local: Tensor = tensor.to_local()  # type: ignore[attr-defined]
        return local


@dataclass(frozen=True, slots=True)
class Sharding:
    """How a leaf is sharded; equal on all ranks that hold a part of it."""

    shape: tuple[int, ...]
    dtype: str
    mesh_shape: tuple[int, ...]
    mesh_ranks: tuple[int, ...]  #: in row-major order
    #: For each dimension of the mesh, the dimension of the leaf that it shards and, for parts that are not
    #: contiguous, the number of stretches; -1 where every rank holds all of it.
    cuts: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, tensor: Any, name: str, where: str) -> Sharding:
        """How a DTensor is sharded; LayoutMismatch if a placement is neither a shard nor a replica."""
        mesh = tensor.device_mesh
        cuts = tuple(_cut(placement, name, where) for placement in tensor.placements)
        return cls(
            tuple(tensor.shape),
            str(tensor.dtype).removeprefix("torch."),
            tuple(mesh.shape),
            tuple(mesh.mesh.flatten().tolist()),
            cuts,
        )

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> Sharding:
        return cls(
            shape=tuple(stored["shape"]),
            dtype=stored["dtype"],
            mesh_shape=tuple(stored["mesh_shape"]),
            mesh_ranks=tuple(stored["mesh_ranks"]),
            cuts=tuple((dim, stretches) for dim, stretches in stored["cuts"]),
        )

    def __str__(self) -> str:
        along = []
        for dim, stretches in self.cuts:
            if dim < 0:
                along.append("replicated")
            elif stretches > 1:
                along.append(f"dimension {dim} in stretches")
            else:
                along.append(f"dimension {dim}")
        return f"{' x '.join(along)}, {'x'.join(map(str, self.mesh_shape))} ranks"

    def blocks(self, rank: int, owner: int) -> list[Block]:
        """The blocks of the leaf that a rank brings: those that ``full_tensor()`` on the owner takes."""
        if rank not in self.mesh_ranks or owner not in self.mesh_ranks:
            return []
        at = self._coordinate(rank)
        owners = self._coordinate(owner)
        runs = [[(0, size)] for size in self.shape]
        # Each dimension of the mesh leaves less of the leaf to a rank.
        for (dim, stretches), size, mine, theirs in zip(
            self.cuts, self.mesh_shape, at, owners, strict=True
        ):
            if dim >= 0:
                own_runs: _Runs = []
                for number in range(stretches):
                    stretch = _chunk(runs[dim], stretches, number)
                    own_runs += _chunk(stretch, size, mine)
                runs[dim] = own_runs
            elif mine != theirs:
                return []
        return list(product(*map(_stretches, runs)))

    def _coordinate(self, rank: int) -> tuple[int, ...]:
        place = self.mesh_ranks.index(rank)
        from_the_last = []
        for size in reversed(self.mesh_shape):
            from_the_last.append(place % size)
            place //= size
        return tuple(reversed(from_the_last))


def part_of(view: Tensor, block: Block) -> Tensor:
    """The block of a whole leaf, as a view."""
    return view[tuple(slice(start, start + length) for _, start, length in block)]


def block_of(part: Tensor, block: Block) -> Tensor:
    """The block of a rank's own part, as a view."""
    return part[tuple(slice(start, start + length) for start, _, length in block)]


@torch.no_grad()
def write_blocks(view: Tensor, tensor: Tensor, blocks: Sequence[Block]) -> None:
    """Copy blocks of a rank's own part of a leaf to their places in the whole one, cast to its dtype."""
    part = own_part(tensor)
    for block in blocks:
        part_of(view, block).copy_(block_of(part, block))


#: Stretches of one dimension of the whole leaf: where each begins, and its length.
_Runs = list[tuple[int, int]]


def _cut(placement: object, name: str, where: str) -> tuple[int, int]:
    from torch.distributed.tensor import Replicate, Shard

    # FSDP over tensor parallelism
    from torch.distributed.tensor.placement_types import _StridedShard

    match placement:
        case Replicate():
            return -1, 1
        case _StridedShard():
            return placement.dim, int(placement.split_factor)
        case Shard():
            return placement.dim, 1
    problem = (
        f"{name} is sharded as {placement!r}, which only a reduction over the ranks makes whole"
    )
    cure = (
        "redistribute it before you register the map: tensor.redistribute(placements=[Replicate()])"
    )
    raise LayoutMismatch(problem, where, cure)


def _chunk(runs: _Runs, chunks: int, number: int) -> _Runs:
    """One of ``chunks`` pieces of some stretches, cut as :func:`torch.chunk` cuts."""
    total = sum(length for _, length in runs)
    size = -(-total // chunks)
    first = min(total, number * size)
    last = min(total, (number + 1) * size)
    piece = []
    passed = 0
    for start, length in runs:
        low = max(first - passed, 0)
        high = min(last - passed, length)
        if low < high:
            piece.append((start + low, high - low))
        passed += length
    return piece


def _stretches(runs: _Runs) -> list[Stretch]:
    stretches: list[Stretch] = []
    at = 0
    for start, length in runs:
        if stretches and stretches[-1][1] + stretches[-1][2] == start:
            before = stretches.pop()
            stretches.append((before[0], before[1], before[2] + length))
        else:
            stretches.append((at, start, length))
        at += length
    return stretches
