"""Choose a precision: float32 or wider for sums, and bfloat16 if the processor supports it."""

from __future__ import annotations

import torch
from torch import Tensor


def wide(*tensors: Tensor) -> list[Tensor]:
    """The tensors in one dtype: float32, or a wider one if a tensor has it.

    Example:
        >>> [t.dtype for t in wide(torch.zeros(1, dtype=torch.bfloat16), torch.zeros(1))]
        [torch.float32, torch.float32]
    """
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return [tensor.to(dtype) for tensor in tensors]


def bfloat16_instructions() -> list[str] | None:
    """The bfloat16 instructions of this CPU; ``None`` if torch does not tell (before 2.10).

    Without such instructions bfloat16 is emulated, and convolutions are about ten times slower than in
    float32.

    Example:
        >>> set(bfloat16_instructions() or []) <= {"amx_bf16", "avx512_bf16", "bf16"}
        True
    """
    if not hasattr(torch.cpu, "get_capabilities"):
        return None
    capabilities = torch.cpu.get_capabilities()
    return [name for name in ("amx_bf16", "avx512_bf16", "bf16") if capabilities.get(name)]
