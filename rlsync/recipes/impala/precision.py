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


def bfloat16_instructions() -> list[str] | None:
    """Which instructions for bfloat16 this CPU has; None where torch (before 2.10) does not tell.

    Without any it is emulated, and convolutions in it are some ten times slower than in float32.

    Example:
        >>> set(bfloat16_instructions() or []) <= {"amx_bf16", "avx512_bf16", "bf16"}
        True
    """
    if not hasattr(torch.cpu, "get_capabilities"):
        return None
    capabilities = torch.cpu.get_capabilities()
    return [name for name in ("amx_bf16", "avx512_bf16", "bf16") if capabilities.get(name)]
