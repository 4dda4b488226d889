"""The command line of rlsync in a process that has a second device; see tests/tools/parts/second_device.py.

What the device lacks for a whole training is lent to it here: random numbers, which are the CPU's; the dtype
of autocast; copies to the host that ask for pinned memory, of which it has none; and convolutions, and deep
copies of buffers, which have kernels of their own. TorchRL's collectors know CUDA, MPS and NPU by name, and
take this device for an NPU.
"""

from __future__ import annotations

import multiprocessing
import sys
from typing import Any

import torch
from torch import Tensor

from tests.tools.parts import second_device

_Generator = torch.Generator
_copy_of_tensor = Tensor.__deepcopy__
_libraries: list[torch.library.Library] = []


def lend() -> torch.device:
    """Give this process the device, with all that a training needs; workers that it forks have it, too."""
    device = second_device.register()
    module = second_device._module
    type(module).get_amp_supported_dtype = lambda _: [torch.bfloat16]  # type: ignore[attr-defined]
    torch.Generator = _generator  # type: ignore[assignment,misc]
    Tensor.__deepcopy__ = _deepcopy  # type: ignore[method-assign]
    torch.npu = module  # type: ignore[attr-defined]
    if not _libraries:
        _libraries.append(torch.library.Library("aten", "IMPL"))
        _libraries[0].impl("_to_copy", _to_copy, "PrivateUse1")
        _libraries[0].impl("convolution_overrideable", _convolution, "PrivateUse1")
    return device


def _deepcopy(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    if tensor.device.type != "second":
        return _copy_of_tensor(tensor, memo)
    if id(tensor) not in memo:
        memo[id(tensor)] = tensor.detach().clone()
    copy: Tensor = memo[id(tensor)]
    return copy


def _generator(device: object = "cpu") -> torch.Generator:
    return _Generator()


def _convolution(seen: Tensor, weight: Tensor, bias: Tensor | None, *how: Any) -> Tensor:
    on_cpu = [None if tensor is None else tensor.cpu() for tensor in (seen, weight, bias)]
    return torch.convolution(*on_cpu, *how).to(seen.device)


def _to_copy(
    tensor: Tensor,
    *,
    dtype: torch.dtype | None = None,
    device: Any = None,
    non_blocking: bool = False,
    **_: Any,
) -> Tensor:
    copy = torch.empty_like(tensor, dtype=dtype, device=device)
    return copy.copy_(tensor, non_blocking=non_blocking)


if __name__ in ("__main__", "__mp_main__"):  # the latter in a fork server, whose workers have the device, too
    lend()

if __name__ == "__main__":
    from rlsync.runs.cli.main import main

    multiprocessing.set_start_method("fork", force=True)
    sys.exit(main(sys.argv[1:]))
