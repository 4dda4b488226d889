"""Memory: which of it tensors cover, and what becomes of freed memory."""

from __future__ import annotations

import ctypes
import gc
from bisect import bisect_right
from collections.abc import Iterable
from contextlib import suppress

import torch
from torch import Tensor

from rlsync.tensors.sharded import own_part


class Covered:
    """The memory of some tensors: ``tensor in covered`` says whether a tensor overlaps it.

    A view overlaps what it is a view of, as one member of an ensemble overlaps the stack. A tensor without
    elements, or on the meta device, covers nothing.

    Example:
        >>> stack = torch.zeros(2, 3)
        >>> covered = Covered([stack])
        >>> stack[1] in covered, stack.clone() in covered
        (True, False)
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._starts: dict[torch.device, list[int]] = {}
        self._ends: dict[torch.device, list[int]] = {}
        for start, end, device in sorted(filter(None, map(_span, tensors)), key=lambda span: span[0]):
            starts, ends = self._starts.setdefault(device, []), self._ends.setdefault(device, [])
            if ends and start < ends[-1]:
                ends[-1] = max(ends[-1], end)
            else:
                starts.append(start)
                ends.append(end)

    def __bool__(self) -> bool:
        return bool(self._starts)

    def __contains__(self, tensor: Tensor) -> bool:
        span = _span(tensor)
        if span is None or span[2] not in self._starts:
            return False
        start, end, device = span
        at = bisect_right(self._ends[device], start)  # the first span that ends after it begins
        return at < len(self._starts[device]) and self._starts[device][at] < end


def _span(tensor: Tensor) -> tuple[int, int, torch.device] | None:
    tensor = own_part(tensor)
    if tensor.is_meta or not tensor.numel():
        return None
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size(), tensor.device


#: Parameter numbers of mallopt(3).
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3

#: The largest value that glibc accepts.
_LARGEST_MMAP_THRESHOLD = 32 << 20


def keep_freed_memory() -> None:
    """From this call on, let the process keep freed memory for its next allocations.

    A learner allocates and frees the same activations in every step. By default the C library returns large
    ones to the host and requests them again, with a page fault for each 4 KiB. That takes 4 to 6 % of a step
    of the shallow network. The process then shrinks only if :func:`return_freed_memory` is called.

    Example:
        >>> keep_freed_memory()
    """
    with suppress(AttributeError):  # a C library other than glibc
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def return_freed_memory() -> None:
    """Return unused memory to the host now.

    Two things keep unused memory. Tensors in reference cycles wait for the next garbage collection. And the C
    library keeps freed memory on its heap, where it also puts tensors of up to 32 MiB after a few of them
    were freed. This takes some ten milliseconds, so call it rarely.

    Example:
        >>> return_freed_memory()
    """
    gc.collect()
    with suppress(AttributeError):  # a C library other than glibc
        ctypes.CDLL(None).malloc_trim(0)
