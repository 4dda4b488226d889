"""Wrappers around modules and tensors: DDP, torch.compile, FSDP, DTensor, lazy parameters."""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from rlsync.core.errors import LayoutMismatch


def unwrap(module: nn.Module, where: str) -> nn.Module:
    """The module inside DDP, DataParallel and ``torch.compile``. FSDP is refused.

    Example:
        >>> inner = nn.Linear(1, 1)
        >>> unwrap(nn.DataParallel(inner), "policy") is inner
        True
    """
    while True:
        if isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            module = module.module
        elif is_compiled_wrapper(module):
            module = module._orig_mod  # type: ignore[assignment]
        else:
            break
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel):
        raise _sharded("the module", where)
    return module


def is_compiled_wrapper(module: nn.Module) -> bool:
    """Whether ``module`` is what ``torch.compile(module)`` returns (no import of the compiler)."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return dynamo is not None and isinstance(module, dynamo.OptimizedModule)


def uncompiled(name: str) -> str:
    """A leaf's name in a state dict, without the prefix that ``torch.compile`` adds.

    Example:
        >>> uncompiled("net._orig_mod.0.weight")
        'net.0.weight'
    """
    return name.replace("_orig_mod.", "")


def check_has_plain_bytes(tensor: Tensor, name: str, where: str) -> None:
    """Refuse a tensor without plain bytes to copy: sharded, uninitialised, sparse or quantized."""
    dtensor = sys.modules.get("torch.distributed.tensor")
    if dtensor is not None and isinstance(tensor, dtensor.DTensor):
        raise _sharded(name, where)
    if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
        raise LayoutMismatch(
            f"{name} is not initialised yet",
            where,
            "run the module once before you register the hook",
        )
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise LayoutMismatch(
            f"{name} is {tensor.layout}, which cannot be sent", where, "exclude it in the route"
        )


def _sharded(name: str, where: str) -> LayoutMismatch:
    return LayoutMismatch(
        f"{name} is sharded over devices, and rlsync does not send shards",
        where,
        "gather it first (full_tensor, or a full state dict), and name the gathered module",
    )
