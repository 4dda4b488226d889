"""Proof of behaviour: what acts computes what the learner's module computes with the published weights.

The learner calls the source's parts on the inputs of a worker's :class:`rlsync.sync.sample.Sample`, with the
image of the version that acted and with that of the version before. Each part is in the mode in which it acts
in the worker, and remembers what it remembers there. If both give what the worker's part gave, the comparison
has no power. Where no transport keeps the version before, the weights of now take its place.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from rlsync.sync.acts import undisturbed
from rlsync.sync.resolve import BoundRoute
from rlsync.sync.sample import Image, Judgement, PartCall, Sample, outermost, selected
from rlsync.tensors.derived import keepers, outdate
from rlsync.tensors.layout import dtype_named
from rlsync.tensors.leaves import Leaves, is_tensordict, is_tensordict_params, unwrap
from rlsync.tensors.sharded import is_sharded

#: By dtype: how far outputs may be apart, relative to the largest one, where both sides compute alike.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 3e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def judge(sample: Sample, routes: Sequence[BoundRoute], images: Sequence[Image]) -> Judgement:
    """Compare a worker's outputs with the sources': with the images of its version and of the one before."""
    wrong: list[str] = []
    powerless: list[str] = []
    uncompared: list[str] = []
    same = 0
    for route in routes:
        name = route.route.destination
        calls, why = _comparable(sample, route, images[0])
        if why:
            uncompared.append(f"{name}: {why}")
            continue
        compared = []
        for verdict in _verdicts(sample, calls, route, images):
            if verdict.why:
                uncompared.append(f"{name}: {verdict.why}")
                continue
            compared.append(verdict)
            if verdict.wrong:
                wrong.append(f"{name}: {verdict.wrong}")
        if compared and not any(verdict.moves for verdict in compared):
            powerless.append(name)
        elif compared and not any(verdict.wrong for verdict in compared):
            same += 1
    return Judgement(tuple(wrong), same, tuple(powerless), tuple(uncompared))


def _comparable(sample: Sample, route: BoundRoute, image: Image) -> tuple[list[PartCall], str]:
    """The recorded calls of what a route feeds; or why they cannot be compared."""
    if sample.why_not:
        return [], sample.why_not
    root = route.leaves.root
    if not isinstance(root, nn.Module) or is_tensordict_params(root):
        return [], f"its source {route.route.source} cannot be called"
    if any(is_sharded(tensor) for tensor in route.tensors()):
        return [], "its source is spread over ranks"
    if any(sent.key not in image for sent in route.sent):
        return [], "it shares memory with its source"
    calls = []
    for call in sample.calls:
        if call.destination == route.destination and _part(route, call) is not None:
            calls.append(call)
    if not calls:
        return [], "no part of it was called exactly once with tensors"
    return calls, ""


def _verdicts(
    sample: Sample, calls: Sequence[PartCall], route: BoundRoute, images: Sequence[Image]
) -> Iterator[_Verdict]:
    """On the outermost calls, and in place of one that draws random numbers, on those inside it."""
    for call in outermost(calls):
        verdict = _judged(sample, call, route, images)
        inside = [other for other in calls if other.is_within(call)]
        if verdict.random and inside:
            yield from _verdicts(sample, inside, route, images)
        else:
            yield verdict


def _below(call: PartCall, prefix: str) -> str | None:
    """The path of the part below the route's prefix; None if it is not there."""
    if not prefix:
        return call.module
    if call.module == prefix:
        return ""
    if call.module.startswith(prefix + "."):
        return call.module.removeprefix(prefix + ".")
    return None


def _part(route: BoundRoute, call: PartCall) -> nn.Module | None:
    """The part of the source that stands where the worker's part stands."""
    below = _below(call, route.prefix)
    if below is None or not isinstance(route.leaves.root, nn.Module):
        return None
    root = unwrap(route.leaves.root, route.leaves.where)
    return dict(root.named_modules()).get(below)


@dataclass(frozen=True, slots=True)
class _Verdict:
    wrong: str = ""
    moves: bool = False  #: whether other weights give other outputs
    why: str = ""
    random: bool = False


def _judged(sample: Sample, call: PartCall, route: BoundRoute, images: Sequence[Image]) -> _Verdict:
    """Compare what one call gave with what the learner's part gives, with the weights of both images."""
    part = _part(route, call)
    assert part is not None
    name = f"{type(part).__name__} {_below(call, route.prefix)}".strip()
    published, other = (_weights(sample, call, route, part, image) for image in images)
    device = next((tensor.device for tensor in route.tensors()), torch.device("cpu"))
    acted = _flat(sample.get(call.outs, device))
    try:
        with_published, random = _outputs(sample, call, part, published, device)
        with_other, _ = _outputs(sample, call, part, other, device)
    except Exception as error:  # noqa: BLE001 - the learner's module need not be callable on its own
        return _Verdict(why=f"{name} raises {type(error).__name__} in the learner's process")

    acted = {key: acted[key] for key in with_published if key in acted}
    if random or not acted:
        return _Verdict(why=f"the outputs of {name} are random", random=True)

    allowed = _allowed(route, [*published.values(), *route.tensors(), *acted.values()])
    apart = {key: _apart(output, with_published[key]) for key, output in acted.items()}
    worst = max(apart, key=apart.__getitem__)
    if apart[worst] <= allowed:
        moves = any(_apart(acted[key], with_other[key]) > allowed for key in acted)
        return _Verdict(moves=moves)

    # If a second call gives something else, the part remembers what no sample could bring.
    again, _ = _outputs(sample, call, part, published, device, calls=2)
    if any(_apart(again[key], with_published[key]) > allowed for key in acted):
        return _Verdict(why=f"{name} remembers its calls in an object that cannot be sent")
    return _Verdict(
        f"{name} gives {worst or 'an output'} that is {apart[worst]:.2g} apart from what the learner's "
        f"module computes with version {sample.version}",
        moves=True,
    )


def _allowed(route: BoundRoute, tensors: Sequence[Tensor]) -> float:
    """How far outputs may be apart that were computed with these tensors: by the coarsest dtype."""
    allowed = max(TOLERANCE.get(each.dtype, TOLERANCE[torch.float32]) for each in tensors)
    if route.route.dtype:
        allowed = max(allowed, TOLERANCE[dtype_named(route.route.dtype)])
    return allowed


def _weights(
    sample: Sample, call: PartCall, route: BoundRoute, part: nn.Module, image: Image
) -> dict[str, Tensor]:
    """A part of the source's leaves as they are in an image, or where it lacks them, as they are now.

    Tied leaves of several modules are all among them, those of one module that has several names once.
    """
    stem = f"{route.prefix}." if route.prefix else ""
    sent = {one.leaf.name: one.key for one in route.sent}
    own_of_worker = sample.held.get(route.destination, {})
    weights: dict[str, Tensor] = {}
    below = _below(call, route.prefix)
    dotted = f"{below}." if below else ""
    again = _met_again(part)
    for leaf in route.leaves.leaves:
        name = leaf.name.removeprefix(dotted)
        if leaf.kind == "extra_state" or not leaf.name.startswith(dotted) or name.startswith(again):
            continue
        live = leaf.read().detach()
        key = sent.get(leaf.name)
        there = stem + leaf.name if key is None else key[1]
        weight = live
        if there in own_of_worker:
            weight = sample.tensors[own_of_worker[there]]
        elif key is not None and key in image:
            weight = image[key]
        weights[name] = weight.to(live.device, live.dtype)
    return weights


def _met_again(part: nn.Module) -> tuple[str, ...]:
    """How the names of leaves begin that belong to a module which has another name already."""
    prefixes: list[str] = []
    met: set[nn.Module] = set()
    for path, inner in part.named_modules(remove_duplicate=False):
        if inner in met:
            prefixes.append(f"{path}.")
        met.add(inner)
    return tuple(prefixes)


def _outputs(
    sample: Sample,
    call: PartCall,
    part: nn.Module,
    weights: Mapping[str, Tensor],
    device: torch.device,
    *,
    calls: int = 1,
) -> tuple[dict[str, Tensor], bool]:
    """The outputs of a part with some weights, and whether it drew random numbers for them.

    Those of the last of so many calls, each with what the worker's part remembered.
    """
    # Workers that compute in half precision pass it on from part to part; the learner computes as it trains.
    cast: dict[torch.dtype, torch.dtype] = {}
    for tensor in weights.values():
        if tensor.is_floating_point():
            cast = dict.fromkeys((torch.bfloat16, torch.float16), tensor.dtype)
            break
    args = tuple(sample.get(arg, device, cast) for arg in call.args)

    generators = [torch.default_generator, *torch.cuda.default_generators]
    for module in part.modules():
        for value in vars(module).values():
            if isinstance(value, torch.Generator):
                generators.append(value)

    source = Leaves(part, "the source")
    parts = keepers([part])
    with undisturbed(part), torch.no_grad():
        before = [generator.get_state() for generator in generators]
        for _ in range(calls):
            # Copies: forward() may write to buffers.
            copies = {name: tensor.clone() for name, tensor in weights.items()}
            leaves = source.put_together(copies)
            outdate(parts)
            with _as_in_the_worker(part, sample, call, device):
                outs = functional_call(part, leaves, args, tie_weights=False, strict=False)
        after = [generator.get_state() for generator in generators]
        random = not all(map(torch.equal, before, after))
        return _flat(selected(part, outs, "out_keys")), random


@contextmanager
def _as_in_the_worker(
    part: nn.Module, sample: Sample, call: PartCall, device: torch.device
) -> Iterator[None]:
    """Inside, a part and those in it have the modes of the worker's, and remember what these remember."""
    modes = sample.modes.get(call.destination, {})
    memory = sample.memory.get(call.destination, {})
    before = {inner: inner.training for inner in part.modules()}
    try:
        for name, inner in part.named_modules():
            path = f"{call.module}.{name}".strip(".")
            # Not by train(): modules may do more in it, such as merge adapters.
            inner.training = modes.get(path, inner.training)
            for attribute, stored in memory.get(path, {}).items():
                if stored is None:
                    vars(inner).pop(attribute, None)
                else:
                    vars(inner)[attribute] = sample.get(stored, device)
        yield
    finally:
        for inner, mode in before.items():
            inner.training = mode


def _flat(value: object) -> dict[str, Tensor]:
    """The tensors of an output by name; a single one has none."""
    if isinstance(value, Tensor):
        return {"": value}
    outputs: dict[str, Tensor] = {}
    if is_tensordict(value):
        for key, item in value.items(True, True):
            if isinstance(item, Tensor):
                name = ".".join(key) if isinstance(key, tuple) else key
                outputs[f"'{name}'"] = item
    elif isinstance(value, tuple | list):
        for number, item in enumerate(value):
            for tensor in _flat(item).values():
                outputs[f"output {number}"] = tensor
    return outputs


def _apart(one: Tensor, other: Tensor) -> float:
    """How far two outputs are apart, relative to the largest finite number; infinite if shapes differ."""
    if one.shape != other.shape:
        return math.inf
    one = one.double()
    other = other.to(one.device).double()
    same = (one == other) | (one.isnan() & other.isnan())
    if same.all():
        return 0.0
    # A policy may mask choices by infinite numbers: they neither differ from themselves nor are a measure.
    largest = one.masked_fill(~one.isfinite(), 0.0).abs().max().clamp_min(1.0)
    apart = ((one - other).abs().masked_fill(same, 0.0).max() / largest).item()
    if math.isnan(apart):
        return math.inf
    return apart
