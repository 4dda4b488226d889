"""A sync map becomes a plan, leaf by leaf, before anything runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tensordict.nn import TensorDictParams
from torch import Tensor, nn

from rlsync.core import errors
from rlsync.core.path import Attr, Path, did_you_mean, nearest_name, parse, short, walk
from rlsync.core.plan import (
    BATCH_STATISTICS,
    BY_COPY,
    IDLE,
    MOVED,
    Route,
    Row,
    Source,
    SyncPlan,
    Verdict,
)
from rlsync.sync.acts import Acting
from rlsync.sync.endpoint import Endpoint
from rlsync.sync.held import unlike
from rlsync.sync.sharded.ranks import require_board
from rlsync.sync.trained import Training, unheld, unsent
from rlsync.tensors.compare import LeafComparison, compare, excluded, named_like
from rlsync.tensors.device import Covered
from rlsync.tensors.layout import LeafSpec, dtype_name, dtype_named
from rlsync.tensors.leaves import Leaf, Leaves, memory_key
from rlsync.transport.rules import Key

SyncMap = Mapping[str, str | Source]


@dataclass(frozen=True, slots=True)
class SentLeaf:
    """A source leaf that is sent, and the destination leaf that it goes to."""

    leaf: Leaf  #: of the source
    key: Key  #: of the destination
    spec: LeafSpec  #: of the destination
    verdict: Verdict
    moved_bytes: int  #: 0 if it is tied to another leaf, which brings the bytes of both


@dataclass
class BoundRoute:
    """A route tied to live objects."""

    route: Route
    path: Path  #: the source path, parsed
    destination: str  #: with ``prefix``, where the route leads on the endpoint
    prefix: str
    leaves: Leaves  #: of the source
    comparisons: list[LeafComparison]
    sent: list[SentLeaf]
    #: source leaves that go to one piece of memory, and must be one themselves
    ties: list[tuple[Leaf, Leaf]]

    def current(self, root: object) -> bool:
        """Whether the source still is the object, of the same make and ties, that was resolved."""
        same = _walk_source(root, self.path, "") is self.leaves.root and self.leaves.unchanged()
        return same and all(
            memory_key(one.read()) == memory_key(other.read()) for one, other in self.ties
        )

    def tensors(self) -> list[Tensor]:
        """The present source tensors that are sent."""
        return [sent.leaf.read() for sent in self.sent]

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """The present source tensors of the destination's parameters, by its full leaf names."""
        below = len(self.prefix) + 1 if self.prefix else 0
        for sent in self.sent:
            if sent.spec.kind == "parameter":
                yield f"{self.route.destination}.{sent.key[1][below:]}", sent.leaf.read()


def bind_routes(sync_map: SyncMap, root: object, endpoint: Endpoint) -> list[BoundRoute]:
    """Resolve every entry; refuse a path that is wrong, untrained weights, and two entries that meet."""
    if not isinstance(sync_map, Mapping):
        problem = f"a sync map is a mapping, got {type(sync_map).__name__}"
        raise errors.ConfigError(
            problem, short(sync_map), "write {'policy': 'loss_module.actor_network'}"
        )
    if not sync_map:
        raise errors.NothingToSync(
            "the sync map is empty", "sync map", "name at least one destination"
        )
    bound: list[BoundRoute] = []
    source_of: dict[str, str] = {}
    for number, (destination, source) in enumerate(sync_map.items(), start=1):
        where = f"sync map, entry {number}"
        route = bind_route(destination, source, root, endpoint, where)
        stem = parse(route.route.destination).leaf_prefix()
        for comparison in route.comparisons:
            leaf = f"{stem}.{comparison.name}"
            if leaf in source_of:
                problem = f"{leaf} has two sources"
                both = f"{route.route.source}, and {source_of[leaf]}"
                raise errors.AmbiguousSource(
                    problem, f"{where}: {both}", "let each leaf come from one place"
                )
            source_of[leaf] = route.route.source
        bound.append(route)
    _refuse_shared_places(bound, endpoint)
    return bound


def _refuse_shared_places(bound: Sequence[BoundRoute], endpoint: Endpoint) -> None:
    """Refuse two sources for one piece of memory: ties between entries, and indices from the end."""
    destinations = dict.fromkeys(route.destination for route in bound)
    places = {destination: _places(destination, endpoint) for destination in destinations}
    taken: dict[object, tuple[Tensor, str]] = {}
    for route in bound:
        for sent in route.sent:
            (destination, name) = sent.key
            tensor = sent.leaf.read()
            place = places[destination].get(name, (destination, name))
            there, source = taken.setdefault(place, (tensor, route.route.source))
            if source != route.route.source and memory_key(there) != memory_key(tensor):
                problem = f"{destination}.{name} is the same memory as another leaf that is sent"
                cure = (
                    "let each leaf come from one place, and leaves that are tied from tied leaves"
                )
                raise errors.AmbiguousSource(problem, f"{route.route.source}, and {source}", cure)


def _places(destination: str, endpoint: Endpoint) -> dict[str, object]:
    """By name, what is equal for leaves that stand in the same memory."""
    live = endpoint.tensors(destination) or {}
    found: dict[str, object] = {}
    for spec in endpoint.specs(destination) or ():
        tensor = None if spec.kind == "extra_state" else live.get(spec.name)
        if tensor is not None and tensor.numel():
            found[spec.name] = memory_key(tensor)
        else:
            found[spec.name] = destination, spec.tie or spec.name
    return found


def bind_route(
    destination: str, source: str | Source, root: object, endpoint: Endpoint, where: str
) -> BoundRoute:
    declared = source if isinstance(source, Source) else Source(source)
    path = parse(declared.path)
    target = parse(destination)
    dtype = _floating_name(declared.dtype, where)
    route = Route(str(target), str(path), dtype, declared.exclude, declared.idle)
    try:
        live = _walk_source(root, path, where)
    except errors.SourceNotFound as error:
        try:
            _walk_source(root, target, where)
        except errors.SourceNotFound:
            raise error from None
        cure = f"the destination comes first: write {{{str(path)!r}: {str(target)!r}}}"
        raise errors.SourceNotFound(error.what, error.where, cure) from None
    check_trained(root, path, where)
    leaves = Leaves(live, str(path), shards=True)
    found, prefix = endpoint.locate(target, where)
    for spec in (endpoint.specs(found) or ()) if endpoint.needs_every_leaf else ():
        if excluded(spec.name, route.exclude):
            problem = (
                f"{found}.{spec.name} would not be sent, and the workers would wait for it for ever"
            )
            cure = (
                "send every leaf: leave exclude out, or use a collector that a BoardScheme serves"
            )
            raise errors.LayoutMismatch(problem, f"{where}, {endpoint.description}", cure)
    if not endpoint.takes_parts:
        refuse_parts(leaves, f"{where}, {endpoint.description}")
    comparisons, names = _compare(route, leaves, endpoint, found, prefix)
    there = [spec.name for spec in _below(endpoint.specs(found) or [], prefix)]
    either = list(dict.fromkeys([*names, *there]))
    for pattern in (*route.exclude, *route.idle):
        if not any(excluded(name, [pattern]) for name in either):
            near = did_you_mean(nearest_name(pattern, either))
            problem = f"no leaf is named like {pattern!r}"
            cure = f"{near}leaves: {', '.join(either[:12])}"
            raise errors.LayoutMismatch(
                problem, f"{where}, exclude or idle of {route.source}", cure
            )
    by_name = dict(zip(names, leaves.leaves, strict=True))
    stem = f"{prefix}." if prefix else ""
    sent = []
    for c in comparisons:
        if c.verdict is Verdict.ALIASED or c.verdict in MOVED:
            key = (found, stem + c.name)
            moved_bytes = 0 if c.spec.tie else c.spec.payload_bytes
            sent.append(SentLeaf(by_name[c.name], key, c.spec, c.verdict, moved_bytes))
    require_board([s.leaf for s in sent], endpoint.publisher.transport, leaves.where)
    ties = [(s.leaf, by_name[s.spec.tie]) for s in sent if s.spec.tie in by_name]
    return BoundRoute(route, path, found, prefix, leaves, comparisons, sent, ties)


def _compare(
    route: Route, leaves: Leaves, endpoint: Endpoint, destination: str, prefix: str
) -> tuple[list[LeafComparison], list[str]]:
    all_specs = endpoint.specs(destination)
    specs = leaves.specs()
    leaves.check_has_bytes()
    if all_specs is None:
        unseen = "this collector does not show its weights: unchecked"
        return [
            LeafComparison(s.name, replace(s, device=""), Verdict.COPIED, unseen, s.device)
            for s in specs
        ], leaves.names
    there = _below(all_specs, prefix)
    names = named_like(leaves.names, there)
    renamed = [replace(spec, name=name) for spec, name in zip(specs, names, strict=True)]
    live = endpoint.tensors(destination)
    comparisons = compare(
        renamed,
        there,
        cast_to=dtype_named(route.dtype) if route.dtype else None,
        exclude=route.exclude,
        source_tensors=dict(zip(names, leaves.tensors(), strict=True)),
        destination_tensors=live,
    )
    return comparisons, names


def _below(specs: list[LeafSpec], prefix: str) -> list[LeafSpec]:
    if not prefix:
        return specs
    dotted = prefix + "."
    return [
        replace(s, name=s.name.removeprefix(dotted), tie=s.tie.removeprefix(dotted))
        for s in specs
        if s.name.startswith(dotted)
    ]


def refuse_parts(leaves: Leaves, where: str) -> None:
    """Refuse (LayoutMismatch) a tensor that is made of parts, which TorchRL's own schemes do not carry."""
    for leaf in leaves.leaves:
        if leaf.whole:
            problem = f"{leaf.whole} is made of parts, which TorchRL's own schemes do not carry"
            raise errors.LayoutMismatch(
                problem, where, "use a BoardScheme, or a RayBoardScheme with Ray"
            )


def _floating_name(dtype: object, where: str) -> str:
    if dtype is None:
        return ""
    name = dtype_name(dtype)
    try:
        floating = dtype_named(name).is_floating_point
    except KeyError:
        floating = False
    if not floating:
        raise errors.ConfigError(
            f"{dtype!r} is no floating dtype", where, "for example dtype='bfloat16'"
        )
    return name


def _walk_source(root: object, path: Path, where: str) -> object:
    return walk(root, path, error=errors.SourceNotFound, root_name="the trainer", where=where)


def check_trained(root: object, path: Path, where: str) -> None:
    """Refuse a module whose trained weights are in ``<name>_params``, and name that path.

    ``qvalue_network`` of SACLoss is the user's module, untouched; a deep-copied loss has even a stale
    ``actor_network``.
    """
    for depth, segment in enumerate(path.segments):
        if not isinstance(segment, Attr):
            continue
        if depth:
            parent = _walk_source(root, Path(path.segments[:depth]), where)
        else:
            parent = root
        if isinstance(parent, nn.Module):
            children = dict(parent._modules.items())
        else:
            children = {}
        trained = children.get(f"{segment.name}_params")
        if not isinstance(trained, TensorDictParams):
            continue
        named = Path(path.segments[: depth + 1])
        module = _walk_source(root, named, where)
        if apart := _apart(module, trained):
            problem = f"{named} does not hold the weights that are trained"
            cure = (
                f"name {named}_params, which does (leading dimensions included), or build the loss "
            )
            cure += "around this module, anew if a layer was replaced, instead of copying it"
            raise errors.AmbiguousSource(problem, f"path {str(path)!r}, {where}: {apart}", cure)


def _apart(module: object, trained: TensorDictParams) -> str:
    """The first trained leaf that a module does not hold, in words; empty if it holds all."""
    live = Leaves(module, "source")
    held = Leaves(trained, "source_params")
    # TorchRL's keys have the prefixes of wrappers
    by_path = {leaf.path: leaf.read() for leaf in live.leaves}
    for name, tensor in zip(held.names, held.tensors(), strict=True):
        if (here := by_path.get(name)) is None:
            return f"it has no {name}"
        if memory_key(here) != memory_key(tensor):
            return f"its {name} {tuple(here.shape)} is not the trained one {tuple(tensor.shape)}"
    return ""


def plan_of(bound: list[BoundRoute], endpoint: Endpoint, training: Training) -> SyncPlan:
    """The plan of bound routes, without what may change while ``training`` goes on."""
    acting = endpoint.acting(
        {b.destination for b in bound if any(c.verdict in MOVED for c in b.comparisons)}
    )
    differs = {
        f"{b.route.destination}.{path}": text
        for b in bound
        for path, text in unlike(
            acting.settings.get(b.destination, {}), b.prefix, b.leaves.root, str(b.path)
        )
    }
    statistics = dict.fromkeys(
        f"{b.destination}{f'.{path}'.removesuffix(BATCH_STATISTICS)} ({layer})"
        for b in bound
        for path, layer in acting.settings.get(b.destination, {}).items()
        if f".{path}".endswith(BATCH_STATISTICS)
    )
    names = (acting.outlives.get(destination, ()) for destination in {b.destination for b in bound})
    rows = [_row(b, c, acting) for b in bound for c in b.comparisons]
    around = endpoint.around()
    here = [tensor for b in bound for tensor in (endpoint.tensors(b.destination) or {}).values()]
    known = Covered([*here, *training.parameters(), *training.named().values()])
    stems = tuple(f"{b.destination}.{b.prefix and b.prefix + '.'}" for b in bound)
    return SyncPlan(
        tuple(b.route for b in bound),
        tuple(rows),
        endpoint.description,
        notes=(*endpoint.notes, *acting.remarks()),
        unreached=tuple(
            name
            for name, t in around.items()
            if not name.startswith(stems) and (t is None or t not in known)
        ),
        differs=differs,
        batch_statistics=tuple(statistics),
        outlives=dict.fromkeys((name for of_one in names for name in of_one), acting.by_copy),
        through_host=endpoint.publisher.transport.through_host,
    )


def with_training(
    plan: SyncPlan, bound: list[BoundRoute], root: object, training: Training
) -> SyncPlan:
    """The plan, with what is sent and not trained, and what is trained and not sent."""
    held = Covered(training.parameters())
    networks = dict(filter(None, (training.network_of(root, b.path) for b in bound)))
    return replace(
        plan,
        unheld=unheld((named for b in bound for named in b.parameters()), held),
        unsent=unsent(networks, (tensor for b in bound for tensor in b.tensors()), held),
    )


def _row(bound: BoundRoute, comparison: LeafComparison, acting: Acting) -> Row:
    route = bound.route
    spec = comparison.spec
    moved = comparison.verdict in MOVED and not spec.tie
    note = comparison.note or (f"tied to {spec.tie}" if spec.tie else "")
    if bound.prefix:
        leaf = f"{bound.prefix}.{comparison.name}"
    else:
        leaf = comparison.name
    idle = moved and acting.is_idle(bound.destination, leaf)
    declared = excluded(comparison.name, route.idle)
    if idle:
        reached = f"; {BY_COPY}" if acting.by_copy and not declared else ""
        note = IDLE + (", as declared" if declared else reached)
    destination, source = (
        f"{path}.{comparison.name}" for path in (route.destination, route.source)
    )
    form = spec.kind, spec.shape, spec.dtype_name, spec.payload_bytes if moved else 0
    seen = comparison.source_device, spec.device, idle and not declared
    return Row(destination, source, comparison.verdict, *form, note, *seen)
