"""Wrappers and stand-ins of modules and tensors: DDP, torch.compile, FSDP, DTensor, tensordicts."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from rlsync.core.errors import LayoutMismatch
from rlsync.tensors.sharded import Sharding, is_sharded

if TYPE_CHECKING:
    from tensordict import TensorDictBase
    from tensordict.nn import TensorDictParams
    from typing_extensions import TypeIs


def unwrap(module: nn.Module, where: str) -> nn.Module:
    """The module inside DDP, DataParallel and ``torch.compile``. FSDP 1 is refused."""
    while True:
        if isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            module = module.module
        elif is_compiled_wrapper(module):
            module = module._orig_mod  # type: ignore[assignment]
        else:
            break
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel):
        raise LayoutMismatch(
            "the module is sharded by FSDP 1, which hides its parameters",
            where,
            "shard it with FSDP 2 (torch.distributed.fsdp.fully_shard)",
        )
    return module


def is_compiled_wrapper(module: nn.Module) -> bool:
    """Whether ``module`` is what ``torch.compile(module)`` returns (no import of the compiler)."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return dynamo is not None and isinstance(module, dynamo.OptimizedModule)


def uncompiled(name: str) -> str:
    """A leaf's name in a state dict, without the prefix that ``torch.compile`` adds."""
    return name.replace("_orig_mod.", "")


def check_has_plain_bytes(tensor: Tensor, name: str, where: str, *, shards: bool = False) -> None:
    """Refuse a sharded (without ``shards``), uninitialised, sparse or quantized tensor."""
    if is_sharded(tensor):
        if not shards:
            raise _sharded(name, where)
        Sharding.of(tensor, name, where)  # refuses what cannot be put together
        return
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
        f"{name} is sharded over ranks, and whole tensors are needed here",
        where,
        "shards can be the source of a map whose workers read a board; elsewhere gather it first "
        "(full_tensor, or a full state dict), and name the gathered module",
    )


def is_tensordict(value: object) -> TypeIs[TensorDictBase]:
    """Whether ``value`` is a tensordict. While nobody has imported tensordict (seconds), nothing is one."""
    module = sys.modules.get("tensordict")
    return module is not None and isinstance(value, module.TensorDictBase)


def is_tensordict_params(value: object) -> TypeIs[TensorDictParams]:
    """Whether ``value`` is a module that holds a tensordict of parameters."""
    module = sys.modules.get("tensordict.nn")
    return module is not None and isinstance(value, module.TensorDictParams)
