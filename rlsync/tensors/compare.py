"""Compare source leaves with destination leaves; match weights that are sent again and again."""

from __future__ import annotations

import fnmatch
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from rlsync.core.errors import LayoutMismatch
from rlsync.core.plan import Verdict
from rlsync.tensors.layout import LeafSpec, dtype_name
from rlsync.tensors.leaves import Leaves, is_tensordict, memory_key, uncompiled
from rlsync.tensors.sharded import Sharding, any_sharded, is_sharded


@dataclass(frozen=True, slots=True)
class LeafComparison:
    """The verdict for one leaf, named relative to its route, and the reason for it."""

    name: str
    spec: LeafSpec  #: the destination leaf, or the source leaf when there is no destination leaf
    verdict: Verdict
    note: str = ""
    source_device: str = ""  #: empty when there is no source leaf


def compare(
    source: Sequence[LeafSpec],
    destination: Sequence[LeafSpec],
    *,
    cast_to: torch.dtype | None = None,
    exclude: Sequence[str] = (),
    source_tensors: Mapping[str, Tensor] | None = None,
    destination_tensors: Mapping[str, Tensor] | None = None,
) -> list[LeafComparison]:
    """Compare two sets of leaves name by name, but those whose names match a glob of ``exclude``.

    Another shape is a mismatch, even if it could be broadcast; another dtype, too, unless it is ``cast_to``,
    which is for floating-point leaves. With the live tensors of both sides, leaves with the same memory are
    aliased.
    """
    sent = {spec.name: spec for spec in source}
    names = {spec.name for spec in destination}
    by_specs = []
    for spec in destination:
        if not excluded(spec.name, exclude):
            by_specs.append(_verdict(sent.get(spec.name), spec, cast_to, sent))
    for spec in source:
        if spec.name not in names and not excluded(spec.name, exclude):
            by_specs.append(LeafComparison(spec.name, replace(spec, device=""), Verdict.UNEXPECTED))

    comparisons = []
    for comparison in by_specs:
        if comparison.name in sent:
            comparison = replace(comparison, source_device=sent[comparison.name].device)
        comparisons.append(_in_memory(comparison, source_tensors or {}, destination_tensors or {}))
    return comparisons


def excluded(name: str, patterns: Sequence[str]) -> bool:
    """Whether a leaf is left out, because its name matches one of the glob patterns."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _verdict(
    sent: LeafSpec | None,
    live: LeafSpec,
    cast_to: torch.dtype | None,
    source: Mapping[str, LeafSpec],
) -> LeafComparison:
    if sent is None:
        return LeafComparison(live.name, live, Verdict.MISSING)
    if sent.shape != live.shape:
        note = f"shape {list(sent.shape)} does not fit {list(live.shape)}"
        return LeafComparison(live.name, live, Verdict.MISMATCH, note)
    if sent.whole != live.whole:
        note = (
            f"it is part of {sent.whole or 'no tensor'}, and there of {live.whole or 'no tensor'}"
        )
        return LeafComparison(live.name, live, Verdict.MISMATCH, note)

    # If the source has no leaf of that name, this one must at least be tied to some other.
    tied = source.get(live.tie)
    is_tied = bool(sent.tie) if tied is None else _owner(sent) == _owner(tied)
    if live.tie and not is_tied:
        note = f"the destination ties it to {live.tie}, the source does not"
        return LeafComparison(live.name, live, Verdict.MISMATCH, note)

    # The scale of a quantised weight keeps its dtype: what it belongs to stays as it is.
    becomes = sent.dtype
    if cast_to is not None and sent.dtype.is_floating_point and not sent.whole:
        becomes = cast_to
    if becomes != live.dtype:
        cure = f"declare the cast: Source(..., dtype={live.dtype_name!r})"
        if sent.dtype == live.dtype:
            cure = "remove the declared dtype, or build the destination's module in it"
        note = f"{dtype_name(becomes)} is not {live.dtype_name}; {cure}"
        return LeafComparison(live.name, live, Verdict.MISMATCH, note)
    if becomes != sent.dtype:
        return LeafComparison(live.name, live, Verdict.CAST, f"from {sent.dtype_name}")
    return LeafComparison(live.name, live, Verdict.COPIED)


def _owner(spec: LeafSpec) -> str:
    return spec.tie or spec.name


def _in_memory(
    comparison: LeafComparison, source: Mapping[str, Tensor], destination: Mapping[str, Tensor]
) -> LeafComparison:
    """What the live tensors of a leaf tell: whether it is aliased, or sharded."""
    tensor = source.get(comparison.name)
    there = destination.get(comparison.name)
    if tensor is None or comparison.verdict not in (Verdict.COPIED, Verdict.CAST):
        return comparison
    copied = comparison.verdict is Verdict.COPIED
    if copied and there is not None and memory_key(tensor) == memory_key(there):
        return replace(comparison, verdict=Verdict.ALIASED)
    if not is_sharded(tensor):
        return comparison
    notes = (comparison.note, str(Sharding.of(tensor, comparison.name, "the source")))
    return replace(comparison, verdict=Verdict.SHARDED, note=", ".join(filter(None, notes)))


def named_like(names: Sequence[str], expected: Sequence[LeafSpec]) -> list[str]:
    """Names of a tensordict or state dict, without the prefixes of wrappers if they then match better."""
    wanted = {spec.name for spec in expected}
    plain = list(map(uncompiled, names))
    bare = [name.removeprefix("module.") for name in plain]
    return max((list(names), plain, bare), key=lambda candidate: len(wanted & set(candidate)))


def fitted(
    weights: object, where: str, expected: Sequence[LeafSpec] | None, against: str
) -> dict[str, Tensor]:
    """The tensors of weights under the names of the ``expected`` leaves, if known; else LayoutMismatch."""
    source = Leaves(weights, where, shards=True)
    names = source.names
    if expected is not None:
        names = named_like(source.names, expected)
        renamed = []
        for spec, name in zip(source.specs(), names, strict=True):
            renamed.append(replace(spec, name=name, tie=""))
        check_same_leaves(renamed, expected, where, against)
    return dict(zip(names, source.tensors(), strict=True))


def check_same_leaves(
    leaves: Sequence[LeafSpec], expected: Sequence[LeafSpec], where: str, against: str
) -> None:
    """Refuse leaves that differ from the expected ones in name, shape or dtype (LayoutMismatch)."""
    untied = [replace(spec, tie="", excluded=False) for spec in expected]
    wrong = [each for each in compare(leaves, untied) if each.verdict is not Verdict.COPIED]
    if wrong:
        first = wrong[0]
        problems = {
            Verdict.MISSING: f"leaf {first.name!r} {against} is missing",
            Verdict.UNEXPECTED: f"leaf {first.name!r} is not among those {against}",
            Verdict.MISMATCH: f"leaf {first.name!r} does not fit the one {against}: {first.note}",
        }
        raise LayoutMismatch(
            problems[first.verdict],
            f"{where} ({len(wrong)} leaves differ)",
            "send all leaves of a module built like the one in the workers; or use SyncWeights, which also "
            "carries nested extra state and can exclude leaves",
        )


#: What must be the same for a tensor to fit where another one did.
Form = tuple[type, torch.Size, torch.dtype, torch.layout]


class Fit:
    """Names tensors as their destination does, by :func:`fitted`; repeated structures are recognised."""

    def __init__(self, where: str, against: str) -> None:
        self._where = where
        self._against = against
        self._expected: Sequence[LeafSpec] | None = None
        self._structure: object = None
        self._names: list[str] = []
        self._forms: list[Form] = []
        self.sharded = False  #: whether what was named last has leaves that are sharded over ranks

    def named(self, weights: object, expected: Sequence[LeafSpec] | None) -> dict[str, Tensor]:
        """The tensors of ``weights`` under the destination's names; see :func:`fitted`."""
        structure, tensors = self._read(weights)
        known = bool(tensors) and expected is self._expected and structure == self._structure
        if known and _forms(tensors) == self._forms:
            return dict(zip(self._names, tensors, strict=True))
        by_name = fitted(weights, self._where, expected, self._against)
        same = len(tensors) == len(by_name) and all(map(operator.is_, tensors, by_name.values()))
        self._expected = expected
        self._structure = structure if same else None
        self._names = list(by_name)
        self._forms = _forms(by_name.values())
        self.sharded = any_sharded(by_name.values())
        return by_name

    def _read(self, weights: object) -> tuple[object, Sequence[Tensor]]:
        """What tells this structure from others, and its tensors; none where it cannot be told cheaply."""
        if isinstance(weights, nn.Module) and not is_tensordict(weights):
            known = self._structure
            if not isinstance(known, Leaves) or known.root is not weights or not known.unchanged():
                known = Leaves(weights, self._where, shards=True)
            if known.extra:
                return (known, ())
            return (known, known.tensors())
        if not is_tensordict(weights):
            return None, ()
        leaves = dict(weights.items(include_nested=True, leaves_only=True))
        tensors = [value for value in leaves.values() if isinstance(value, Tensor)]
        if len(tensors) < len(leaves):
            return None, ()
        return list(leaves), tensors


def _forms(tensors: Iterable[Tensor]) -> list[Form]:
    return [(t.__class__, t.shape, t.dtype, t.layout) for t in tensors]
