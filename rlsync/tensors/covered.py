"""Which memory some tensors cover."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

import torch
from torch import Tensor

from rlsync.tensors.sharded import own_part


class Covered:
    """The memory of some tensors: ``tensor in covered`` says whether a tensor overlaps it.

    A view overlaps what it is a view of, as one member of an ensemble overlaps the stack. A tensor without
    elements, or on the meta device, covers nothing.

    Args:
        tensors: the tensors.

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
