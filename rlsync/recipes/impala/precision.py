"""Which precision is wise where: sums in float32 or wider, bfloat16 where the processor has it."""

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


def emulates_bfloat16() -> bool:
    """Whether the CPU has no instructions for bfloat16; convolutions in it are then some ten times slower.

    Example:
        >>> emulates_bfloat16() in (True, False)
        True
    """
    capabilities = torch.cpu.get_capabilities()
    return not any(capabilities.get(name) for name in ("amx_bf16", "avx512_bf16", "bf16"))
