"""What a policy holds besides its leaves: tensors, numbers and modes, and memory of the learner."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from types import CellType, FunctionType, MethodType

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from rlsync.core.plan import BATCH_STATISTICS, DROPS
from rlsync.tensors.device import Covered
from rlsync.tensors.digest import digest
from rlsync.tensors.leaves import is_tensordict, is_tensordict_params, unwrap
from rlsync.tensors.parts import part_names, part_of
from rlsync.tensors.sharded import is_sharded

#: What every module has, besides ``training``: stores, hooks and marks of torch's own.
OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"}


@torch.no_grad()
def own_shared_memory(acts: object, name: str) -> list[str]:
    """Give what ``acts`` holds besides its leaves memory of this process, where the sender shares it.

    Returns the names of the tensors that were copied.
    """
    leaves = set()
    if isinstance(acts, nn.Module):
        for _, leaf in tensors_of([*acts.parameters(), *acts.buffers()], ""):
            leaves.add(id(leaf))
    memory: dict[int, torch.UntypedStorage] = {}
    copied = []
    for path, tensor in tensors_of(acts, name):
        if id(tensor) in leaves or not tensor.is_cpu or not tensor.numel():
            continue
        if not tensor.is_shared():
            continue
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in memory:
            memory[storage.data_ptr()] = storage.clone()
        place = tensor.storage_offset(), tensor.shape, tensor.stride()
        empty = torch.empty(0, dtype=tensor.dtype, device="cpu")
        tensor.data = empty.set_(memory[storage.data_ptr()], *place)
        copied.append(path)
    return copied


def tensors_of(acts: object, name: str) -> Iterator[tuple[str, Tensor]]:
    """All tensors that an object holds in modules, containers, functions and their closures, by path."""
    for path, value in _held_by(acts, name):
        if isinstance(value, Tensor):
            yield path, value


def settings_of(module: object, where: str) -> dict[str, str]:
    """What a module computes with besides its leaves: numbers, modes and digests of tensors, by path."""
    if not isinstance(module, nn.Module) or is_tensordict_params(module):
        return {}
    root = unwrap(module, where)
    leaves = Covered((*root.parameters(), *root.buffers()))
    settings: dict[str, str] = {}
    for path, value in _held_by(root, ""):
        if OF_EVERY_MODULE.isdisjoint(re.split(r"[.\[]", path)):
            if not isinstance(value, Tensor):
                settings[path[1:]] = repr(value)
            # A template on the meta device, as TorchRL's TdMpc2QEnsemble holds one, has no numbers.
            elif (
                not value.is_meta
                and value.numel()
                and value not in leaves
                and not is_sharded(value)
            ):
                settings[path[1:]] = f"{value.dtype} {digest([value]):x}"
    for path, part in root.named_modules():
        if isinstance(part, _DropoutNd):
            drops = part.p if part.training else 0
            settings[f"{path}{DROPS}".removeprefix(".")] = str(drops)
        if _takes_batch_statistics(part):
            settings[f"{path}{BATCH_STATISTICS}".removeprefix(".")] = type(part).__name__
    return settings


def _takes_batch_statistics(part: nn.Module) -> bool:
    """Whether a layer normalises by the statistics of the batch at hand, in its present mode."""
    torchrl = sys.modules.get("torchrl.modules")
    if torchrl is not None and isinstance(part, torchrl.BatchRenorm1d):
        return part.training
    # Layers of InstanceNorm are none: they take the statistics of each row alone.
    return isinstance(part, _BatchNorm) and (part.training or part.running_mean is None)


def unlike(
    theirs: Mapping[str, str], prefix: str, source: object, where: str
) -> Iterator[tuple[str, str]]:
    """Each setting below a prefix that differs from the source's, in words; modes: outermost only."""
    if not theirs:
        return
    dotted = f"{prefix}." if prefix else ""
    mine = settings_of(source, where)
    differing = {path for path, text in mine.items() if theirs.get(dotted + path, text) != text}
    for path in sorted(differing):
        module, _, name = path.rpartition(".")
        outer = f"{module.rpartition('.')[0]}.training".lstrip(".")
        if name == "training" and path != outer and outer in differing:
            continue
        if mine[path].startswith("torch."):  # the digest of a tensor
            yield path, "has other numbers in the workers"
        else:
            yield path, f"is {theirs[dotted + path]} in the workers and {mine[path]} in the learner"


def _held_by(  # noqa: C901 - a case for each kind
    acts: object, name: str
) -> Iterator[tuple[str, Tensor | bool | float]]:
    """All tensors and numbers of an object, by path."""
    visited: set[int] = set()
    stack: list[tuple[str, object]] = [(name, acts)]
    while stack:
        path, value = stack.pop()
        if isinstance(value, bool | int | float):  # equal ones are one object
            yield path, value
            continue
        if id(value) in visited:
            continue
        visited.add(id(value))

        # Each kind pushes what it holds; the tensors are found where nothing more is held.
        match value:
            case Tensor() if names := part_names(value):
                stack += [(f"{path}.{name}", part_of(value, name)) for name in names]
            case Tensor():
                yield path, value
            case dict():
                stack += [(f"{path}[{key!r}]", item) for key, item in value.items()]
            case list() | tuple() | set() | frozenset():
                stack += [(f"{path}[{number}]", item) for number, item in enumerate(value)]

            # functions, with what they are bound to and close over
            case partial():
                stack += [(path, value.func), (path, value.args), (path, value.keywords)]
            case MethodType():
                stack += [(path, value.__func__), (path, value.__self__)]
            case FunctionType():
                cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
                stack += [(f"{path}.{variable}", cell) for variable, cell in cells]
                stack += [(path, value.__defaults__), (path, value.__kwdefaults__)]
            case CellType():
                if value != CellType():
                    stack.append((path, value.cell_contents))

            # modules, whose attributes are in stores, too
            case nn.Module():
                attributes = {
                    **vars(value),
                    **value._parameters,
                    **value._buffers,
                    **value._modules,
                }
                for key, item in attributes.items():
                    if key not in _STORES:
                        stack.append((f"{path}.{key}", item))
            case _ if is_tensordict(value):
                stack += [(f"{path}[{key!r}]", item) for key, item in value.items(True, True)]


_STORES = ("_parameters", "_buffers", "_modules")
