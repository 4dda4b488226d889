"""Compare source leaves with destination leaves; match weights that are sent again and again."""

from __future__ import annotations

import fnmatch
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

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
    found = [
        _verdict(sent.get(s.name), s, cast_to, sent)
        for s in destination
        if not excluded(s.name, exclude)
    ]
    for spec in source:
        if spec.name not in names and not excluded(spec.name, exclude):
            found.append(LeafComparison(spec.name, replace(spec, device=""), Verdict.UNEXPECTED))
    found = [replace(c, source_device=sent[c.name].device) if c.name in sent else c for c in found]
    return [_in_memory(c, source_tensors or {}, destination_tensors or {}) for c in found]


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
    tied = source.get(live.tie)
    if live.tie and (not sent.tie if tied is None else _owner(sent) != _owner(tied)):
        note = f"the destination ties it to {live.tie}, the source does not"
        return LeafComparison(live.name, live, Verdict.MISMATCH, note)
    # what a scale belongs to stays as it is
    castable = sent.dtype.is_floating_point and not sent.whole
    becomes = cast_to if cast_to is not None and castable else sent.dtype
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
    how = str(Sharding.of(tensor, comparison.name, "the source"))
    return replace(
        comparison, verdict=Verdict.SHARDED, note=", ".join(filter(None, (comparison.note, how)))
    )


def named_like(names: Sequence[str], expected: Sequence[LeafSpec]) -> list[str]:
    """Names of a tensordict or state dict, without the prefixes of wrappers if they then match better."""
    wanted = {spec.name for spec in expected}
    plain = [uncompiled(name) for name in names]
    bare = [name.removeprefix("module.") for name in plain]
    return max((list(names), plain, bare), key=lambda candidate: len(wanted & set(candidate)))


def fitted(
    weights: object, where: str, expected: Sequence[LeafSpec] | None, against: str
) -> dict[str, Tensor]:
    """The tensors of weights under the names of the ``expected`` leaves, if known; else LayoutMismatch."""
    source = Leaves(weights, where, shards=True)
    if expected is None:
        names = source.names
    else:
        names = named_like(source.names, expected)
    if expected is not None:
        specs = zip(source.specs(), names, strict=True)
        check_same_leaves([replace(s, name=n, tie="") for s, n in specs], expected, where, against)
    return dict(zip(names, source.tensors(), strict=True))


def check_same_leaves(
    found: Sequence[LeafSpec], expected: Sequence[LeafSpec], where: str, against: str
) -> None:
    """Refuse leaves that differ from the expected ones in name, shape or dtype (LayoutMismatch)."""
    untied = [replace(s, tie="", excluded=False) for s in expected]
    wrong = [c for c in compare(found, untied) if c.verdict is not Verdict.COPIED]
    if wrong:
        first = wrong[0]
        said = {
            Verdict.MISSING: f"leaf {first.name!r} {against} is missing",
            Verdict.UNEXPECTED: f"leaf {first.name!r} is not among those {against}",
            Verdict.MISMATCH: f"leaf {first.name!r} does not fit the one {against}: {first.note}",
        }[first.verdict]
        raise LayoutMismatch(
            said,
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
        found = fitted(weights, self._where, expected, self._against)
        same = len(tensors) == len(found) and all(map(operator.is_, tensors, found.values()))
        self._expected = expected
        self._structure = structure if same else None
        self._names = list(found)
        self._forms = _forms(found.values())
        self.sharded = any_sharded(found.values())
        return found

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
        items: list[tuple[Any, Any]] = list(weights.items(include_nested=True, leaves_only=True))
        tensors = [value for _, value in items]
        if not all(isinstance(tensor, Tensor) for tensor in tensors):
            return None, ()
        return [key for key, _ in items], tensors


def _forms(tensors: Iterable[Tensor]) -> list[Form]:
    return [(t.__class__, t.shape, t.dtype, t.layout) for t in tensors]
