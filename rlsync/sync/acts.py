"""Do the leaves that arrive act? Each is changed alone, and the outputs must move.

That the bytes of a version are in the module says nothing about what its outputs are computed from: a policy
may compute with a detached twin, a dict of tensors, or a weight that was packed at the first call.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from rlsync.core import machine
from rlsync.core.plan import listed
from rlsync.sync.held import tensors_of
from rlsync.sync.numbers import Numbers
from rlsync.sync.outlives import Call, Episode, own_values
from rlsync.sync.undisturbed import present_memory, random_states, set_random_states, undisturbed
from rlsync.tensors.derived import keepers, outdate
from rlsync.tensors.digest import digest
from rlsync.tensors.layout import LeafSpec
from rlsync.tensors.leaves import Leaves
from rlsync.tensors.target import Target, is_compiled

if TYPE_CHECKING:
    from tensordict import TensorDictBase

_MANY = 24  #: with more leaves than this, gradients of one call speak for most of them
#: with so many older weights a policy acts that returns only a choice: choices often agree
_CHOICES = 8
#: calls after which leaves are not examined any more, where gradients do not speak for them
_AT_MOST = 200
#: A copy of the leaves is made if it takes less of it: other workers make theirs at the same time.
_SHARE_OF_FREE_MEMORY = 0.25


@dataclass(frozen=True, slots=True)
class Acting:
    """What workers found out about what they act with, before their first frame."""

    #: By destination: parameters on which no output depends.
    idle: Mapping[str, Sequence[str]] = field(default_factory=dict)
    #: By destination: why its leaves could not be examined.
    unknown: Mapping[str, str] = field(default_factory=dict)
    #: Tensors besides the leaves that shared memory with the learner, and are a worker's own now.
    owned: Sequence[str] = ()
    #: Whether all of these would act with what arrives, if it were copied into the module's own memory.
    by_copy: bool = False
    #: By destination: what it computes with besides its leaves, see :func:`rlsync.sync.held.settings_of`.
    settings: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    #: By destination: what the policy keeps of a computation with older weights, and acts with.
    outlives: Mapping[str, Sequence[str]] = field(default_factory=dict)

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
        outlives: dict[str, dict[str, None]] = {}
        unknown: dict[str, str] = {}
        owned: dict[str, None] = {}
        settings: dict[str, dict[str, dict[str, None]]] = {}
        by_copy = True
        for worker in workers:
            for destination, names in worker.idle.items():
                idle.setdefault(destination, {}).update(dict.fromkeys(names))
            for destination, names in worker.outlives.items():
                outlives.setdefault(destination, {}).update(dict.fromkeys(names))
            unknown |= worker.unknown
            owned |= dict.fromkeys(worker.owned)
            by_copy = by_copy and (worker.by_copy or not (worker.idle or worker.outlives))
            for destination, texts in worker.settings.items():
                for path, text in texts.items():
                    settings.setdefault(destination, {}).setdefault(path, {})[text] = None
        joined: dict[str, dict[str, str]] = {}
        for destination, by_path in settings.items():
            joined[destination] = {path: " or ".join(texts) for path, texts in by_path.items()}
        return cls(
            idle={destination: tuple(names) for destination, names in idle.items()},
            outlives={destination: tuple(names) for destination, names in outlives.items()},
            unknown=unknown,
            owned=tuple(owned),
            by_copy=bool(idle or outlives) and by_copy,
            settings=joined,
        )


def _speaking(call: Call, policy: nn.Module) -> Call:
    """The call, with the outputs of all parts of a policy that returns only a choice: choices often agree."""
    with undisturbed(policy):
        if any(output.dtype.is_floating_point for output in call(True)):
            return call

    def all_outputs(plain: bool) -> Sequence[Tensor]:
        outputs: list[Tensor] = []

        def keep(_: object, __: object, output: object) -> None:
            outputs.extend(tensor for _, tensor in tensors_of(output, ""))

        hooks = []
        for part in policy.modules():
            if not isinstance(part, torch.jit.ScriptModule):
                hooks.append(part.register_forward_hook(keep))
        try:
            return [*call(plain), *outputs]
        finally:
            for hook in hooks:
                hook.remove()

    return all_outputs


def examined(
    modules: Mapping[str, nn.Module],
    call: Call,
    *,
    alias: Collection[str],
    within: nn.Module | None = None,
) -> Acting:
    """Which leaves act, of destinations that are parts of ``within``; those in ``alias`` adopt by alias."""
    idle: dict[str, tuple[str, ...]] = {}
    outlives: dict[str, tuple[str, ...]] = {}
    unknown: dict[str, str] = {}
    by_copy = True
    parts = None if within is None else set(within.modules())
    for destination, module in modules.items():
        if parts is not None and module not in parts:
            unknown[destination] = "the policy does not contain it"
            continue
        whole = module if within is None else within
        try:
            with undisturbed(whole), torch.no_grad():
                findings = _examined(module, destination, call, destination in alias, whole)
        except Exception as error:  # noqa: BLE001 - the rollout will raise it, with more to say
            unknown[destination] = f"a call of it raises {type(error).__name__}"
            continue

        # Copies are the cure only if they would cure all that was found.
        if findings.why:
            unknown[destination] = findings.why
        if findings.idle:
            idle[destination] = findings.idle
        if findings.outlives:
            outlives[destination] = findings.outlives
        if findings.idle or findings.outlives:
            by_copy = by_copy and findings.by_copy
    return Acting(
        idle=idle,
        unknown=unknown,
        by_copy=by_copy and bool(idle or outlives),
        outlives=outlives,
    )


@dataclass(frozen=True, slots=True)
class _Findings:
    """What was found out about one destination."""

    idle: tuple[str, ...] = ()
    outlives: tuple[str, ...] = ()
    by_copy: bool = False  #: whether neither would be so by copy
    why: str = ""  #: why nobody can tell


def _examined(
    module: nn.Module, destination: str, call: Call, alias: bool, whole: nn.Module
) -> _Findings:
    speaking = _speaking(call, whole)
    chooses = speaking is not call
    tries = _CHOICES if chooses else 1
    findings = _findings(module, destination, speaking, alias=alias, whole=whole, tries=tries)
    if chooses and 0 < len(findings.idle) < len(list(module.parameters())):
        why = "the policy returns a choice alone, which few weights change"
        findings = replace(findings, idle=(), why=why)
    if not alias or not (findings.idle or findings.outlives):
        return findings
    # Would copies, in the memory that the parameters had before, act?
    copied = _findings(module, destination, speaking, alias=False, whole=whole, tries=tries)
    still_idle = set(copied.idle) & set(findings.idle)
    return replace(findings, by_copy=not (copied.why or copied.outlives or still_idle))


def _findings(
    module: nn.Module,
    destination: str,
    call: Call,
    *,
    alias: bool,
    whole: nn.Module,
    tries: int,
) -> _Findings:
    specs = _float_parameters(module, destination)
    if not specs:
        return _Findings()
    copy_bytes = sum(spec.payload_bytes for spec in specs if not spec.tie)
    lacking = machine.lacking(copy_bytes, _SHARE_OF_FREE_MEMORY)
    if lacking and not alias:
        return _Findings(why=lacking)
    with undisturbed(whole):
        idle, why = idle_leaves(module, destination, call, alias=alias, whole=whole)
    why = why or lacking
    if why or len(idle) == sum(not spec.tie for spec in specs):
        return _Findings(idle, why=why)
    alias = alias and not is_compiled(module)
    episode = Episode(whole, Target(module, destination, specs), call, alias=alias)
    olders = (Numbers(specs, seed, by=8) for seed in range(1, 1 + tries))
    outlives, why = episode.outliving(olders, Numbers(specs, 0))
    return _Findings(idle, outlives, why=why)


def _float_parameters(module: nn.Module, where: str) -> list[LeafSpec]:
    parameters = []
    for spec in Leaves(module, where).specs():
        if spec.kind == "parameter" and spec.dtype.is_floating_point and spec.payload_bytes:
            parameters.append(spec)
    return parameters


def idle_leaves(
    module: nn.Module, where: str, call: Call, *, alias: bool, whole: nn.Module
) -> tuple[tuple[str, ...], str]:
    """The parameters of ``module`` on which no output of ``whole`` depends, or why nobody can tell.

    All parameters hold fixed numbers that are not zero, and one of them at a time holds others. Afterwards
    their memory and values are what they were; call it in :func:`undisturbed` for the rest.
    """
    specs = _float_parameters(module, where)
    if not specs:
        return (), ""
    with torch.no_grad():
        # What packs a weight or caches it at its first call does so now, with the weights that are there.
        call(True)
        target = Target(module, where, specs)
        alias = alias and not is_compiled(module)
        with own_values(target, alias=alias):
            probe = _Probe(target, specs, _episodes(call, whole), alias=alias)
            left = [i for i, spec in enumerate(specs) if not spec.tie]
            for plain, positive in ((True, False), (False, False), (False, True)):
                if not left:
                    break
                probe.begin(plain=plain, positive=positive)
                if not probe.repeats():
                    why = (
                        "two calls with the same weights and the same input give different outputs"
                    )
                    return (), why
                left = probe.still(probe.not_in_gradient(left))
    return tuple(specs[i].name for i in left), ""


def in_mid_episode(inputs: TensorDictBase) -> TensorDictBase:
    """An input of a policy as from the middle of an episode: see :data:`Call`."""
    for number, (key, value) in enumerate(list(inputs.items(True, True))):
        if isinstance(value, Tensor):
            inputs.set(key, mid_episode(value, number, is_init=key == "is_init"))
    return inputs


def mid_episode(value: Tensor, number: int = 0, *, is_init: bool = False) -> Tensor:
    """One tensor of such an input.

    Masks and numbers of a choice stay as they are. Tensors with other numbers have other values: a policy may
    subtract what it remembers from what it sees.
    """
    if is_init:
        return torch.zeros_like(value)
    if value.dtype.is_floating_point:
        first = 0.1 + number / 8
        last = 1.0 + number / 4
        values = torch.linspace(first, last, max(1, value.numel()), device="cpu")
        return values.to(value)[: value.numel()].view(value.shape)
    if value.dtype is torch.uint8:
        pixels = torch.arange(value.numel(), device=value.device) % 251 + 1
        return pixels.to(value.dtype).view(value.shape)
    return value


class _Probe:
    """Private values of a module's parameters, and what its outputs are with them."""

    def __init__(
        self, target: Target, specs: Sequence[LeafSpec], call: Call, *, alias: bool
    ) -> None:
        self._specs = specs
        self._call = call
        self._adopt = target.alias if alias else target.copy
        self._target = target
        self._number_of = {spec.name: i for i, spec in enumerate(specs)}
        self._calls = 0

    def begin(self, *, plain: bool, positive: bool) -> None:
        self._plain = plain
        self._numbers = Numbers(self._specs, 0, positive=positive).views
        self._adopt(self._numbers)
        self._outputs = self._digest()

    def repeats(self) -> bool:
        return self._digest() == self._outputs

    def still(self, leaves: Sequence[int]) -> list[int]:
        """Those of the leaves that alone change no output. After so many calls the rest is taken to act."""
        if self._calls > _AT_MOST:
            return []
        if len(leaves) <= _MANY:
            return [leaf for leaf in leaves if not self._moves([leaf])]
        if not self._moves(leaves):
            return list(leaves)
        middle = len(leaves) // 2
        return self.still(leaves[:middle]) + self.still(leaves[middle:])

    def _moves(self, leaves: Sequence[int]) -> bool:
        """Whether the outputs are others with other values of these leaves alone."""
        # Larger ones, and larger still: a policy may report the largest of its weights, round, or choose.
        for times in (1, 2, 3):
            changed = Numbers([self._specs[i] for i in leaves], times, by=8**times).views
            others = dict(zip(leaves, changed, strict=True))
            views = []
            for i, spec in enumerate(self._specs):
                owner = self._number_of[spec.tie or spec.name]
                views.append(others.get(owner, self._numbers[i]))
            self._adopt(views)
            moved = self._digest() != self._outputs
            self._adopt(self._numbers)
            if moved:
                return True
        return False

    def not_in_gradient(self, leaves: Sequence[int]) -> list[int]:
        """The leaves for which the gradients of one call do not vouch; all, if there are only a few."""
        if len(leaves) <= _MANY:
            return list(leaves)
        live = self._target.live
        needed = [tensor.requires_grad for tensor in live]
        parts = [live[i] for i in leaves]
        try:
            with torch.inference_mode(False), torch.enable_grad():
                for tensor in live:
                    tensor.requires_grad_(True)
                moving = _move(self._call(self._plain), parts)
        # a part that cannot be differentiated: the leaves are changed one by one
        except RuntimeError:
            return list(leaves)
        finally:
            for tensor, before in zip(live, needed, strict=True):
                tensor.requires_grad_(before)
        return [leaf for leaf, moves in zip(leaves, moving, strict=True) if not moves]

    def _digest(self) -> int:
        self._calls += 1
        return digest(self._call(self._plain))


def _move(outputs: Sequence[Tensor], parts: Sequence[Tensor]) -> list[bool]:
    """For each part, whether a gradient says that it moves the outputs."""
    sums = []
    for output in outputs:
        if output.requires_grad and output.is_floating_point():
            sums.append((output.double().square() + output.double()).sum())
    if not sums:
        return [False] * len(parts)
    with ExitStack() as hooks:
        for part in parts:
            hooks.callback(part.register_hook(_whether_any).remove)
        grads = torch.autograd.grad(torch.stack(sums).sum(), parts, allow_unused=True)
    return [grad is not None and bool(grad.any()) for grad in grads]


def _whether_any(gradient: Tensor) -> Tensor:
    """One number in place of a gradient: those of all parts together would be as large as the model."""
    return gradient.any().to(gradient.dtype).expand_as(gradient)


def _episodes(call: Call, policy: nn.Module) -> Call:
    """The call as an episode that begins anew each time, with the same random numbers.

    Its first step alone, or two steps: what a policy remembers of one call may be all on which a weight acts
    in the next.
    """
    numbers = random_states()
    begin = present_memory(policy)
    parts = keepers([policy])

    def act(plain: bool) -> Sequence[Tensor]:
        begin()
        outdate(parts)  # weights have arrived in between
        set_random_states(numbers)
        outputs = call(True)
        if plain:
            return outputs
        return [*outputs, *call(False)]

    return act
