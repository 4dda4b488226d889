"""Source leaves against destination leaves: one verdict for each."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlsync.core.errors import LayoutMismatch
from rlsync.core.plan import Verdict
from rlsync.tensors.layout import LeafSpec, dtype_name
from rlsync.tensors.leaves import Leaves, memory_key
from rlsync.tensors.wrappers import uncompiled


@dataclass(frozen=True, slots=True)
class Comparison:
    """The verdict for one leaf name.

    Args:
        name: the leaf, relative to the route.
        spec: the destination leaf, or the source leaf when there is no destination leaf.
        verdict: what a publish does with it.
        note: why.
    """

    name: str
    spec: LeafSpec
    verdict: Verdict
    note: str = ""


def compare(
    source: Sequence[LeafSpec],
    destination: Sequence[LeafSpec],
    *,
    cast_to: torch.dtype | None = None,
    exclude: Sequence[str] = (),
    source_tensors: Mapping[str, Tensor] | None = None,
    destination_tensors: Mapping[str, Tensor] | None = None,
) -> list[Comparison]:
    """Compare two sets of leaves name by name.

    Broadcastable but different shapes are a mismatch. A different dtype is one too, unless the route
    declares it. Leaves whose names match a pattern of ``exclude`` are left out.

    Args:
        source: leaves that are sent.
        destination: leaves that stand at the destination.
        cast_to: the declared dtype of floating leaves.
        exclude: glob patterns.
        source_tensors, destination_tensors: live tensors by name, where one process holds both; equal
            memory is an alias.

    Example:
        >>> weight = LeafSpec("weight", "parameter", (2, 1), torch.float32)
        >>> wider = LeafSpec("weight", "parameter", (2, 3), torch.float32)
        >>> str(compare([weight], [wider])[0].verdict)
        'mismatch'
    """
    sent = {spec.name: spec for spec in source}
    found: list[Comparison] = []
    for spec in destination:
        if not excluded(spec.name, exclude):
            found.append(_verdict(sent.get(spec.name), spec, cast_to, sent))
    names = {spec.name for spec in destination}
    for spec in source:
        if spec.name not in names and not excluded(spec.name, exclude):
            found.append(Comparison(spec.name, spec, Verdict.UNEXPECTED))
    if source_tensors is not None and destination_tensors is not None:
        found = [_alias(c, source_tensors, destination_tensors) for c in found]
    return found


def excluded(name: str, patterns: Sequence[str]) -> bool:
    """Whether a leaf is left out: one of the glob patterns fits its name."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _verdict(
    sent: LeafSpec | None, stands: LeafSpec, cast_to: torch.dtype | None, source: Mapping[str, LeafSpec]
) -> Comparison:
    if sent is None:
        return Comparison(stands.name, stands, Verdict.MISSING)
    if sent.shape != stands.shape:
        note = f"shape {list(sent.shape)} does not fit {list(stands.shape)}"
        return Comparison(stands.name, stands, Verdict.MISMATCH, note)
    tied = source.get(stands.tie)
    if stands.tie and (not sent.tie if tied is None else _owner(sent) != _owner(tied)):
        note = f"the destination ties it to {stands.tie}, the source does not"
        return Comparison(stands.name, stands, Verdict.MISMATCH, note)
    becomes = cast_to if cast_to is not None and sent.dtype.is_floating_point else sent.dtype
    if becomes != stands.dtype:
        cure = f"declare the cast: Source(..., dtype={stands.dtype_name!r})"
        if sent.dtype == stands.dtype:
            cure = "leave the declared dtype out, or let the module that stands there have it"
        note = f"{dtype_name(becomes)} is not {stands.dtype_name}; {cure}"
        return Comparison(stands.name, stands, Verdict.MISMATCH, note)
    if becomes != sent.dtype:
        return Comparison(stands.name, stands, Verdict.CAST, f"from {sent.dtype_name}")
    return Comparison(stands.name, stands, Verdict.COPIED)


def _owner(spec: LeafSpec) -> str:
    return spec.tie or spec.name


def _alias(
    comparison: Comparison, source: Mapping[str, Tensor], destination: Mapping[str, Tensor]
) -> Comparison:
    if comparison.verdict is not Verdict.COPIED:
        return comparison
    if memory_key(source[comparison.name]) != memory_key(destination[comparison.name]):
        return comparison
    return Comparison(comparison.name, comparison.spec, Verdict.ALIASED)


def named_like(names: Sequence[str], expected: Sequence[LeafSpec]) -> list[str]:
    """Names of a tensordict or state dict, freed of the prefixes that wrappers add, if that makes them fit.

    Example:
        >>> w = [LeafSpec("0.weight", "parameter", (1,), torch.float32)]
        >>> named_like(["module.0.weight"], w), named_like(["_orig_mod.0.weight"], w)
        (['0.weight'], ['0.weight'])
    """
    wanted = {spec.name for spec in expected}
    plain = [uncompiled(name) for name in names]
    bare = [name.removeprefix("module.") for name in plain]
    return max((list(names), plain, bare), key=lambda candidate: len(wanted & set(candidate)))


def fitted(
    weights: object, where: str, expected: Sequence[LeafSpec] | None, against: str
) -> dict[str, Tensor]:
    """The tensors of a module, tensordict or mapping, under the names of the leaves that they must fit.

    Args:
        weights: what is sent.
        where: how errors call it.
        expected: the leaves that stand at the destination; ``None`` when nobody can tell.
        against: how errors call these.

    Raises:
        LayoutMismatch: a leaf is missing, unexpected, or does not fit.
    """
    source = Leaves(weights, where)
    names = source.names if expected is None else named_like(source.names, expected)
    if expected is not None:
        check_same_leaves(source.specs_named(names), expected, where, against)
    return dict(zip(names, source.tensors(), strict=True))


def check_same_leaves(
    found: Sequence[LeafSpec], expected: Sequence[LeafSpec], where: str, against: str
) -> None:
    """Refuse leaves that differ in name, shape or dtype from those expected.

    Raises:
        LayoutMismatch: names the first leaf that does not fit, and how many do not.
    """
    wrong = [c for c in compare(found, [_untied(s) for s in expected]) if c.verdict is not Verdict.COPIED]
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
            "send all leaves of a module built like the one in the workers; SyncWeights carries nested "
            "extra state, too, and takes exclusions",
        )


def _untied(spec: LeafSpec) -> LeafSpec:
    return LeafSpec(spec.name, spec.kind, spec.shape, spec.dtype)
