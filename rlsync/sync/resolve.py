"""A sync map becomes a plan, leaf by leaf, before anything runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tensordict.nn import TensorDictParams
from torch import Tensor, nn

from rlsync.core import errors
from rlsync.core.path import Attr, Path, parse, walk
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
from rlsync.core.user_input import did_you_mean, nearest_name, short
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
        if _walk_source(root, self.path, "") is not self.leaves.root:
            return False
        if not self.leaves.unchanged():
            return False
        return all(memory_key(one.read()) == memory_key(other.read()) for one, other in self.ties)

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
    places = {route.destination: _places(route.destination, endpoint) for route in bound}
    first_at: dict[object, tuple[Tensor, str]] = {}
    for route in bound:
        for sent in route.sent:
            (destination, name) = sent.key
            tensor = sent.leaf.read()
            place = places[destination].get(name, (destination, name))
            first, source = first_at.setdefault(place, (tensor, route.route.source))
            if source != route.route.source and memory_key(first) != memory_key(tensor):
                problem = f"{destination}.{name} is the same memory as another leaf that is sent"
                cure = (
                    "let each leaf come from one place, and leaves that are tied from tied leaves"
                )
                raise errors.AmbiguousSource(problem, f"{route.route.source}, and {source}", cure)


def _places(destination: str, endpoint: Endpoint) -> dict[str, object]:
    """By name, what is equal for leaves that stand in the same memory."""
    live = endpoint.tensors(destination) or {}
    places: dict[str, object] = {}
    for spec in endpoint.specs(destination) or ():
        tensor = live.get(spec.name)
        if spec.kind != "extra_state" and tensor is not None and tensor.numel():
            places[spec.name] = memory_key(tensor)
        else:
            places[spec.name] = destination, spec.tie or spec.name
    return places


def bind_route(
    destination: str, source: str | Source, root: object, endpoint: Endpoint, where: str
) -> BoundRoute:
    """Resolve one entry of a map on both sides; refuse what cannot be sent, or would not arrive."""
    declared = source if isinstance(source, Source) else Source(source)
    path = parse(declared.path)
    target = parse(destination)
    dtype = _floating_name(declared.dtype, where)
    route = Route(str(target), str(path), dtype, declared.exclude, declared.idle)

    leaves = Leaves(_source(root, path, target, where), str(path), shards=True)
    # From here on, the destination is the endpoint's own, and the prefix leads on below it.
    destination, prefix = endpoint.locate(target, where)
    _refuse_to_leave_out(route, endpoint, destination, where)
    if not endpoint.takes_parts:
        refuse_parts(leaves, f"{where}, {endpoint.description}")

    comparisons, names = _compare(route, leaves, endpoint, destination, prefix)
    there = [spec.name for spec in _below(endpoint.specs(destination) or [], prefix)]
    _check_patterns(route, list(dict.fromkeys([*names, *there])), where)

    by_name = dict(zip(names, leaves.leaves, strict=True))
    sent = _sent(comparisons, by_name, destination, prefix)
    require_board([one.leaf for one in sent], endpoint.publisher.transport, leaves.where)
    ties = [(one.leaf, by_name[one.spec.tie]) for one in sent if one.spec.tie in by_name]
    return BoundRoute(
        route,
        path,
        destination,
        prefix,
        leaves=leaves,
        comparisons=comparisons,
        sent=sent,
        ties=ties,
    )


def _source(root: object, path: Path, target: Path, where: str) -> object:
    """The object that a source path leads to; it must hold the weights that are trained."""
    try:
        source = _walk_source(root, path, where)
    except errors.SourceNotFound as error:
        # If the destination is a path on the trainer, the entry is the wrong way round.
        try:
            _walk_source(root, target, where)
        except errors.SourceNotFound:
            raise error from None
        cure = f"the destination comes first: write {{{str(path)!r}: {str(target)!r}}}"
        raise errors.SourceNotFound(error.what, error.where, cure) from None
    check_trained(root, path, where)
    return source


def _refuse_to_leave_out(route: Route, endpoint: Endpoint, destination: str, where: str) -> None:
    """Refuse a leaf that is excluded where the workers wait for every leaf (LayoutMismatch)."""
    if not endpoint.needs_every_leaf:
        return
    for spec in endpoint.specs(destination) or ():
        if excluded(spec.name, route.exclude):
            name = f"{destination}.{spec.name}"
            problem = f"{name} would not be sent, and the workers would wait for it for ever"
            cure = (
                "send every leaf: leave exclude out, or use a collector that a BoardScheme serves"
            )
            raise errors.LayoutMismatch(problem, f"{where}, {endpoint.description}", cure)


def _check_patterns(route: Route, names: Sequence[str], where: str) -> None:
    """Refuse a pattern that matches no leaf on either side (LayoutMismatch)."""
    for pattern in (*route.exclude, *route.idle):
        if not any(excluded(name, [pattern]) for name in names):
            near = did_you_mean(nearest_name(pattern, names))
            problem = f"no leaf is named like {pattern!r}"
            cure = f"{near}leaves: {', '.join(names[:12])}"
            raise errors.LayoutMismatch(
                problem, f"{where}, exclude or idle of {route.source}", cure
            )


def _sent(
    comparisons: Sequence[LeafComparison],
    by_name: Mapping[str, Leaf],
    destination: str,
    prefix: str,
) -> list[SentLeaf]:
    """The leaves that publishes bring, or that are at their destination already."""
    stem = f"{prefix}." if prefix else ""
    sent = []
    for comparison in comparisons:
        if comparison.verdict is Verdict.ALIASED or comparison.verdict in MOVED:
            spec = comparison.spec
            leaf = SentLeaf(
                leaf=by_name[comparison.name],
                key=(destination, stem + comparison.name),
                spec=spec,
                verdict=comparison.verdict,
                moved_bytes=0 if spec.tie else spec.payload_bytes,
            )
            sent.append(leaf)
    return sent


def _compare(
    route: Route, leaves: Leaves, endpoint: Endpoint, destination: str, prefix: str
) -> tuple[list[LeafComparison], list[str]]:
    """The verdicts on a route's leaves, and the names of the source's leaves at the destination."""
    all_specs = endpoint.specs(destination)
    specs = leaves.specs()
    leaves.check_has_bytes()
    comparisons = []
    if all_specs is None:
        note = "this collector does not show its weights: unchecked"
        for spec in specs:
            there = replace(spec, device="")
            comparison = LeafComparison(spec.name, there, Verdict.COPIED, note, spec.device)
            comparisons.append(comparison)
        return comparisons, leaves.names

    expected = _below(all_specs, prefix)
    names = named_like(leaves.names, expected)
    renamed = [replace(spec, name=name) for spec, name in zip(specs, names, strict=True)]
    comparisons = compare(
        renamed,
        expected,
        cast_to=dtype_named(route.dtype) if route.dtype else None,
        exclude=route.exclude,
        source_tensors=dict(zip(names, leaves.tensors(), strict=True)),
        destination_tensors=endpoint.tensors(destination),
    )
    return comparisons, names


def _below(specs: list[LeafSpec], prefix: str) -> list[LeafSpec]:
    """The leaves below a prefix, without it."""
    if not prefix:
        return specs
    dotted = prefix + "."
    below = []
    for spec in specs:
        if spec.name.startswith(dotted):
            name = spec.name.removeprefix(dotted)
            below.append(replace(spec, name=name, tie=spec.tie.removeprefix(dotted)))
    return below


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
    wanted = Leaves(trained, "source_params")
    # TorchRL's keys have the prefixes of wrappers
    by_path = {leaf.path: leaf.read() for leaf in live.leaves}
    for name, tensor in zip(wanted.names, wanted.tensors(), strict=True):
        here = by_path.get(name)
        if here is None:
            return f"it has no {name}"
        if memory_key(here) != memory_key(tensor):
            return f"its {name} {tuple(here.shape)} is not the trained one {tuple(tensor.shape)}"
    return ""


def plan_of(bound: list[BoundRoute], endpoint: Endpoint, training: Training) -> SyncPlan:
    """The plan of bound routes, without what may change while ``training`` goes on."""
    # Where no weights travel, the leaves are those of the source, and nobody has to examine them.
    sent_to = set()
    for route in bound:
        if any(comparison.verdict in MOVED for comparison in route.comparisons):
            sent_to.add(route.destination)
    acting = endpoint.acting(sent_to)

    # Several routes may have one destination: names stand once, in the order of the map.
    rows: list[Row] = []
    differs: dict[str, str] = {}
    outlives: dict[str, bool] = {}
    statistics: dict[str, None] = {}
    for route in bound:
        rows += [_row(route, comparison, acting) for comparison in route.comparisons]
        settings = acting.settings.get(route.destination, {})
        for path, text in unlike(settings, route.prefix, route.leaves.root, str(route.path)):
            differs[f"{route.route.destination}.{path}"] = text
        for path, layer in settings.items():
            name = f"{route.destination}.{path}"
            if name.endswith(BATCH_STATISTICS):
                statistics[f"{name.removesuffix(BATCH_STATISTICS)} ({layer})"] = None
        outlives |= dict.fromkeys(acting.outlives.get(route.destination, ()), acting.by_copy)

    return SyncPlan(
        tuple(route.route for route in bound),
        tuple(rows),
        endpoint.description,
        notes=(*endpoint.notes, *acting.remarks()),
        unreached=_unreached(bound, endpoint, training),
        differs=differs,
        batch_statistics=tuple(statistics),
        outlives=outlives,
        through_host=endpoint.publisher.transport.through_host,
    )


def _unreached(
    bound: Sequence[BoundRoute], endpoint: Endpoint, training: Training
) -> tuple[str, ...]:
    """The leaves of what acts that are in no entry, and of which no entry or optimizer has the memory."""
    around = endpoint.around()
    known = [*training.parameters(), *training.named().values()]
    stems = []
    for route in bound:
        known += (endpoint.tensors(route.destination) or {}).values()
        stem = f"{route.destination}."
        if route.prefix:
            stem += f"{route.prefix}."
        stems.append(stem)
    covered = Covered(known)
    unreached = []
    for name, tensor in around.items():
        if name.startswith(tuple(stems)):
            continue
        if tensor is None or tensor not in covered:
            unreached.append(name)
    return tuple(unreached)


def with_training(
    plan: SyncPlan, bound: list[BoundRoute], root: object, training: Training
) -> SyncPlan:
    """The plan, with what is sent and not trained, and what is trained and not sent."""
    trained = Covered(training.parameters())
    networks: dict[str, nn.Module] = {}
    parameters: list[tuple[str, Tensor]] = []
    tensors: list[Tensor] = []
    for route in bound:
        network = training.network_of(root, route.path)
        if network is not None:
            path, module = network
            networks[path] = module
        parameters += route.parameters()
        tensors += route.tensors()
    return replace(
        plan,
        unheld=unheld(parameters, trained),
        unsent=unsent(networks, tensors, trained),
    )


def _row(bound: BoundRoute, comparison: LeafComparison, acting: Acting) -> Row:
    route = bound.route
    spec = comparison.spec
    name = comparison.name
    moved = comparison.verdict in MOVED and not spec.tie
    leaf = f"{bound.prefix}.{name}" if bound.prefix else name
    idle = moved and acting.is_idle(bound.destination, leaf)
    declared = excluded(name, route.idle)
    note = comparison.note
    if spec.tie and not note:
        note = f"tied to {spec.tie}"
    if idle and declared:
        note = f"{IDLE}, as declared"
    elif idle and acting.by_copy:
        note = f"{IDLE}; {BY_COPY}"
    elif idle:
        note = IDLE
    return Row(
        destination=f"{route.destination}.{name}",
        source=f"{route.source}.{name}",
        verdict=comparison.verdict,
        kind=spec.kind,
        shape=spec.shape,
        dtype=spec.dtype_name,
        payload_bytes=spec.payload_bytes if moved else 0,
        note=note,
        source_device=comparison.source_device,
        device=spec.device,
        idle=idle and not declared,
    )
