"""Numbers that parameters get to find out whether they act: they need little memory, however large a model is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy

import torch
from torch import Tensor

from rlsync.tensors.layout import LeafSpec

#: Numbers repeat after so many. It is a prime, so that no two rows of a matrix are the same for that.
_PERIOD = 65_537
#: So many numbers after each other the leaves in one memory begin: vector instructions want them aligned.
_APART = 16

#: Of a memory: its dtype, and the scale of its numbers.
_Kind = tuple[torch.dtype, float]
#: Of a leaf: the kind of memory that it is in, where it begins there, and its shape.
_Place = tuple[_Kind, int, tuple[int, ...]]


class Numbers:
    """Fixed numbers for the parameters of a module, none of them zero.

    They are as large as those of a network at its start, or ``by`` times as large. All leaves with the same
    dtype and scale are views of one memory, and begin at different places of it: together they need as much
    as the largest of them.

    Args:
        specs: the parameters, of floating-point dtypes. A tied one has the numbers of its owner.
        seed: with another seed they are other numbers.
        positive: no number is below zero, and each is so small that a sum over the inputs stays near one.
        by: a factor of all numbers.

    Example:
        >>> specs = [LeafSpec(name, "parameter", (1000, 1000), torch.float32) for name in "abc"]
        >>> numbers = Numbers(specs, seed=0)
        >>> [view.shape == (1000, 1000) for view in numbers.views], bool((numbers.views[0] == 0).any())
        ([True, True, True], False)
        >>> numbers.views[0].untyped_storage().nbytes() < 2 * specs[0].payload_bytes
        True
    """

    def __init__(
        self, specs: Sequence[LeafSpec], seed: int, *, positive: bool = False, by: int = 1
    ) -> None:
        sizes: dict[_Kind, int] = {}
        owners: dict[str, _Place] = {}
        self._places: list[_Place] = []
        for number, spec in enumerate(specs):
            kind = spec.dtype, _scale(spec.shape, positive=positive)
            owners[spec.name] = kind, _APART * number % _PERIOD, spec.shape
            place = owners[spec.tie or spec.name]
            self._places.append(place)
            sizes[place[0]] = max(_end(place), sizes.get(place[0], 0))
        self._memories: dict[_Kind, Tensor] = {}
        for kind, size in sizes.items():
            self._memories[kind] = _filled(size, seed, kind, positive=positive, by=by)

    @property
    def views(self) -> list[Tensor]:
        """One for each leaf, in their order."""
        views = []
        for place in self._places:
            kind, begin, shape = place
            views.append(self._memories[kind][begin : _end(place)].view(shape))
        return views

    def elsewhere(self) -> Numbers:
        """The same in memory of their own."""
        others = copy(self)
        others._memories = {kind: memory.clone() for kind, memory in self._memories.items()}
        return others

    def refill(self, others: Numbers) -> None:
        """Take over other numbers of the same parameters, in the memory where these are."""
        for kind, memory in self._memories.items():
            memory.copy_(others._memories[kind])


def _end(place: _Place) -> int:
    _, begin, shape = place
    return begin + math.prod(shape)


def _scale(shape: tuple[int, ...], *, positive: bool) -> float:
    inputs = max(1, math.prod(shape[1:]))
    if positive:
        return 1 / inputs
    return 1 / math.sqrt(inputs)


def _filled(size: int, seed: int, kind: _Kind, *, positive: bool, by: int) -> Tensor:
    dtype, scale = kind
    generator = torch.Generator().manual_seed(seed)
    count = min(size, _PERIOD)
    numbers = torch.rand(count, generator=generator, device="cpu") / 2 + 0.5
    if not positive:
        numbers *= torch.randint(0, 2, (count,), generator=generator, device="cpu") * 2 - 1
    numbers = (by * scale * numbers).to(dtype)
    memory = torch.empty(size, dtype=dtype, device="cpu")
    for part in memory.split(_PERIOD):
        part.copy_(numbers[: len(part)])
    return memory
