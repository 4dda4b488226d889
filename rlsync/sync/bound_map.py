"""BoundMap: a checked map, tied to live sources and an endpoint. It is published, and copied out."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from weakref import WeakSet

import torch
from tensordict.nn import InteractionType, set_interaction_type
from torch import Tensor, nn

from rlsync.core.errors import PublishError, warn
from rlsync.core.plan import Receipt, SyncPlan, Verdict
from rlsync.core.trigger import Counters
from rlsync.sync.behaviour import judge
from rlsync.sync.endpoint import Endpoint
from rlsync.sync.publisher import Publish
from rlsync.sync.resolve import BoundRoute, SyncMap, bind_routes, plan_of, with_training
from rlsync.sync.sample import Image, Judgement, Sample
from rlsync.sync.sharded.ranks import require_shards
from rlsync.sync.trained import UNCHANGED_PUBLISHES, Training, Unchanged, refuse_hidden
from rlsync.tensors.device import Covered
from rlsync.tensors.digest import all_finite, digest
from rlsync.tensors.leaves import memory_key
from rlsync.tensors.parts import memory_of
from rlsync.transport.rules import Key, keyed


@dataclass
class Gathered:
    """The source tensors of one publish, sorted by what happens to them."""

    copied: dict[Key, Tensor] = field(default_factory=dict)
    aliased: set[Key] = field(default_factory=set)
    copied_bytes: int = 0
    aliased_bytes: int = 0
    cast_leaves: int = 0


@dataclass(eq=False)
class BoundMap:
    """Publishes a map, whose source paths begin at ``root``, the trainer, to the destinations of an endpoint.

    A background publish is joined before the next step of what ``training`` says writes to the sources.
    ``finite`` refuses weights that are not all finite. See :class:`rlsync.sync.trained.Unchanged` for
    ``max_unchanged_publishes``. SyncMapError if the map cannot be carried out.
    """

    sync_map: SyncMap
    root: object
    endpoint: Endpoint
    _: KW_ONLY
    training: Training = field(default_factory=Training)
    max_unchanged_publishes: int | None = UNCHANGED_PUBLISHES
    finite: bool = False

    def __post_init__(self) -> None:
        self._unchanged = Unchanged(self.max_unchanged_publishes, self.training)
        self._routes: list[BoundRoute] = []
        self._aliased: set[Key] = set()
        self._joined: WeakSet[torch.optim.Optimizer] = WeakSet()
        self._sharded = False  #: whether other ranks of the learner bring parts of the leaves
        self._plan: SyncPlan
        self._bind()
        for route in self._routes:
            refuse_hidden(route.leaves, self.training)
            network = self.training.network_of(self.root, route.path)
            why = self.training.why_nothing_learns(route.route.source, route.tensors(), network)
            if why is not None and self.max_unchanged_publishes is not None:
                warn(why)

    def _bind(self) -> None:
        self._routes = bind_routes(self.sync_map, self.root, self.endpoint)
        self._plan = plan_of(self._routes, self.endpoint, self.training).check()
        self._unchanged.restart([sent.leaf for route in self._routes for sent in route.sent])
        gathered = self._gather()
        if not self._aliased:
            self._aliased = gathered.aliased
        self._sharded = self._plan.count(Verdict.SHARDED) > 0
        if self._sharded:
            self.endpoint.publisher.meet_ranks(gathered.copied).finite = self.finite

    @property
    def plan(self) -> SyncPlan:
        """The resolved map, with what is known of training now."""
        return with_training(self._plan, self._routes, self.root, self.training)

    def judge(self, sample: Sample, images: Sequence[Image]) -> Judgement:
        """Whether a worker's policy computed what the sources compute with the image of its version."""
        # as the worker's sample was taken
        with set_interaction_type(InteractionType.DETERMINISTIC):
            judged = judge(sample, self._routes, images)
        return replace(judged, wrong=(*judged.wrong, *self._falsely_aliased()))

    def _falsely_aliased(self) -> Iterator[str]:
        """Leaves that no publish copies, and that are not what their sources are."""
        for route in self._routes:
            live = self.endpoint.tensors(route.destination) or {}
            for sent in route.sent:
                if sent.key not in self._aliased:
                    continue
                there = live.get(sent.key[1])
                if there is not None and digest([there]) != digest([sent.leaf.read()]):
                    name = f"{route.route.destination}.{sent.leaf.name}"
                    yield f"{name} is not copied, as if it were the learner's memory, and has other numbers"

    def brought(self) -> set[Key]:
        """The leaves that a publish brings, aliased ones included."""
        return {sent.key for route in self._routes for sent in route.sent}

    def aliased(self) -> Iterator[tuple[Key, Tensor]]:
        """The leaves that the policy shares with their sources, as they are now: no publish copies them."""
        for route in self._routes:
            for sent in route.sent:
                if sent.key in self._aliased:
                    yield sent.key, sent.leaf.read().detach()

    def copies(self) -> dict[Key, Tensor]:
        """A copy of what each source holds now, in the dtype that its destination has."""
        copies: dict[Key, Tensor] = {}
        for route in self._routes:
            for sent in route.sent:
                copies[sent.key] = sent.leaf.read().detach().to(sent.spec.dtype, copy=True)
        return copies

    def _sources(self, sent: Collection[Key]) -> dict[Key, Tensor]:
        """What the sources hold now, read from them one by one.

        Not by way of a layout, its ties or an image, so that a fault in these shows.
        """
        return {key: tensor for key, tensor in self.copies().items() if key in sent}

    def memory(self) -> set[object]:
        """What is equal for tensors that share memory with a source, or a destination of this process."""
        keys: set[object] = set()
        for route in self._routes:
            live = self.endpoint.tensors(route.destination) or {}
            keys.update(map(memory_key, route.tensors()))
            keys.update(map(memory_key, live.values()))
        return keys

    def acts_in(self, policy: nn.Module | None) -> bool:
        """Whether a policy acts with the memory of the sources, or may do so in another process."""
        sources: list[Tensor] = []
        for route in self._routes:
            sources += route.tensors()
        if any(tensor.is_shared() for tensor in sources if tensor.is_cpu):
            return True
        if policy is None:
            return False
        covered = Covered(sources)
        return any(parameter in covered for parameter in policy.parameters())

    def publish(self, reason: str, now: Counters, *, in_background: bool = False) -> Receipt:
        """Publish the present weights as one version; ``reason`` and the counters go into the receipt.

        With ``in_background``, what the optimizers write is copied after this has returned, and before their
        next step. Everything else is copied at once: forward() writes to buffers, and nobody knows who writes
        to the rest.

        Raises:
            SyncMapError: the sources have changed and do not fit any more.
            PublishError: a weight is not finite, and ``finite`` was asked for.
        """
        with self.endpoint.publisher.begin() as publish:
            return self._fill(publish, reason, now, in_background)

    def publish_unless_held(
        self,
        gates: Iterable[Callable[[], bool]],
        reason: str,
        now: Counters,
        *,
        in_background: bool,
    ) -> Receipt | None:
        """Publish, as :meth:`publish` does, if every gate is open; ``None`` if one is not.

        They are asked when the publish before is visible.
        """
        with self.endpoint.publisher.begin() as publish:
            if not all(gate() for gate in gates):
                return None
            return self._fill(publish, reason, now, in_background)

    def _fill(self, publish: Publish, reason: str, now: Counters, in_background: bool) -> Receipt:
        started = time.perf_counter()
        # Sources that were replaced are resolved anew, before anything is read from them.
        if not all(route.current(self.root) for route in self._routes):
            self._bind()
        if self.finite:
            self._require_finite(publish.stamp.version)
        if self._sharded:
            for route in self._routes:
                sharded = [sent.leaf for sent in route.sent if sent.verdict is Verdict.SHARDED]
                require_shards(sharded, route.route)
        self._unchanged.look(self._plan.routes, now.optim_steps)

        gathered = self._gather()
        steady = {}
        if in_background:
            steady = self._steady(gathered.copied)
        sources = partial(self._sources, gathered.copied)
        version = publish.fill(gathered.copied, steady.keys(), sources)

        # A leaf that was aliased and is copied now has left the memory of its source.
        repaired = []
        for destination, name in sorted(self._aliased & gathered.copied.keys()):
            repaired.append(f"{destination}.{name}")
        self._aliased = gathered.aliased
        receipt = Receipt(
            version=self.endpoint.publisher.version if version is None else version,
            reason=reason,
            copied_leaves=len(gathered.copied),
            aliased_leaves=len(gathered.aliased),
            cast_leaves=gathered.cast_leaves,
            copied_bytes=gathered.copied_bytes,
            aliased_bytes=gathered.aliased_bytes,
            background_bytes=sum(steady.values()),
            duration_s=time.perf_counter() - started,
            coalesced=version is None,
            repaired=tuple(repaired),
            batches=now.batches,
            frames=now.frames,
            optim_steps=now.optim_steps,
            time_s=time.time(),
        )
        if receipt.coalesced:
            return replace(
                receipt, copied_leaves=0, cast_leaves=0, copied_bytes=0, background_bytes=0
            )
        return receipt

    def _gather(self) -> Gathered:
        gathered = Gathered()
        for route in self._routes:
            live = self.endpoint.tensors(route.destination)  # looked at anew at every publish
            for sent in route.sent:
                key = sent.key
                tensor = sent.leaf.read()
                there = live.get(key[1]) if live else None
                becomes = sent.spec.dtype
                if there is not None:
                    if there is tensor or memory_key(there) == memory_key(tensor):
                        gathered.aliased.add(key)
                        gathered.aliased_bytes += sent.moved_bytes
                        continue
                    becomes = there.dtype
                gathered.copied[key] = tensor
                gathered.copied_bytes += sent.moved_bytes
                gathered.cast_leaves += becomes is not tensor.dtype
        return gathered

    def _steady(self, leaves: Mapping[Key, Tensor]) -> dict[Key, int]:
        """The bytes of leaves that nobody writes to before an optimizer steps, which awaits the copy."""
        stepped: set[object] = set()
        for optimizer in self.training.optimizers():
            if optimizer not in self._joined:
                optimizer.register_step_pre_hook(lambda *_: self.endpoint.publisher.join())
                self._joined.add(optimizer)
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    stepped.update(map(memory_key, memory_of(parameter)))
        steady: dict[Key, int] = {}
        for route in self._routes:
            for sent in route.sent:
                if sent.key in leaves and memory_key(leaves[sent.key]) in stepped:
                    steady[sent.key] = sent.moved_bytes
        return steady

    def _require_finite(self, version: int) -> None:
        for route in self._routes:
            for sent in route.sent:
                if not all_finite(sent.leaf.read(), sent.spec.dtype):
                    problem = f"{route.route.source}.{sent.leaf.name} is not finite; nothing was published"
                    cure = "look at the loss and the gradients of the last steps; resume from a checkpoint"
                    raise PublishError(
                        problem, f"version {version}, destination {route.destination!r}", cure
                    )


@dataclass(frozen=True, slots=True)
class VersionCopy:
    """The leaves that a map brings, by destination and name, of one version. Nobody writes to them."""

    version: int
    leaves: Mapping[Key, Tensor]

    def of(self, destination: str) -> dict[str, Tensor]:
        tensors = {}
        for (brought_to, name), tensor in self.leaves.items():
            if brought_to == destination:
                tensors[name] = tensor
        return tensors


class VersionCopies:
    """Copies the newest version for longer than until the next publish; without a board, at each publish."""

    def __init__(self, bound_map: BoundMap) -> None:
        self._map = bound_map
        self._kept: VersionCopy | None = None

    def published(self) -> None:
        """The map has just been published: copy it, if the transport keeps no version."""
        publisher = self._map.endpoint.publisher
        if publisher.transport.newest_leaves() is None:
            self._kept = VersionCopy(publisher.version, self._map.copies())

    def newest(self) -> VersionCopy | None:
        """The newest version, whichever thread asks; None if nobody has kept it."""
        publisher = self._map.endpoint.publisher
        transport = publisher.transport
        brought = self._map.brought()
        while True:
            stamp = transport.newest_stamp
            newest = transport.newest_leaves()
            if newest is None:
                break
            leaves = {key: leaf.clone() for key, leaf in keyed(*newest).items() if key in brought}
            # what is the newest version all the time is not written to
            if transport.newest_stamp == stamp:
                return VersionCopy(stamp.version, leaves)
        copy = self._kept
        if copy is not None and copy.version == publisher.version:
            return copy
        return None
