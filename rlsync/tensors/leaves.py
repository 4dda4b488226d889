"""Modules and tensordicts as named leaves: parameters, all buffers and extra state, with their ties.

Names are those of ``named_parameters``, without the prefixes that wrappers of torch add. A tensor that is
made of parts, as quantised weights are, has a leaf for each of them: ``net.weight.scale``.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from rlsync.core.errors import LayoutMismatch
from rlsync.tensors.layout import Kind, LeafSpec
from rlsync.tensors.parts import address, form_of, is_made_of_parts, part_names, part_of, with_parts
from rlsync.tensors.sharded import Sharding, is_sharded, own_part

if TYPE_CHECKING:
    from tensordict import TensorDictBase
    from tensordict.nn import TensorDictParams
    from typing_extensions import TypeIs


Content = TypeVar("Content")


def unwrap(module: nn.Module, where: str) -> nn.Module:
    """The module inside DDP, DataParallel, ``torch.compile``, activation checkpoints; FSDP 1 is refused."""
    while True:
        if isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            module = module.module
        elif is_compiled_wrapper(module):
            module = module._orig_mod  # type: ignore[assignment]
        elif _is_checkpoint_wrapper(module):
            module = module._checkpoint_wrapped_module  # type: ignore[assignment]
        else:
            break
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel):
        problem = "the module is sharded by FSDP 1, which hides its parameters"
        raise LayoutMismatch(
            problem, where, "shard it with FSDP 2 (torch.distributed.fsdp.fully_shard)"
        )
    return module


def is_compiled_wrapper(module: nn.Module) -> bool:
    """Whether ``module`` is what ``torch.compile(module)`` returns (no import of the compiler)."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return dynamo is not None and isinstance(module, dynamo.OptimizedModule)


def _is_checkpoint_wrapper(module: nn.Module) -> bool:
    """Whether ``module`` recomputes or offloads the activations of another one (no import of wrappers)."""
    wrappers = sys.modules.get("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
    return wrappers is not None and isinstance(module, wrappers.ActivationWrapper)


def uncompiled(name: str) -> str:
    """A leaf's name in a state dict, without the prefixes that others add.

    ``torch.compile`` and activation checkpoints add some.
    """
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


def check_has_plain_bytes(tensor: Tensor, name: str, where: str, *, shards: bool = False) -> None:
    """Refuse a tensor that cannot travel.

    Which is one that is sharded (without ``shards``), uninitialised, sparse, nested or quantized, or has no
    memory of its own.
    """
    # A sharded leaf is put together from the parts of its ranks, and has no memory to look at here.
    if is_sharded(tensor):
        if not shards:
            raise LayoutMismatch(
                f"{name} is sharded over ranks, and whole tensors are needed here",
                where,
                "shards can be the source of a map whose workers read a board; elsewhere gather it first "
                "(full_tensor, or a full state dict), and name the gathered module",
            )
        Sharding.of(tensor, name, where)  # refuses what cannot be put together
        if is_made_of_parts(own_part(tensor)):
            problem = f"{name} is sharded over ranks, and each shard is made of parts"
            raise LayoutMismatch(problem, where, "gather it first, and name the gathered module")
        return

    # What has no bytes, or other bytes than its shape and dtype say.
    if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
        problem = f"{name} is not initialised yet"
        raise LayoutMismatch(problem, where, "run the module once before you register the hook")
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        if tensor.is_nested:
            kind = "nested"
        elif tensor.is_quantized:
            kind = "quantized"
        else:
            kind = str(tensor.layout)
        raise LayoutMismatch(
            f"{name} is {kind}, which cannot be sent", where, f"make it dense, or {_APART}"
        )

    # What is computed when it is read: its memory, if it has some, holds other numbers.
    if tensor.numel() and not tensor.is_meta and not address(tensor):
        problem = (
            f"{name}, a {type(tensor).__name__}, has no memory of its own, which could be sent"
        )
        cure = f"give its class torch's protocol for tensors made of parts, __tensor_flatten__, or {_APART}"
        raise LayoutMismatch(problem, where, cure)
    if tensor.is_conj() or tensor.is_neg():
        problem = f"{name} is a view that changes the numbers in its memory"
        raise LayoutMismatch(
            problem, where, "give it memory of its own: resolve_conj() or resolve_neg()"
        )


#: How a policy keeps a tensor that is not sent. ``exclude`` would be too late: the first version is published
#: while the collector is made.
_APART = "keep it as a plain attribute: workers get it with the policy, and no publish brings it"


def is_tensordict(value: object) -> TypeIs[TensorDictBase]:
    """Whether ``value`` is a tensordict. While nobody has imported tensordict (seconds), nothing is one."""
    module = sys.modules.get("tensordict")
    return module is not None and isinstance(value, module.TensorDictBase)


def is_tensordict_params(value: object) -> TypeIs[TensorDictParams]:
    """Whether ``value`` is a module that holds a tensordict of parameters."""
    module = sys.modules.get("tensordict.nn")
    return module is not None and isinstance(value, module.TensorDictParams)


EXTRA_STATE = "_extra_state"


@dataclass(frozen=True, slots=True)
class Leaf:
    """One leaf, and how to read its live tensor."""

    name: str
    kind: Kind
    read: Callable[[], Tensor]
    path: str  #: its name with the prefixes of wrappers, by which torch finds it
    whole: str = ""  #: the name of the tensor that this is a part of


class Leaves:
    """The named leaves of a module (also inside wrappers), a tensordict, or a mapping such as a state dict.

    Those that ``shards`` lets be sharded are described as whole leaves. Raises LayoutMismatch, with
    ``where``, if a leaf is sharded, uninitialised, sparse or without memory, or extra state but neither
    tensor nor number.
    """

    def __init__(self, root: object, where: str, *, shards: bool = False) -> None:
        self.root = root
        self.where = where
        self._shards = shards
        #: modules with extra state, by the prefix of its leaf names
        self.extra: dict[str, nn.Module] = {}
        self._watch: list[tuple[Mapping[str, object], str, object]] = []
        self._lengths: list[tuple[Mapping[str, object], int]] = []
        self._present: list[tuple[Mapping[str, object], str]] = []
        self._wholes: dict[str, Leaf] = {}  # tensors that are made of parts
        self._forms: dict[str, str] = {}
        self.leaves: list[Leaf] = list(self._walk())
        self.names: list[str] = [leaf.name for leaf in self.leaves]
        self._readers = [leaf.read for leaf in self.leaves]
        if len(set(self.names)) < len(self.names):
            twice = next(name for name in self.names if self.names.count(name) > 1)
            problem = f"two leaves are called {twice!r}"
            raise LayoutMismatch(problem, self.where, "use names without dots in extra state")

    def _seen_through(self, module: nn.Module) -> tuple[nn.Module, str]:
        """The module inside wrappers, and the prefix of its path in them."""
        inner = unwrap(module, self.where)
        prefix = ""
        while module is not inner:
            children = _as_dict(module._modules)
            key, wrapped = next(iter(children.items()))
            self._watch.append((children, key, wrapped))
            module = cast("nn.Module", wrapped)
            prefix += f"{key}."
        return inner, prefix

    def _walk(self) -> Iterator[Leaf]:
        root = self.root
        if is_tensordict(root):
            yield from self._walk_tensordict(root, "", "")
        elif isinstance(root, nn.Module):
            inner, path = self._seen_through(root)
            yield from self._walk_module(inner, "", path)
        elif isinstance(root, Mapping):
            for name, tensor in flatten_state(root, "", self.where):
                yield from self._of(Leaf(name, _kind(tensor), partial(_constant, tensor), name))
        else:
            cure = "name an nn.Module, a tensordict, or a mapping of names to tensors"
            raise LayoutMismatch(f"{type(root).__name__} holds no weights", self.where, cure)

    def _walk_module(self, module: nn.Module, prefix: str, path: str) -> Iterator[Leaf]:
        if is_tensordict_params(module):
            yield from self._walk_tensordict(module, prefix, path)
            return
        stores: tuple[tuple[Kind, dict[str, Any]], ...] = (
            ("parameter", module._parameters),
            ("buffer", module._buffers),
        )
        for kind, store in stores:
            tensors = _as_dict(store)
            self._lengths.append((tensors, len(tensors)))
            for key, tensor in tensors.items():
                if tensor is None:
                    self._watch.append((tensors, key, None))
                else:
                    self._present.append((tensors, key))
                    read = partial(store.__getitem__, key)
                    yield from self._of(Leaf(prefix + key, kind, read, path + key))
        yield from self._walk_extra_state(module, prefix, path)
        children = _as_dict(module._modules)
        self._lengths.append((children, len(children)))
        for key, child in children.items():
            self._watch.append((children, key, child))
            if child is not None:
                inner, wrapped = self._seen_through(child)
                yield from self._walk_module(inner, f"{prefix}{key}.", f"{path}{key}.{wrapped}")

    def _walk_extra_state(self, module: nn.Module, prefix: str, path: str) -> Iterator[Leaf]:
        if type(module).get_extra_state is nn.Module.get_extra_state:
            return
        state = module.get_extra_state()
        stem = prefix + EXTRA_STATE
        self.extra[stem] = module
        for name, _ in flatten_state(state, stem, self.where):
            read = partial(_read_extra, module, stem, name, self.where)
            yield Leaf(name, "extra_state", read, path + name.removeprefix(prefix))

    def _walk_tensordict(self, td: TensorDictBase, prefix: str, path: str) -> Iterator[Leaf]:
        for key, value in td.items(include_nested=True, leaves_only=True):
            if not isinstance(value, Tensor):
                continue
            parts = list(key) if isinstance(key, tuple) else [key]
            for n, part in enumerate(parts):
                if part == "__extra_state__":
                    parts[n] = EXTRA_STATE
            name = ".".join(parts)
            kind = _kind(value)
            if EXTRA_STATE in name.split("."):
                kind = "extra_state"
            yield from self._of(Leaf(prefix + name, kind, partial(td.get, key), path + name))

    def _of(self, leaf: Leaf) -> Iterator[Leaf]:
        """The leaf of a tensor, or those of its parts."""
        tensor = leaf.read()
        if leaf.kind == "extra_state":
            parts = []
        else:
            parts = part_names(tensor)
        if not parts:
            yield leaf
            return
        self._wholes[leaf.name] = leaf
        self._forms[leaf.name] = form_of(tensor)
        for part in parts:
            read = partial(_read_part, leaf.read, part)
            yield Leaf(f"{leaf.name}.{part}", leaf.kind, read, f"{leaf.path}.{part}", leaf.name)

    def unchanged(self) -> bool:
        """Whether the module tree has the same modules and names as before. Takes about 50 ns an entry."""
        return (
            all(len(store) == n for store, n in self._lengths)
            and all(store.get(key, store) is child for store, key, child in self._watch)
            and all(store.get(key) is not None for store, key in self._present)
            and all(
                form_of(self._wholes[name].read()) == form for name, form in self._forms.items()
            )
        )

    @property
    def has_parts(self) -> bool:
        """Whether one of the tensors is made of parts."""
        return bool(self._wholes)

    def put_together(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors by the names of leaves become tensors by path, with whole ones in place of their parts."""
        paths = {leaf.name: leaf.path for leaf in self.leaves if not leaf.whole}
        together: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            if name in paths:
                together[paths[name]] = tensor
        for name, leaf in self._wholes.items():
            whole = leaf.read()
            parts = {part: tensors[f"{name}.{part}"] for part in part_names(whole)}
            together[leaf.path] = with_parts(whole, parts)
        return together

    def tensors(self) -> list[Tensor]:
        """The live tensors, in the order of the names."""
        return [read() for read in self._readers]

    def check_has_bytes(self) -> None:
        """Refuse (LayoutMismatch) leaves on the meta device: nothing can be copied from them."""
        for leaf in self.leaves:
            if leaf.read().is_meta:
                problem = f"{leaf.name} is on the meta device and has no bytes"
                raise LayoutMismatch(
                    problem, self.where, "give the module memory first: to_empty, then its weights"
                )

    def specs(self) -> list[LeafSpec]:
        """The present kind, shape and dtype of each leaf, and its tie by name."""
        first: dict[tuple[object, ...], str] = {}
        specs: list[LeafSpec] = []
        for leaf, tensor in zip(self.leaves, self.tensors(), strict=True):
            check_has_plain_bytes(tensor, leaf.name, self.where, shards=self._shards)
            if leaf.whole and leaf.read() is not tensor:
                problem = f"{leaf.name} is another tensor each time it is read"
                cure = "let __tensor_flatten__ name the attributes that hold the numbers"
                raise LayoutMismatch(problem, self.where, cure)
            tie = ""
            if tensor.numel():
                owner = first.setdefault(memory_key(tensor), leaf.name)
                if owner != leaf.name:
                    tie = owner
            spec = LeafSpec(
                leaf.name,
                leaf.kind,
                tuple(tensor.shape),
                tensor.dtype,
                tie,
                device=str(tensor.device),
                whole=self._forms.get(leaf.whole, ""),
            )
            specs.append(spec)
        return specs


def _kind(tensor: Tensor) -> Kind:
    """What a tensor of a tensordict or a state dict is taken for."""
    if isinstance(tensor, nn.Parameter):
        return "parameter"
    return "buffer"


def _as_dict(store: Mapping[str, Content]) -> dict[str, Content]:
    """What a module holds, by name. A traced module has no dict of it, and its tree is fixed."""
    if isinstance(store, dict):
        return store
    return dict(store.items())


def _read_extra(module: nn.Module, prefix: str, name: str, where: str) -> Tensor:
    return dict(flatten_state(module.get_extra_state(), prefix, where))[name]


def _constant(tensor: Tensor) -> Tensor:
    return tensor


def _read_part(read: Callable[[], Tensor], name: str) -> Tensor:
    return part_of(read(), name)


def memory_key(tensor: Tensor) -> tuple[object, ...]:
    """Equal for tensors with the same memory and form; of a sharded one, this process's part counts.

    One that has numbers and no memory, as tensors that are made of parts, is equal to itself alone.
    """
    pointer = 0 if tensor.is_meta else address(tensor)
    if not pointer and is_sharded(tensor):
        pointer = address(own_part(tensor))
    if not pointer and tensor.numel():
        return (id(tensor),)
    return (pointer, tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)


def flatten_state(state: object, prefix: str, where: str) -> Iterator[tuple[str, Tensor]]:
    """Flatten extra state or a state dict: nested mappings, sequences, tensors and numbers."""
    inside: Iterable[tuple[object, object]] = ()
    match state:
        case None:
            return
        case Tensor():
            yield prefix, state
        case float():
            yield prefix, torch.tensor(state, dtype=torch.float64, device="cpu")
        case bool() | int():
            yield prefix, torch.tensor(state, device="cpu")
        case _ if isinstance(state, Mapping) or is_tensordict(state):
            inside = state.items()
        case list() | tuple():
            inside = enumerate(state)
        case _:
            problem = (
                f"{prefix or 'the mapping'} holds a {type(state).__name__}, which cannot be sent"
            )
            cure = "keep tensors and numbers in extra state, or exclude the leaf in the route"
            raise LayoutMismatch(problem, where, cure)
    for key, value in inside:
        name = f"{prefix}.{key}" if prefix else str(key)
        yield from flatten_state(value, name, where)


def rebuild_state(template: Any, prefix: str, leaves: Mapping[str, Tensor]) -> Any:
    """The inverse of :func:`flatten_state`: ``template`` with the values of ``leaves``; others stay."""
    match template:
        case Tensor():
            if prefix in leaves:
                return leaves[prefix].to(template.dtype, copy=True)
            return template
        case bool() | int() | float():
            if prefix in leaves:
                return type(template)(leaves[prefix].item())
            return template
        case _ if isinstance(template, Mapping) or is_tensordict(template):
            rebuilt: Any = copy.copy(template)
            for key, value in template.items():
                rebuilt[key] = rebuild_state(value, f"{prefix}.{key}", leaves)
            return rebuilt
        case list() | tuple():
            values = []
            for i, value in enumerate(template):
                values.append(rebuild_state(value, f"{prefix}.{i}", leaves))
            named = isinstance(template, tuple) and type(template) is not tuple
            if named:
                return type(template)(*values)
            return type(template)(values)
    return template
