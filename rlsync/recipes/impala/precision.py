"""Sums are done in float32 or wider, whatever the network ran in."""

from __future__ import annotations

import torch
from torch import Tensor


def wide(*tensors: Tensor) -> list[Tensor]:
    """The tensors in one dtype: float32, or what is wider among them.

    Example:
        >>> [t.dtype for t in wide(torch.zeros(1, dtype=torch.bfloat16), torch.zeros(1))]
        [torch.float32, torch.float32]
    """
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return [tensor.to(dtype) for tensor in tensors]
