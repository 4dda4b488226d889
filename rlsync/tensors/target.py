"""The destination: a module whose leaves an adoption overwrites or points to other memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from rlsync.core.errors import LayoutMismatch
from rlsync.tensors.device import Lanes, Moment, all_on_cpu, is_queued, queued_devices
from rlsync.tensors.layout import LeafSpec
from rlsync.tensors.leaves import (
    Leaves,
    is_compiled_wrapper,
    is_tensordict_params,
    memory_key,
    rebuild_state,
)
from rlsync.tensors.parts import memory_of, remade


class Target:
    """Where an adoption writes: tensors that were live when this was made; ask :meth:`current` before."""

    def __init__(self, module: object, where: str, leaves: Sequence[LeafSpec]) -> None:
        self.module = module
        self.where = where
        self.leaves = Leaves(module, where)
        have = {spec.name: spec for spec in self.leaves.specs()}
        arriving = {leaf.name for leaf in leaves}
        for leaf in leaves:
            _check_fits(leaf, have.get(leaf.name), arriving, where)

        # What arrives is known by its number from here on.
        readers = {leaf.name: leaf.read for leaf in self.leaves.leaves}
        self._names: list[str] = []
        self._ties: list[str] = []
        self._readers: list[Callable[[], Tensor]] = []
        self._parameters: list[int] = []
        self._buffers: list[int] = []
        for i, leaf in enumerate(leaves):
            self._names.append(leaf.name)
            self._ties.append(leaf.tie)
            self._readers.append(readers[leaf.name])
            kind = have[leaf.name].kind
            if kind == "parameter":
                self._parameters.append(i)
            elif kind == "buffer":
                self._buffers.append(i)
        self._live = [read() for read in self._readers]
        self._devices = [tensor.device for tensor in self._live]
        self._extra = _arriving(self.leaves, arriving)

        # A buffer's memory is written to, so that a parameter with the same memory cannot be read-only.
        written = {memory_key(self._live[i]) for i in self._buffers}
        self._pointed: list[int] = []
        self._swapped: list[int] = []
        self._rest: list[int] = []
        for i in self._parameters:
            tensor = self._live[i]
            if tensor.is_cpu and memory_key(tensor) not in written:
                self._pointed.append(i)
            elif is_queued(tensor.device):
                self._swapped.append(i)
            else:
                self._rest.append(i)
        self._rest += self._buffers

        self._pointed_live = [self._live[i] for i in self._pointed]
        self._counted = [tensor for tensor in self._pointed_live if not tensor.is_inference()]
        self._lanes = Lanes()
        self._spare: Spare | None = None  # made when it is needed: it is as large as the parameters

    def current(self) -> bool:
        """Whether the module still holds the parameters and buffers that it had, on the same devices."""
        return (
            self.leaves.unchanged()
            and all(self._readers[i]() is self._live[i] for i in self._parameters + self._buffers)
            and all_on_cpu(self._pointed_live)  # .to() may keep the objects, and move them
            and all(self._live[i].device == self._devices[i] for i in self._swapped)
        )

    @property
    def live(self) -> list[Tensor]:
        """The parameters and buffers that it writes to."""
        return [self._live[i] for i in self._parameters + self._buffers]

    def alias(self, views: Sequence[Tensor]) -> bool:
        """Point parameters at ``views``, copy the rest; returns whether ``views`` are read from now on."""
        for i in self._pointed:
            self._live[i].data = views[i]
        # .data does not: what is keyed on the version would be out of date
        increment_version(self._counted)
        if self._swapped:
            self._swap_in(views)
        self._copy(views, self._rest)
        self._set_extra_state(views)
        return bool(self._pointed)

    def copy(self, views: Sequence[Tensor]) -> None:
        """Copy all leaves from ``views`` into the module's own memory."""
        self._copy(views, self._parameters + self._buffers)
        self._set_extra_state(views)

    def own(self) -> None:
        """Give every parameter that is pointed at views its own memory, with the same values."""
        for i in self._pointed:
            self._live[i].data = self._live[i].data.clone()

    def _swap_in(self, views: Sequence[Tensor]) -> None:
        if self._spare is None:
            live: list[Tensor] = []
            owners: list[int] = []
            number_of: dict[str, int] = {}
            for number, i in enumerate(self._swapped):
                live.append(self._live[i])
                # a tie is to an earlier leaf
                owners.append(number_of.get(self._ties[i], number))
                number_of[self._names[i]] = number
            self._spare = Spare(live, owners)
        self._spare.swap_in([views[i] for i in self._swapped])

    @torch.no_grad()
    def _copy(self, views: Sequence[Tensor], which: Sequence[int]) -> None:
        live = [_written(self._live[i]) for i in which]
        arrived = [views[i] for i in which]
        if live and all(is_queued(tensor.device) for tensor in live):
            done = self._lanes.copy(live, arrived)
            done.order()
            done.wait()
        elif live:
            torch._foreach_copy_(live, arrived)

    def _set_extra_state(self, views: Sequence[Tensor]) -> None:
        if self._extra:  # the dictionary below costs more
            _set_extra_state(self._extra, dict(zip(self._names, views, strict=True)))


class Spare:
    """A second set of the ``live`` parameters on accelerators.

    A version goes into the set that does not act, and then they change places. ``owners`` has for each the
    number of the one whose memory it has.
    """

    def __init__(self, live: Sequence[Tensor], owners: Sequence[int]) -> None:
        self._live = live
        self._owners = owners
        self._own = sorted(set(owners))
        self._devices = queued_devices(live)
        self._lanes = Lanes()
        self._set = {i: torch.empty_like(live[i].data) for i in self._own}
        # Nothing that is queued after this moment reads the spare set.
        self._unread = Moment.now(self._devices)

    def swap_in(self, views: Sequence[Tensor]) -> None:
        """Copy ``views``, which are not read afterwards, into the spare set, and let that set act."""
        own_views = [views[i] for i in self._own]
        # The set has its tensors in the order of ``_own``.
        arrived = self._lanes.copy(list(self._set.values()), own_views, self._unread)
        arrived.wait()
        acted = {i: self._live[i].data for i in self._own}
        for tensor, owner in zip(self._live, self._owners, strict=True):
            tensor.data = self._set[owner]
        increment_version([tensor for tensor in self._live if not tensor.is_inference()])
        self._set = acted
        self._unread = Moment.now(self._devices)


@torch.no_grad()
def write(leaves: Leaves, arrived: Mapping[str, Tensor]) -> None:
    """Copy each tensor of ``arrived`` into the leaf of the same name, cast to the leaf's dtype."""
    mine: list[Tensor] = []
    theirs: list[Tensor] = []
    for leaf in leaves.leaves:
        if leaf.kind != "extra_state" and leaf.name in arrived:
            mine.append(_written(leaf.read()))
            theirs.append(arrived[leaf.name])
    if mine:
        torch._foreach_copy_(mine, theirs)
    _set_extra_state(_arriving(leaves, arrived), arrived)


def _written(tensor: Tensor) -> Tensor:
    """What a copy into a live tensor is written to: itself, so that autograd counts the write."""
    if tensor.is_inference():
        return tensor.data
    return tensor


def _arriving(leaves: Leaves, arrived: Iterable[str]) -> dict[str, nn.Module]:
    """The modules of whose extra state something arrives, by its prefix."""
    if not leaves.extra:
        return {}
    dotted = [f"{name}." for name in arrived]
    modules = {}
    for prefix, module in leaves.extra.items():
        if any(name.startswith(f"{prefix}.") for name in dotted):
            modules[prefix] = module
    return modules


def _set_extra_state(extra: Mapping[str, nn.Module], arrived: Mapping[str, Tensor]) -> None:
    for prefix, module in extra.items():
        module.set_extra_state(rebuild_state(module.get_extra_state(), prefix, arrived))


def _check_fits(leaf: LeafSpec, have: LeafSpec | None, arriving: set[str], where: str) -> None:
    if have is None:
        cure = "build the worker's module from the same constructor as the learner's"
        raise LayoutMismatch(f"{where} has no leaf {leaf.name!r}", where, cure)
    if have.shape != leaf.shape or have.dtype != leaf.dtype:
        raise LayoutMismatch(
            f"{leaf.name}: {leaf.dtype_name}{list(leaf.shape)} arrives, "
            f"the module has {have.dtype_name}{list(have.shape)}",
            where,
            "build the worker's module from the same constructor as the learner's",
        )
    if have.tie in arriving and not leaf.tie:
        problem = f"{leaf.name} is tied to {have.tie} at the destination, but not at the source"
        raise LayoutMismatch(problem, where, "tie the leaves on both sides, or on neither")


def is_compiled(module: object) -> bool:
    """Whether a part of ``module`` runs compiled code, which does not see a re-pointed ``.data``."""
    if not isinstance(module, nn.Module):
        return False
    for part in module.modules():
        if is_compiled_wrapper(part):
            return True
        if part._compiled_call_impl is not None:  # by module.compile()
            return True
    return False


def forget_memory(module: nn.Module) -> None:
    """Move the parameters and buffers to the meta device, and the parts of those that are made of parts."""
    module._apply(lambda tensor: remade(tensor, lambda part: part.to("meta")))


def materialise(module: nn.Module) -> None:
    """Give meta parameters and buffers CPU memory with undefined values. Ties between them are kept."""
    replacements: dict[int, Tensor] = {}

    def replacement(tensor: Tensor) -> Tensor:
        if id(tensor) not in replacements:
            replacements[id(tensor)] = _materialised(tensor)
        return replacements[id(tensor)]

    for owner in list(module.modules()):
        if is_tensordict_params(owner):
            # Its stores are made from a tensordict, which moves what it gets to its device: here the meta device.
            # tensordict 0.14 clears that of the outer object alone.
            owner._param_td.clear_device_()
            with owner.unlock_():
                for path, tensor in list(owner.items(include_nested=True, leaves_only=True)):
                    if _lacks_memory(tensor):
                        owner.set(path, replacement(tensor))
            continue
        for store in (owner._parameters, owner._buffers):
            for key, tensor in list(store.items()):
                if _lacks_memory(tensor):
                    setattr(owner, key, replacement(tensor))


def _materialised(tensor: Tensor) -> Tensor:
    empty = remade(tensor, _with_memory)
    match tensor:
        case nn.Parameter():
            return nn.Parameter(empty, requires_grad=tensor.requires_grad)
        case nn.Buffer():
            return nn.Buffer(empty)
    return empty


def _lacks_memory(value: object) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and any(part.is_meta for part in memory_of(value))


def _with_memory(part: Tensor) -> Tensor:
    if part.is_meta:
        return torch.empty(part.shape, dtype=part.dtype, device="cpu")
    return part
