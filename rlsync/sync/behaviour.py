"""Proof of behaviour: what acts computes what the learner's module computes with the published weights.

The learner calls the source's parts on the inputs of a worker's :class:`rlsync.sync.sample.Sample`, with the
image of the version that acted and with the weights of now. If both give what the worker's part gave, the
comparison has no power.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from rlsync.sync.acts import undisturbed
from rlsync.sync.resolve import BoundRoute
from rlsync.sync.sample import Judgement, PartCall, Sample, selected
from rlsync.tensors.layout import dtype_named
from rlsync.tensors.sharded import is_sharded
from rlsync.tensors.wrappers import is_tensordict, is_tensordict_params, unwrap
from rlsync.transport.rules import Key

#: By dtype: how far outputs may be apart, relative to the largest one, where both sides compute alike.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 3e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def judge(sample: Sample, routes: Sequence[BoundRoute], image: Mapping[Key, Tensor]) -> Judgement:
    """Compare a worker's outputs with the sources': with its version's image, and with the weights now."""
    wrong: list[str] = []
    powerless: list[str] = []
    uncompared: list[str] = []
    held = 0
    for route in routes:
        name = route.route.destination
        calls, why = _comparable(sample, route, image)
        if why:
            uncompared.append(f"{name}: {why}")
            continue
        verdicts = [_judged(sample, call, route, image) for call in calls]
        wrong += [f"{name}: {verdict.wrong}" for verdict in verdicts if verdict.wrong]
        uncompared += [f"{name}: {verdict.why}" for verdict in verdicts if verdict.why]
        compared = [verdict for verdict in verdicts if not verdict.why]
        if compared and not any(verdict.moves for verdict in compared):
            powerless.append(name)
        elif compared and not any(verdict.wrong for verdict in compared):
            held += 1
    return Judgement(tuple(wrong), held, tuple(powerless), tuple(uncompared))


def _comparable(sample: Sample, route: BoundRoute, image: Mapping[Key, Tensor]) -> tuple[list[PartCall], str]:
    """The outermost recorded calls of what a route feeds; or why they cannot be compared."""
    if sample.why_not:
        return [], sample.why_not
    root = route.leaves.root
    if not isinstance(root, nn.Module) or is_tensordict_params(root):
        return [], f"its source {route.route.source} cannot be called"
    if any(is_sharded(tensor) for tensor in route.tensors()):
        return [], "its source is spread over ranks"
    if any(sent.key not in image for sent in route.sent):
        return [], "it shares memory with its source"
    inside = [
        call
        for call in sample.calls
        if call.destination == route.destination and _below(call, route.prefix) is not None
    ]
    names = {call.module for call in inside}
    outer = [call for call in inside if not any(_is_within(call.module, name) for name in names)]
    outer = [call for call in outer if _part(route, call) is not None]
    return outer, "" if outer else "no part of it was called exactly once with tensors"


def _below(call: PartCall, prefix: str) -> str | None:
    """The path of the part below the route's prefix; None if it is not there."""
    if not prefix or call.module == prefix:
        return call.module if not prefix else ""
    return call.module.removeprefix(prefix + ".") if call.module.startswith(prefix + ".") else None


def _is_within(name: str, other: str) -> bool:
    return name != other and (not other or name.startswith(other + "."))


def _part(route: BoundRoute, call: PartCall) -> nn.Module | None:
    """The part of the source that stands where the worker's part stands."""
    root = unwrap(route.leaves.root, route.leaves.where) if isinstance(route.leaves.root, nn.Module) else None
    below = _below(call, route.prefix)
    parts = {} if root is None else dict(root.named_modules())
    return None if below is None else parts.get(below)


@dataclass(frozen=True, slots=True)
class _Verdict:
    wrong: str = ""
    moves: bool = False  #: whether other weights give other outputs
    why: str = ""


def _judged(sample: Sample, call: PartCall, route: BoundRoute, image: Mapping[Key, Tensor]) -> _Verdict:
    part = _part(route, call)
    assert part is not None
    below = str(_below(call, route.prefix))
    published, now = _weights(sample, route, image, below)
    device = next((tensor.device for tensor in route.tensors()), torch.device("cpu"))
    acted = _flat(sample.get(call.outs, device))
    name = f"{type(part).__name__} {below}".strip()
    try:
        again = [
            _outputs(sample, call, part, weights, device, seed)
            for weights, seed in ((published, 1), (published, 2), (now, 1))
        ]
    except Exception as error:  # noqa: BLE001 - the learner's module need not be callable on its own
        return _Verdict(why=f"{name} raises {type(error).__name__} in the learner's process")
    with_published, repeated, with_now = again
    fixed = [
        key for key in with_published if _apart(with_published[key], repeated[key]) == 0 and key in acted
    ]
    if not fixed:
        return _Verdict(why=f"the outputs of {name} are random")
    allowed = max(
        TOLERANCE.get(t.dtype, TOLERANCE[torch.float32]) for t in (*published.values(), *route.tensors())
    )
    if route.route.dtype:
        allowed = max(allowed, TOLERANCE[dtype_named(route.route.dtype)])
    apart = {key: _apart(acted[key], with_published[key]) for key in fixed}
    worst = max(apart, key=lambda key: apart[key])
    moves = any(_apart(acted[key], with_now[key]) > allowed for key in fixed)
    if apart[worst] <= allowed:
        return _Verdict(moves=moves)
    return _Verdict(
        f"{name} gives {worst or 'an output'} that is {apart[worst]:.2g} apart from what the learner's "
        f"module computes with version {sample.version}",
        moves=True,
    )


def _weights(
    sample: Sample, route: BoundRoute, image: Mapping[Key, Tensor], below: str
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The leaves of a part of the source: as they were published, and as they are now.

    Both with the worker's own buffers and excluded leaves, where it has them.
    """
    stem = f"{route.prefix}." if route.prefix else ""
    sent = {one.leaf.name: one.key for one in route.sent}
    kept = sample.held.get(route.destination, {})
    published: dict[str, Tensor] = {}
    now: dict[str, Tensor] = {}
    dotted = f"{below}." if below else ""
    for leaf in route.leaves.leaves:
        if leaf.kind == "extra_state" or not leaf.name.startswith(dotted):
            continue
        live, name = leaf.read().detach(), leaf.name.removeprefix(dotted)
        there = sent[leaf.name][1] if leaf.name in sent else stem + leaf.name
        if there in kept:
            published[name] = now[name] = sample.tensors[kept[there]].to(live)
        else:
            now[name] = live
            published[name] = image[sent[leaf.name]].to(live) if leaf.name in sent else live
    return published, now


def _outputs(
    sample: Sample,
    call: PartCall,
    part: nn.Module,
    weights: Mapping[str, Tensor],
    device: torch.device,
    seed: int,
) -> dict[str, Tensor]:
    floats = [tensor.dtype for tensor in weights.values() if tensor.is_floating_point()]
    # Workers that compute in half precision pass it on from part to part; the learner computes as it trains.
    cast = dict.fromkeys((torch.bfloat16, torch.float16), floats[0]) if floats else {}
    args = tuple(sample.get(arg, device, cast) for arg in call.args)
    # Copies: forward() may write to buffers.
    own = {name: tensor.clone() for name, tensor in weights.items()}
    with undisturbed(part), torch.no_grad():
        torch.manual_seed(seed)
        outs = functional_call(part, own, args, strict=False)
        return _flat(selected(part, outs, "out_keys"))


def _flat(value: object) -> dict[str, Tensor]:
    """The tensors of an output by name; a single one has none."""
    if isinstance(value, Tensor):
        return {"": value}
    if is_tensordict(value):
        named = (
            (".".join(key) if isinstance(key, tuple) else key, item) for key, item in value.items(True, True)
        )
        return {f"'{name}'": item for name, item in named if isinstance(item, Tensor)}
    if isinstance(value, tuple | list):
        return {f"output {n}": t for n, item in enumerate(value) for t in _flat(item).values()}
    return {}


def _apart(one: Tensor, other: Tensor) -> float:
    """How far two outputs are apart, relative to the largest number; infinite if they are of other shapes."""
    if one.shape != other.shape:
        return math.inf
    if not one.numel():
        return 0.0
    one, other = one.double(), other.to(one.device).double()
    if torch.equal(one, other):
        return 0.0
    apart = ((one - other).abs().max() / one.abs().max().clamp_min(1.0)).item()
    return math.inf if math.isnan(apart) else apart
