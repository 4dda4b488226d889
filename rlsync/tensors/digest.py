"""What tensors hold: a digest of it, whether all of it is finite, how often it was written to."""

from __future__ import annotations

import cmath
import functools
from collections.abc import Iterable

import torch
from torch import Tensor

from rlsync.tensors.parts import memory_of
from rlsync.tensors.sharded import own_part

_ODD = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


@torch.no_grad()
def digest(tensors: Iterable[Tensor]) -> int:
    """A 64-bit fingerprint of the bytes of ``tensors``, in order: a changed bit changes it.

    Each leaf's 64-bit words are summed modulo 2**64, once plainly and once with weights that depend on the
    position, and the sums are mixed. Shapes and dtypes are not covered; of a sharded leaf, this process's
    part is, and of a tensor that is made of parts, each of them.
    """
    state = 0
    for tensor in tensors:
        for part in memory_of(tensor):
            plain, weighted = _sums(part)
            for word in (plain, weighted, part.numel()):
                state = ((state ^ (word & _MASK)) * _ODD + 1) & _MASK
                state ^= state >> 29
    return state


_BLOCK_WORDS = 1 << 16


@functools.cache
def _odd_numbers() -> Tensor:
    return torch.arange(_BLOCK_WORDS, dtype=torch.int64, device="cpu") * 2 + 1


def _sums(tensor: Tensor) -> tuple[int, int]:
    raw = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
    whole = raw.numel() // 8 * 8
    if raw.data_ptr() % 8:
        words = raw[:whole].clone().view(torch.int64)
    else:
        words = raw[:whole].view(torch.int64)
    plain = weighted = 0
    odd = _odd_numbers()
    for start in range(0, words.numel(), _BLOCK_WORDS):
        block = words[start : start + _BLOCK_WORDS]
        total = int(block.sum())
        plain += total
        # The weights are the odd numbers, beginning with 2 * start + 1. dot needs no memory for the products.
        weighted += int(torch.dot(block, odd[: block.numel()])) + 2 * start * total
    if whole == raw.numel():
        return plain, weighted
    tail = int.from_bytes(bytes(raw[whole:].tolist()), "little")
    return plain + tail, weighted ^ (tail * _ODD)


@torch.no_grad()
def all_finite(tensor: Tensor, becomes: torch.dtype | None = None) -> bool:
    """Whether every number of ``tensor``, or of this process's part, is finite, also after a cast."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    cast = own_part(tensor).to(becomes or tensor.dtype)
    # A number that is not finite makes the sum so. The sum of finite ones may overflow: then look closely.
    return cmath.isfinite(cast.sum().item()) or bool(torch.isfinite(cast).all())


def writes(tensor: Tensor) -> int:
    """Autograd's count of writes, which misses those through ``.data`` and of fused optimizers; 0: none."""
    if tensor.is_inference():
        return 0
    return tensor._version
