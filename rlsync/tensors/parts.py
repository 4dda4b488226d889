"""Tensors that are made of other tensors, such as quantised weights: their parts, and tensors of other parts.

Such a tensor is of a subclass that has torch's protocol for it: ``__tensor_flatten__`` names the parts, which
are attributes, and ``__tensor_unflatten__`` puts a tensor together. The tensor itself has no memory: its
pointer is 0, and says nothing about which tensor it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from rlsync.tensors.sharded import is_sharded, own_part

#: Classes of tensors that have memory of their own.
PLAIN = frozenset({Tensor, nn.Parameter})


def is_made_of_parts(tensor: Tensor) -> bool:
    """Whether a tensor can be taken apart. A DTensor is not: see :mod:`rlsync.tensors.sharded`."""
    if type(tensor) in PLAIN or tensor.layout is not torch.strided:
        return False
    return is_traceable_wrapper_subclass(tensor) and not is_sharded(tensor)


def part_names(tensor: Tensor) -> list[str]:
    """The names of the parts, dotted where a part is made of parts, too; none for any other tensor."""
    if not is_made_of_parts(tensor):
        return []
    names: list[str] = []
    for name in _flattened(tensor)[0]:
        below = part_names(part_of(tensor, name))
        names += [f"{name}.{inner}" for inner in below] or [name]
    return names


def _flattened(tensor: Any) -> tuple[list[str], object]:
    """The names of the outermost parts, and what the class needs besides to put a tensor together."""
    names, settings = tensor.__tensor_flatten__()
    return names, settings


def part_of(tensor: Tensor, name: str) -> Tensor:
    """The part of a tensor that has this dotted name, as it is now."""
    return attrgetter(name)(tensor)


def memory_of(tensor: Tensor) -> list[Tensor]:
    """The tensors with a tensor's memory in this process: itself, its parts, or its shard of a DTensor."""
    tensor = own_part(tensor)
    return [part_of(tensor, name) for name in part_names(tensor)] or [tensor]


def address(tensor: Tensor) -> int:
    """Where the memory of a tensor begins; 0 if it has none of its own."""
    try:
        return tensor.data_ptr()
    except RuntimeError:  # of a kind without memory, for example sparse, or inside torch.func
        return 0


def form_of(tensor: Tensor) -> str:
    """What a tensor is besides the numbers in its parts, in words; equal ones can exchange their parts.

    Empty for a tensor that is not made of parts.
    """
    if not is_made_of_parts(tensor):
        return ""
    names, settings = _flattened(tensor)
    dtype = str(tensor.dtype).removeprefix("torch.")
    parts = [f"{name} {form_of(part_of(tensor, name))}".rstrip() for name in names]
    form = f"{type(tensor).__name__} {dtype}{list(tensor.shape)} of {', '.join(parts)}"
    if settings is not None:
        # Functions and plain objects show where they lie, which is not the same in another process.
        form += " " + re.sub(r" at 0x[0-9a-f]+", "", repr(settings))
    return form


def remade(tensor: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """A tensor of the same form, with what ``change`` makes of each of its parts, or of the tensor."""
    if not is_made_of_parts(tensor):
        return change(tensor)
    names, settings = _flattened(tensor)
    parts = {name: remade(part_of(tensor, name), change) for name in names}
    kind: Any = type(tensor)
    return kind.__tensor_unflatten__(parts, settings, tensor.size(), tensor.stride())


def with_parts(tensor: Tensor, parts: dict[str, Tensor]) -> Tensor:
    """A tensor of the same form, with these parts, by dotted name."""
    order = iter(part_names(tensor))
    return remade(tensor, lambda _: parts[next(order)])
