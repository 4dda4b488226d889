"""Do the leaves that arrive act? Each is changed alone, and the outputs must move.

That the bytes of a version are in the module says nothing about what its outputs are computed from: a policy
may compute with a detached twin, a dict of tensors, or a weight that was packed at the first call.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from rlsync.core.plan import listed
from rlsync.sync.held import tensors_of
from rlsync.tensors.digest import digest
from rlsync.tensors.layout import LeafSpec
from rlsync.tensors.leaves import Leaves
from rlsync.tensors.parts import memory_of
from rlsync.tensors.target import Target, is_compiled

if TYPE_CHECKING:
    from tensordict import TensorDictBase

#: ``call(plain)``: what acts is called on one fixed input, without exploration; returns its outputs. The
#: input is the first of an episode, or if not ``plain`` one in its middle, without zeros in floating-point
#: numbers.
Call = Callable[[bool], Sequence[Tensor]]

_MANY = 24  #: with more leaves than this, gradients of one call speak for most of them
_AT_MOST = 200  #: calls after which leaves are not examined any more, where gradients do not speak for them


@dataclass(frozen=True, slots=True)
class Acting:
    """What workers found out about what they act with, before their first frame."""

    #: By destination: parameters on which no output depends.
    idle: Mapping[str, Sequence[str]] = field(default_factory=dict)
    #: By destination: why its leaves could not be examined.
    unknown: Mapping[str, str] = field(default_factory=dict)
    #: Tensors besides the leaves that shared memory with the learner, and are a worker's own now.
    owned: Sequence[str] = ()
    #: Whether the idle parameters would act if they were copied into the module's own memory.
    by_copy: bool = False
    #: By destination: what it computes with besides its leaves, see :func:`rlsync.sync.held.settings_of`.
    settings: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def is_idle(self, destination: str, leaf: str) -> bool:
        return leaf in self.idle.get(destination, ())

    def remarks(self) -> Iterator[str]:
        """What a reader of the plan should know."""
        for destination, why in self.unknown.items():
            yield f"whether the leaves of {destination} act was not examined: {why}"
        if self.owned:
            yield f"shared memory with the learner, and is the worker's own now: {listed(self.owned, 3)}"

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Acting:
        return cls(**json.loads(data))

    @classmethod
    def of_all(cls, workers: Iterable[Acting]) -> Acting:
        """What all workers found out; a leaf that is idle in one of them is idle."""
        idle: dict[str, dict[str, None]] = {}
        unknown: dict[str, str] = {}
        owned: dict[str, None] = {}
        settings: dict[str, dict[str, dict[str, None]]] = {}
        by_copy = True
        for worker in workers:
            for destination, names in worker.idle.items():
                idle.setdefault(destination, {}).update(dict.fromkeys(names))
            unknown |= worker.unknown
            owned |= dict.fromkeys(worker.owned)
            by_copy = by_copy and (worker.by_copy or not worker.idle)
            for destination, texts in worker.settings.items():
                for path, text in texts.items():
                    settings.setdefault(destination, {}).setdefault(path, {})[text] = None
        one = {d: tuple(names) for d, names in idle.items()}
        each = {d: {path: " or ".join(texts) for path, texts in of.items()} for d, of in settings.items()}
        return cls(one, unknown, tuple(owned), bool(idle) and by_copy, each)


def _speaking(call: Call, policy: nn.Module) -> Call:
    """The call, with the outputs of all parts of a policy that returns only a choice: choices often agree."""
    if any(output.dtype.is_floating_point for output in call(True)):
        return call

    def all_outputs(plain: bool) -> Sequence[Tensor]:
        outputs: list[Tensor] = []

        def keep(_: object, __: object, output: object) -> None:
            outputs.extend(tensor for _, tensor in tensors_of(output, ""))

        parts = (part for part in policy.modules() if not isinstance(part, torch.jit.ScriptModule))
        hooks = [part.register_forward_hook(keep) for part in parts]
        try:
            return [*call(plain), *outputs]
        finally:
            for hook in hooks:
                hook.remove()

    return all_outputs


def examined(
    modules: Mapping[str, nn.Module], call: Call, *, alias: Collection[str], within: nn.Module | None = None
) -> Acting:
    """Which leaves act, of destinations that are parts of ``within``; those in ``alias`` adopt by alias."""
    idle: dict[str, Sequence[str]] = {}
    unknown: dict[str, str] = {}
    by_copy = True
    parts = None if within is None else set(within.modules())
    for destination, module in modules.items():
        if parts is not None and module not in parts:
            unknown[destination] = "the policy does not contain it"
            continue
        try:
            with undisturbed(module if within is None else within), torch.no_grad():
                names, copied, why = _examined(
                    module, destination, call, alias=destination in alias, within=within
                )
        except Exception as error:  # noqa: BLE001 - the rollout will raise it, with more to say
            names, copied, why = (), False, f"a call of it raises {type(error).__name__}"
        if why:
            unknown[destination] = why
        if names:
            idle[destination], by_copy = names, by_copy and copied
    return Acting(idle, unknown, (), bool(idle) and by_copy)


def _examined(
    module: nn.Module, destination: str, call: Call, *, alias: bool, within: nn.Module | None
) -> tuple[tuple[str, ...], bool, str]:
    """The idle leaves of a destination, whether they would act by copy, and why nobody can tell."""
    speaking = _speaking(call, module if within is None else within)
    names, why = idle_leaves(module, destination, speaking, alias=alias)
    if speaking is not call and 0 < len(names) < sum(1 for _ in module.parameters()):
        return (), False, "the policy returns a choice alone, which few weights change"
    if not (names and alias):
        return names, False, why
    return names, not set(idle_leaves(module, destination, speaking, alias=False)[0]) & set(names), why


def idle_leaves(module: nn.Module, where: str, call: Call, *, alias: bool) -> tuple[tuple[str, ...], str]:
    """The parameters of ``module`` on which no output of ``call`` depends, or why nobody can tell. All
    parameters hold fixed numbers that are not zero, and one of them at a time holds others. Afterwards their
    memory and values are what they were; call it in :func:`undisturbed` for the rest.
    """
    wanted = [s for s in Leaves(module, where).specs() if s.kind == "parameter" and s.dtype.is_floating_point]
    specs = [spec for spec in wanted if spec.payload_bytes]
    if not specs:
        return (), ""
    # What packs a weight or caches it at its first call does so now, with the weights that are there.
    call = _repeated(call)
    with torch.no_grad():
        call(True)
        target = Target(module, where, specs)
        alias = alias and not is_compiled(module)
        with _own_values(target, alias=alias):
            probe = _Probe(target, specs, call, alias=alias)
            left = [i for i, spec in enumerate(specs) if not spec.tie]
            for plain, positive in ((True, False), (False, False), (False, True)):
                if left:
                    probe.begin(plain=plain, positive=positive)
                    if not probe.repeats():
                        return (), "two calls with the same weights and the same input give different outputs"
                    left = probe.still(probe.not_in_gradient(left))
    return tuple(specs[i].name for i in left), ""


def in_mid_episode(given: TensorDictBase) -> TensorDictBase:
    """An input of a policy as from the middle of an episode: see :data:`Call`."""
    for number, (key, value) in enumerate(list(given.items(True, True))):
        if isinstance(value, Tensor):
            given.set(key, mid_episode(value, number, is_init=key == "is_init"))
    return given


def mid_episode(value: Tensor, number: int = 0, *, is_init: bool = False) -> Tensor:
    """One tensor of such an input. Masks and numbers of a choice stay as they are. Tensors with other
    numbers have other values: a policy may subtract what it remembers from what it sees.
    """
    if is_init:
        return torch.zeros_like(value)
    if value.dtype.is_floating_point:
        values = torch.linspace(0.1 + number / 8, 1.0 + number / 4, max(1, value.numel()), device="cpu")
        return values.to(value)[: value.numel()].view(value.shape)
    if value.dtype is torch.uint8:  # pixels
        return (torch.arange(value.numel(), device=value.device) % 251 + 1).to(value.dtype).view(value.shape)
    return value


class _Probe:
    """Private values of a module's parameters, and what its outputs are with them."""

    def __init__(self, target: Target, specs: Sequence[LeafSpec], call: Call, *, alias: bool) -> None:
        self._specs, self._call = specs, call
        self._adopt = target.alias if alias else target.copy
        self._target = target
        self._calls = 0
        self._number = {spec.name: i for i, spec in enumerate(specs)}

    def begin(self, *, plain: bool, positive: bool) -> None:
        self._plain = plain
        owners = [self._number[spec.tie] if spec.tie else i for i, spec in enumerate(self._specs)]
        own = {i: _values(self._specs[i], i, positive=positive) for i in set(owners)}
        self._image = [own[i] for i in owners]
        self._owners = owners
        self._adopt(self._image)
        self._outputs = self._digest()

    def repeats(self) -> bool:
        return self._digest() == self._outputs

    def still(self, leaves: Sequence[int]) -> list[int]:
        """Those of the leaves that alone change no output. After so many calls the rest is taken to act."""
        if self._calls > _AT_MOST:
            return []
        if len(leaves) <= _MANY:
            return [leaf for leaf in leaves if not self._moves({leaf})]
        if not self._moves(set(leaves)):
            return list(leaves)
        middle = len(leaves) // 2
        return self.still(leaves[:middle]) + self.still(leaves[middle:])

    def _moves(self, leaves: set[int]) -> bool:
        """Whether the outputs are others with other values of these leaves alone."""
        # Larger ones, and larger still: a policy may report the largest of its weights, round, or choose.
        for times in (1, 2, 3):
            seed = times * len(self._specs)
            others = {i: _values(self._specs[i], seed + i, positive=False, by=8**times) for i in leaves}
            image = zip(self._owners, self._image, strict=True)
            self._adopt([others.get(owner, now) for owner, now in image])
            moved = self._digest() != self._outputs
            self._adopt(self._image)
            if moved:
                return True
        return False

    def not_in_gradient(self, leaves: Sequence[int]) -> list[int]:
        """The leaves for which the gradients of one call do not vouch; all, if there are only a few."""
        if len(leaves) <= _MANY:
            return list(leaves)
        live = self._target.live
        needed = [tensor.requires_grad for tensor in live]
        try:
            with torch.inference_mode(False), torch.enable_grad():
                for tensor in live:
                    tensor.requires_grad_(True)
                outputs = [o for o in self._call(self._plain) if o.requires_grad and o.is_floating_point()]
                parts = [live[i] for i in leaves]
                if not outputs:
                    return list(leaves)
                total = torch.stack([(o.double().square() + o.double()).sum() for o in outputs]).sum()
                grads = torch.autograd.grad(total, parts, allow_unused=True)
        except RuntimeError:  # a part that cannot be differentiated: the leaves are changed one by one
            return list(leaves)
        finally:
            for tensor, before in zip(live, needed, strict=True):
                tensor.requires_grad_(before)
        return [i for i, grad in zip(leaves, grads, strict=True) if grad is None or not bool(grad.any())]

    def _digest(self) -> int:
        self._calls += 1
        return digest(self._call(self._plain))


def _values(spec: LeafSpec, seed: int, *, positive: bool, by: int = 1) -> Tensor:
    """Fixed numbers for a leaf, none of them zero, as large as those of a network at its start, or ``by``
    times as large.
    """
    generator = torch.Generator().manual_seed(seed)
    size = torch.rand(spec.shape, generator=generator, device="cpu") / 2 + 0.5
    sign = torch.randint(0, 2, spec.shape, generator=generator, device="cpu") * 2 - 1
    inputs = max(1, size.numel() // spec.shape[0]) if spec.shape else 1
    scaled = size / inputs if positive else size * sign / inputs**0.5
    return (by * scaled).to(spec.dtype)


def _repeated(call: Call) -> Call:
    """The same call with the same random numbers each time."""
    numbers = _random_states()

    def again(plain: bool) -> Sequence[Tensor]:
        _set_random_states(numbers)
        return call(plain)

    return again


@contextmanager
def _own_values(target: Target, *, alias: bool) -> Iterator[None]:
    """Afterwards the target's parameters have the memory and the values that they had before."""
    held = [(tensor, tensor.data, None if alias else tensor.data.clone()) for tensor in target.live]
    try:
        yield
    finally:
        for tensor, memory, values in held:
            tensor.data = memory
            if values is not None:
                memory.copy_(values)


@contextmanager
def undisturbed(module: nn.Module) -> Iterator[None]:
    """Afterwards random numbers, and buffers and attributes of ``module``, are what they were."""
    numbers = _random_states()
    restores: list[Callable[[], object]] = []
    for part in module.modules():
        restores += [_kept(vars(part)), *map(_kept, vars(part).values()), *map(_kept, part._buffers.values())]
    try:
        yield
    finally:
        for restore in restores:
            restore()
        _set_random_states(numbers)


_GENERATOR = type(torch.default_generator)


def _kept(value: Any) -> Callable[[], object]:
    """What gives an attribute back the content that it has now."""
    match value:
        case dict():
            return partial(_refill, value, dict(value))
        case list():
            return partial(value.__setitem__, slice(None), list(value))
        case _ if isinstance(value, _GENERATOR):
            return partial(value.set_state, value.get_state())
        case Tensor() if not isinstance(value, nn.Parameter):
            return partial(_put_back, [(part, part.detach().clone()) for part in memory_of(value)])
    return lambda: None


def _refill(held: dict[str, Any], content: dict[str, Any]) -> None:
    held.clear()
    held.update(content)


@torch.no_grad()
def _put_back(held: Iterable[tuple[Tensor, Tensor]]) -> None:
    for tensor, values in held:
        if tensor.shape != values.shape or digest([tensor]) != digest([values]):
            tensor.data = values


def _random_states() -> tuple[Any, ...]:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    return torch.get_rng_state(), cuda, np.random.get_state(), random.getstate()


def _set_random_states(states: tuple[Any, ...]) -> None:
    torch.set_rng_state(states[0])
    if states[1] is not None:
        torch.cuda.set_rng_state_all(states[1])
    np.random.set_state(states[2])
    random.setstate(states[3])
