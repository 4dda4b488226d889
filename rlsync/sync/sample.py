"""What a worker's policy computes: recorded in one more call, for the learner to compare.

A worker that is asked makes one more call of its policy in its rollout, without exploration, on a copy of the
present input. It leaves a sample: inputs and outputs of the policy's parts, their modes, and the leaves
that no version brings.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from rlsync.sync.acts import undisturbed
from rlsync.sync.held import OF_EVERY_MODULE
from rlsync.tensors.derived import keepers, outdate
from rlsync.tensors.digest import digest
from rlsync.tensors.layout import dtype_name, dtype_named
from rlsync.tensors.leaves import Leaves, is_tensordict, is_tensordict_params, unwrap
from rlsync.transport.contract import Note, Subscriber
from rlsync.transport.rules import Key

Image = Mapping[Key, Tensor]  #: the leaves of a version

_SAMPLE_BYTES = 900_000  #: a sample must fit into a note; see ``NOTE_BYTES`` of the board
_PARTS = 48  #: of so many parts of a policy, the outermost first, calls are recorded
#: A sample is of one of so many calls at the beginning of a rollout: episodes may begin where rollouts do.
_CALLS = 7


@dataclass(frozen=True, slots=True)
class Shadow:
    """One more call of what acts."""

    policy: nn.Module  #: all that the call may change
    modules: Mapping[str, nn.Module]  #: by destination
    #: On a copy of the present input, without exploration. Returns input and output, if it has one of each.
    call: Callable[[], tuple[object, object] | None]
    #: Calls its argument before each call of the policy in the block.
    before_calls: Callable[[Callable[[], None]], AbstractContextManager[None]]
    why_not: str = ""  #: why it cannot be called
    compiled: bool = False  #: whether its parts cannot be looked into


@dataclass(slots=True)
class PartCall:
    """One call of a part of a policy, its arguments and outputs as :class:`Sample` stores them."""

    destination: str
    module: str  #: its path below the destination; empty for the destination itself
    args: list[Any]
    outs: Any = None

    def is_within(self, other: PartCall) -> bool:
        if self.destination != other.destination or self.module == other.module:
            return False
        return not other.module or self.module.startswith(other.module + ".")


@dataclass(slots=True)
class Sample:
    """What a worker's policy computed in one call. Tensors are stored once, and named by their number."""

    asked: int
    version: int
    why_not: str = ""
    spent_s: float = 0.0  #: what the call and its record took
    calls: list[PartCall] = field(default_factory=list)
    held: dict[str, dict[str, int]] = field(default_factory=dict)  #: leaves that no version brings
    #: which parts were in training mode
    modes: dict[str, dict[str, bool]] = field(default_factory=dict)
    #: By destination, part and name: attributes that the call changed, as they were before; None: not there.
    memory: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    tensors: list[Tensor] = field(default_factory=list)
    _known: dict[tuple[Any, ...], int] = field(default_factory=dict)

    def put(self, value: object) -> Any:
        """Store what a part was given, returned or keeps.

        TypeError if it holds anything but tensors, numbers and texts.
        """
        if value is None or isinstance(value, bool | int | float | str):
            return {"is": value}
        if isinstance(value, Tensor):
            plain = value.detach().to("cpu", copy=True).contiguous()
            key = (digest([plain]), plain.dtype, plain.shape)
            if key not in self._known:
                self._known[key] = len(self.tensors)
                self.tensors.append(plain)
            return self._known[key]
        if is_tensordict(value):
            items = []
            for key, item in value.items(True, True):
                if isinstance(item, Tensor):
                    items.append([key, self.put(item)])
            return {"batch": list(value.batch_size), "items": items}
        if isinstance(value, tuple):
            return [self.put(item) for item in value]
        if isinstance(value, list):
            return {"list": [self.put(item) for item in value]}
        if isinstance(value, dict):
            return {"dict": [[self.put(key), self.put(item)] for key, item in value.items()]}
        raise TypeError(type(value).__name__)

    def get(
        self,
        stored: Any,
        device: torch.device,
        cast: Mapping[torch.dtype, torch.dtype] | None = None,
    ) -> Any:
        """The inverse of :meth:`put`, on a device; ``cast`` changes dtypes."""
        match stored:
            case int():
                tensor = self.tensors[stored]
                dtype = tensor.dtype
                if cast is not None:
                    dtype = cast.get(dtype, dtype)
                return tensor.to(device, dtype, copy=True)
            case list():
                return tuple(self.get(item, device, cast) for item in stored)
            case {"list": items}:
                return [self.get(item, device, cast) for item in items]
            case {"dict": items}:
                return {self.get(key, device): self.get(item, device, cast) for key, item in items}
            case {"is": value}:
                return value
        from tensordict import TensorDict

        td = TensorDict({}, stored["batch"], device=device)
        for key, item in stored["items"]:
            if isinstance(key, list):
                key = tuple(key)
            td.set(key, self.get(item, device, cast))
        return td

    def to_bytes(self) -> bytes:
        """Packed; if too large for a note without calls inside others, or with a reason in place of calls."""
        if sum(tensor.nbytes for tensor in self.tensors) > _SAMPLE_BYTES:
            outer = self._of_outer_calls()
            if len(outer.calls) < len(self.calls):
                return outer.to_bytes()
            why_not = "inputs and outputs are larger than a note"
            return Sample(self.asked, self.version, why_not, self.spent_s).to_bytes()
        head: dict[str, Any] = {
            "asked": self.asked,
            "version": self.version,
            "why_not": self.why_not,
            "spent_s": self.spent_s,
            "held": self.held,
            "modes": self.modes,
            "memory": self.memory,
            "calls": [[c.destination, c.module, c.args, c.outs] for c in self.calls],
            "tensors": [],
        }
        body = bytearray()
        for tensor in self.tensors:
            head["tensors"].append([dtype_name(tensor.dtype), list(tensor.shape)])
            body += tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        return b"\n".join([json.dumps(head).encode(), body])

    def _of_outer_calls(self) -> Sample:
        """Calls inside others are compared only where the outer ones draw random numbers."""
        outer = Sample(self.asked, self.version, spent_s=self.spent_s, modes=self.modes)
        cpu = torch.device("cpu")
        for destination, numbers in self.held.items():
            outer.held[destination] = {}
            for name, number in numbers.items():
                outer.held[destination][name] = outer.put(self.tensors[number])
        for destination, parts in self.memory.items():
            for path, attributes in parts.items():
                of_part = outer.memory.setdefault(destination, {}).setdefault(path, {})
                for name, stored in attributes.items():
                    if stored is None:
                        of_part[name] = None
                    else:
                        of_part[name] = outer.put(self.get(stored, cpu))
        for call in outermost(self.calls):
            args = outer.put(self.get(call.args, cpu))
            outs = outer.put(self.get(call.outs, cpu))
            outer.calls.append(PartCall(call.destination, call.module, args, outs))
        return outer

    @classmethod
    def from_bytes(cls, data: bytes) -> Sample:
        text, _, body = data.partition(b"\n")
        head = json.loads(text)
        sample = cls(head["asked"], head["version"], head["why_not"], head["spent_s"])
        sample.calls = [PartCall(*call) for call in head["calls"]]
        sample.held = head["held"]
        sample.modes = head["modes"]
        sample.memory = head["memory"]
        at = 0
        for dtype, shape in head["tensors"]:
            empty = torch.empty(shape, dtype=dtype_named(dtype), device="cpu")
            size = empty.numel() * empty.element_size()
            if size:
                flat = torch.frombuffer(bytearray(body[at : at + size]), dtype=torch.uint8)
                empty = flat.view(empty.dtype).view(shape)
            sample.tensors.append(empty)
            at += size
        return sample


def outermost(calls: Sequence[PartCall]) -> list[PartCall]:
    return [call for call in calls if not any(map(call.is_within, calls))]


@contextmanager
def sampling(
    shadow: Shadow,
    asked: int,
    version: int,
    arrive: Callable[[str], Iterable[str]],
    subscriber: Subscriber,
) -> Iterator[None]:
    """Leave a sample of one call in the rollout of the block, of another one for each question."""
    before = asked % _CALLS
    is_left = False

    def leave() -> None:
        nonlocal is_left
        is_left = True
        began = time.perf_counter()
        sample = sample_of(shadow, asked, version, arrive)
        sample.spent_s = time.perf_counter() - began
        subscriber.leave_note(sample.to_bytes(), Note.SAMPLE)

    def look() -> None:
        nonlocal before
        if not is_left and before == 0:
            leave()
        before -= 1

    with shadow.before_calls(look):
        yield
    if not is_left:
        leave()


def sample_of(
    shadow: Shadow, asked: int, version: int, arrive: Callable[[str], Iterable[str]]
) -> Sample:
    """Call what acts once more, and record it. ``arrive`` names the leaves that versions bring."""
    sample = Sample(asked, version, shadow.why_not)
    if shadow.why_not:
        return sample
    with undisturbed(shadow.policy), torch.no_grad():
        for destination, module in shadow.modules.items():
            _put_state(sample, module, destination, set(arrive(destination)))

        # As right after an adoption: what earlier steps computed, as keys and values, the learner lacks.
        outdate(keepers([shadow.policy, *shadow.modules.values()]))
        recorded = {} if shadow.compiled else shadow.modules
        with _remembering(sample, shadow.modules), _recording(sample, recorded):
            acted = shadow.call()
        if acted is None:
            return sample

        # Compiled code calls no hooks: then the policy is compared as a whole.
        observation, action = acted
        policy = unwrap(shadow.policy, "policy")
        called = {call.destination for call in sample.calls}
        for destination, module in shadow.modules.items():
            if destination not in called and unwrap(module, destination) is policy:
                args = sample.put(selected(policy, observation, "in_keys"))
                outs = sample.put(selected(policy, action, "out_keys"))
                sample.calls.append(PartCall(destination, "", [args], outs))
    return sample


def _put_state(sample: Sample, module: nn.Module, destination: str, brought: set[str]) -> None:
    """Put the leaves of a module that no version brings into a sample, and the modes of its parts."""
    sample.held[destination] = {}
    for leaf in Leaves(module, destination).leaves:
        if leaf.kind == "extra_state" or (leaf.kind == "parameter" and leaf.name in brought):
            continue
        sample.held[destination][leaf.name] = sample.put(leaf.read())
    sample.modes[destination] = {}
    for path, part in unwrap(module, destination).named_modules():
        sample.modes[destination][path] = part.training


@contextmanager
def _remembering(sample: Sample, modules: Mapping[str, nn.Module]) -> Iterator[None]:
    """Put the attributes that the block changes into a sample, as they were before: what modules remember."""
    both = Sample(sample.asked, sample.version)  # equal values have equal numbers in it
    before: dict[str, dict[tuple[str, str], Any]] = {}
    for destination, module in modules.items():
        before[destination] = _attributes(both, module, destination)
    yield
    cpu = torch.device("cpu")
    for destination, module in modules.items():
        for (path, name), after in _attributes(both, module, destination).items():
            stored = before[destination].get((path, name))
            if stored == after:
                continue
            value = None
            if stored is not None:
                value = sample.put(both.get(stored, cpu))
            sample.memory.setdefault(destination, {}).setdefault(path, {})[name] = value


def _attributes(sample: Sample, module: nn.Module, where: str) -> dict[tuple[str, str], Any]:
    """The attributes of a module's parts that a sample can store, by part and name."""
    stored = {}
    for path, part in unwrap(module, where).named_modules():
        for name, value in vars(part).items():
            if name not in OF_EVERY_MODULE and name != "training":
                # other objects, and tensors without plain bytes
                with suppress(TypeError, RuntimeError):
                    stored[path, name] = sample.put(value)
    return stored


@contextmanager
def _recording(sample: Sample, modules: Mapping[str, nn.Module]) -> Iterator[None]:
    """Put the calls in the block of the outer parts of some modules into a sample.

    Of those parts that were called exactly once, and whose arguments could be stored.
    """
    of_parts: list[list[PartCall | None]] = []
    with ExitStack() as hooks:
        for destination, module in modules.items():
            parts = unwrap(module, destination).named_modules()
            outermost_first = sorted(parts, key=lambda named: named[0].count("."))
            for name, part in outermost_first[:_PARTS]:
                if isinstance(part, torch.jit.ScriptModule) or is_tensordict_params(part):
                    continue
                of_parts.append([])
                before, after = _hooks(sample, destination, name, of_parts[-1])
                hooks.enter_context(part.register_forward_pre_hook(before, with_kwargs=True))
                hooks.enter_context(part.register_forward_hook(after))
        yield
    sample.calls = [calls[0] for calls in of_parts if len(calls) == 1 and calls[0] is not None]


def _hooks(
    sample: Sample, destination: str, name: str, calls: list[PartCall | None]
) -> tuple[Callable[..., None], Callable[..., None]]:
    """What appends each call of a part to ``calls``, before it and after it; None if it cannot be stored."""

    def before(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        try:
            if kwargs:
                raise TypeError("keyword arguments")
            stored = [sample.put(selected(module, arg, "in_keys")) for arg in args]
            calls.append(PartCall(destination, name, stored))
        except TypeError:
            calls.append(None)

    def after(module: nn.Module, _: object, outs: object) -> None:
        call = calls[-1]
        try:
            if call is not None:
                call.outs = sample.put(selected(module, outs, "out_keys"))
        except TypeError:
            calls[-1] = None

    return before, after


def selected(module: nn.Module, value: object, keys: str) -> object:
    """Of a tensordict, what a TensorDictModule says that it reads or writes."""
    if not is_tensordict(value):
        return value
    from tensordict.nn import TensorDictModuleBase

    if not isinstance(module, TensorDictModuleBase):
        return value
    if keys == "in_keys":
        return value.select(*module.in_keys, strict=False)
    return value.select(*module.out_keys, strict=False)


@dataclass(frozen=True, slots=True)
class Judgement:
    """How a sample compares with what the learner's modules compute."""

    wrong: tuple[str, ...] = ()  #: what differs, in words; by destination
    held: int = 0  #: parts that computed the same, and something else with other weights
    powerless: tuple[str, ...] = ()  #: destinations for which other weights give the same
    uncompared: tuple[str, ...] = ()  #: what was not compared, and why

    @property
    def untold(self) -> tuple[str, ...]:
        """Of what nothing can be said, and why."""
        powerless = [f"{part} gives the same with other weights" for part in self.powerless]
        return (*self.uncompared, *powerless)
