"""Publish and publisher: leaves by name become versions, numbered by a ledger and carried by a transport."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from torch import Tensor

from rlsync.core import trace
from rlsync.core.errors import LayoutMismatch, PublishError
from rlsync.core.ledger import Ledger
from rlsync.sync.sharded.ranks import OneRank, Ranks
from rlsync.tensors.compare import Fit
from rlsync.tensors.layout import Layout, LeafSpec
from rlsync.tensors.leaves import Leaves, memory_key
from rlsync.tensors.parts import PLAIN, is_made_of_parts
from rlsync.tensors.sharded import any_sharded
from rlsync.transport.contract import Transport
from rlsync.transport.rules import Key, held

#: ``leaves_at(destination)``: the leaves of a destination in the workers; ``None`` while nobody can tell.
LeavesAt = Callable[[str], Sequence[LeafSpec] | None]

#: ``seen(version, layout, tensors)``: a version is visible to workers; its tensors, where they were given.
Seen = Callable[[int, Layout, Sequence[Tensor | None]], None]


class Publish:
    """One publish: begun, filled, visible, recorded; :meth:`Publisher.begin` makes it, for a ``with`` block.

    It has the ledger's next number, which is used up when the version is visible, and else left to the next.
    """

    def __init__(self, publisher: Publisher, besides: Mapping[Key, Tensor]) -> None:
        self.stamp = publisher.ledger.next
        self._publisher = publisher
        self._besides = besides
        self._began_s = time.time()
        self._layout: Layout  #: once it is filled
        self._tensors: Sequence[Tensor | None] = ()
        self._sources: Mapping[Key, Tensor] = {}

    def __enter__(self) -> Publish:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self._publisher.ranks.tell(error)

    def fill(
        self,
        leaves: Mapping[Key, Tensor],
        steady: Collection[Key] = (),
        sources: Callable[[], Mapping[Key, Tensor]] | None = None,
    ) -> int | None:
        """Bring the leaves, and with them a whole version; return its number.

        Other leaves stay as they were, and other ranks bring their parts (PublishError if not). ``None`` when
        it was coalesced. Nobody may write to those in ``steady`` before the publish is joined. ``sources()``
        copies what the sources hold.
        """
        publisher = self._publisher
        if publisher.compares and sources is not None:
            began = time.perf_counter()
            self._sources = sources()
            publisher.comparing_s += time.perf_counter() - began

        # What was sent explicitly goes into the same version, in place of what these say of a leaf.
        if self._besides:
            leaves = {**leaves, **self._besides}
        _refuse_without_memory(leaves)
        self._layout, owners = publisher.lay_out(leaves)
        self._tensors = [leaves.get(key) for key in owners]
        later: Set[int] = frozenset()
        if steady:
            later = {i for i, key in enumerate(owners) if key in steady}
        version = publisher.transport.publish(self._tensors, later, stamp=self.stamp)

        # A version that is still being copied is recorded when it is joined.
        if version is None:
            publisher.coalesced += 1
        elif later:
            publisher.underway = self
        else:
            publisher.ledger.record(self.stamp)
            self._show()
        return version

    def finish(self) -> None:
        """Wait until the leaves that were put off are copied, and the version is visible.

        PublishError: one was written to meanwhile; if the copy was over by then, the version is visible all
        the same.
        """
        transport = self._publisher.transport
        try:
            transport.join()
        # a write that came too late to be seen by the copy is reported, and the version counts
        finally:
            if transport.newest_stamp == self.stamp:
                self._publisher.ledger.record(self.stamp)
        self._show()

    def _show(self) -> None:
        publisher = self._publisher
        if trace.ON:
            took_s = time.time() - self._began_s
            trace.write(trace.LEARNER, "publish", self.stamp.version, took_s=took_s)
        if publisher.announce is not None:
            publisher.announce(self.stamp.version)
        publisher.sources = self._sources
        for see in publisher.seen:
            see(self.stamp.version, self._layout, self._tensors)


@dataclass(frozen=True, slots=True)
class Laid:
    """What a transport is laid out for, and by which leaves: made anew by a publish that does not fit it."""

    keys: Set[Key]  #: of the newest publish, which fits
    layout: Layout
    owners: Sequence[Key]  #: of the layout's entries that own their bytes
    ties: Sequence[tuple[Key, Key]]  #: each leaf whose bytes are another one's, and that one
    brought: Mapping[str, Set[str]]  #: by destination: the leaves that publishes bring
    #: by destination: all leaves, also those that are kept as they were
    specs: Mapping[str, Sequence[LeafSpec]]

    def fits(self, leaves: Mapping[Key, Tensor]) -> bool:
        """Whether these leaves can be published as it is: none more, none less, and tied as they were."""
        if leaves.keys() != self.keys:
            for destination, names in _by_destination(leaves).items():
                if self.brought.get(destination) != names:
                    return False
        for tied, owner in self.ties:
            both = tied in leaves and owner in leaves
            if both and memory_key(leaves[tied]) != memory_key(leaves[owner]):
                return False
        return True


class Publisher:
    """Publishes leaves by name, as one version; destinations that a publish leaves out keep their weights.

    The ledger gives the number, by default a new one; the transport carries the bytes. A number is used up
    only when the version is visible. ``leaves_at`` says which leaves a destination has in the workers.
    """

    def __init__(
        self, transport: Transport, ledger: Ledger | None = None, leaves_at: LeavesAt | None = None
    ) -> None:
        self.transport = transport
        self.ledger = Ledger() if ledger is None else ledger
        self.coalesced = 0  #: publishes for which the transport had no room
        #: told the number of each visible version
        self.announce: Callable[[int], object] | None = None
        self.seen: list[Seen] = []  #: are told of each visible version
        self.verified = False  #: whether a Verification asks the workers
        #: whether it compares outputs: with what the sources held at each publish
        self.compares = False
        self.sources: Mapping[Key, Tensor] = {}  #: copied then, of the newest visible version
        self.comparing_s = 0.0  #: what the learner has spent on the present comparison
        #: the learner's other ranks, once a sharded leaf was met
        self.ranks: Ranks | OneRank = OneRank()
        self.underway: Publish | None = None  #: filled, and visible when it is joined
        self.leaves_at = leaves_at
        # go into the same version, whatever it is filled with
        self._besides: Mapping[Key, Tensor] = {}
        # as the transport is laid out; None before the first publish
        self._laid: Laid | None = None

    @property
    def version(self) -> int:
        """The newest published version; 0 before the first."""
        # A background copy may have made a version visible that was not joined yet.
        return max(self.ledger.version, self.transport.newest_stamp.version)

    @property
    def image_bytes(self) -> int:
        """What a version takes in memory; 0 before the first."""
        if self._laid is None:
            return 0
        return self._laid.layout.image_bytes

    def specs(self, destination: str) -> list[LeafSpec] | None:
        """The leaves of a destination in the workers; ``None`` while nobody can tell."""
        if self.leaves_at is None:
            return None
        leaves = self.leaves_at(destination)
        if leaves is None:
            return None
        return list(leaves)

    def publish_modules(self, modules: Mapping[str, object], where: str) -> None:
        """Publish every leaf of the modules, by destination, as one version; nothing when there are none.

        ``where`` says whose they are, in the LayoutMismatch that is raised if a leaf cannot travel.
        """
        tensors: dict[Key, Tensor] = {}
        for destination, module in modules.items():
            leaves = Leaves(module, f"{where}, {destination!r}")
            leaves.specs()  # refuses leaves that cannot travel
            leaves.check_has_bytes()
            for name, tensor in zip(leaves.names, leaves.tensors(), strict=True):
                tensors[destination, name] = tensor
        if modules:
            self.publish(tensors)

    def publish(self, leaves: Mapping[Key, Tensor], steady: Collection[Key] = ()) -> int | None:
        """Publish one version of everything: ``leaves``, and what is not among them as it was.

        See :meth:`Publish.fill`, also for what it returns and raises.
        """
        with self.begin() as publish:
            return publish.fill(leaves, steady)

    def begin(self) -> Publish:
        """Begin a publish: the one before is joined, and the ledger's next number taken; see :meth:`join`."""
        self.join()
        self.ranks.begin()
        return Publish(self, self._besides)

    def pass_over(self) -> None:
        """Publish nothing now: other ranks of the learner, if there are any, wait for that word."""
        self.ranks.begin()
        self.ranks.tell(None)

    def join(self) -> None:
        """Wait until what was published is visible.

        PublishError: it was written to meanwhile, and is not published.
        """
        underway = self.underway
        self.underway = None
        if underway is not None:
            underway.finish()

    def fitted(self, fit: Fit, destination: str, weights: object) -> dict[Key, Tensor]:
        """The tensors of a module, tensordict or mapping as leaves of the destination of ``fit``.

        LayoutMismatch: they do not fit, or are sharded and the transport is no board. PublishError: a rank
        that has parts of them does not come.
        """
        named = fit.named(weights, self.specs(destination))
        leaves = {(destination, name): tensor for name, tensor in named.items()}
        if fit.sharded and isinstance(self.ranks, OneRank):
            self.meet_ranks(leaves)
        return leaves

    def meet_ranks(self, leaves: Mapping[Key, Tensor]) -> Ranks:
        """Find the other ranks of the learner that hold parts of these leaves, which will be published.

        PublishError: a rank does not come. LayoutMismatch: a rank has a leaf sharded in another way, or the
        transport is no board.
        """
        if isinstance(self.ranks, OneRank):
            self.ranks = Ranks(self.transport)
        self.ranks.meet(leaves)
        return self.ranks

    def lay_out(self, leaves: Mapping[Key, Tensor]) -> tuple[Layout, Sequence[Key]]:
        """The transport's layout, made anew where these leaves need another one, and who owns its entries."""
        present = self._laid
        if present is None or not present.fits(leaves):
            present = self._lay_out(leaves)
        elif leaves.keys() != present.keys:
            present = replace(present, keys=frozenset(leaves))
        self._laid = present
        return present.layout, present.owners

    def _lay_out(self, leaves: Mapping[Key, Tensor]) -> Laid:
        """Lay the transport out for these leaves, and for what its newest version holds besides."""
        if isinstance(self.ranks, OneRank) and any_sharded(leaves.values()):
            self.meet_ranks(leaves)
        unchanged = {key: old for key, old in held(self.transport).items() if key not in leaves}
        brought: dict[str, Set[str]] = {}
        if self._laid is not None:
            brought |= self._laid.brought
        brought |= _by_destination(leaves)

        # The first leaf of some memory owns its bytes, and those after it are tied to that one.
        first: dict[object, str] = {}
        specs: dict[str, list[LeafSpec]] = {}
        for destination, name in [*unchanged, *leaves]:
            tensor = leaves.get((destination, name))
            spec = self._spec(destination, name, tensor)
            tie = ""
            if tensor is None:
                if (destination, spec.tie) in unchanged:
                    tie = spec.tie
            elif tensor.numel():
                owner = first.setdefault((destination, memory_key(tensor)), name)
                if owner != name:
                    tie = owner
            excluded = name not in brought[destination]
            specs.setdefault(destination, []).append(replace(spec, tie=tie, excluded=excluded))

        layout = Layout.build(specs)
        self.transport.lay_out(layout)
        owners = [(entry.destination, entry.leaf.name) for entry in layout.owned]
        ties: list[tuple[Key, Key]] = []
        for entry in layout.entries:
            leaf = entry.leaf
            if leaf.tie:
                ties.append(((entry.destination, leaf.name), (entry.destination, leaf.tie)))
        return Laid(frozenset(leaves), layout, owners, ties, brought=brought, specs=specs)

    def _spec(self, destination: str, name: str, tensor: Tensor | None) -> LeafSpec:
        known = [*(self.specs(destination) or ())]
        if self._laid is not None:
            known += self._laid.specs.get(destination, ())
        for spec in known:
            if spec.name == name:
                return spec
        if tensor is None:
            raise PublishError(f"nothing is known of {name}", destination, "publish it first")
        return LeafSpec(name, "parameter", tuple(tensor.shape), tensor.dtype)


def _refuse_without_memory(leaves: Mapping[Key, Tensor]) -> None:
    """Refuse a leaf that had memory of its own when it was bound, and is made of parts now."""
    if set(map(type, leaves.values())) <= PLAIN:
        return
    for (destination, name), tensor in leaves.items():
        if is_made_of_parts(tensor):
            problem = f"{name} has become a {type(tensor).__name__}, which has no memory of its own"
            cure = "quantise weights, or change their class, before the collector and the hook are made"
            raise LayoutMismatch(problem, f"destination {destination!r}", cure)


def _by_destination(keys: Iterable[Key]) -> dict[str, set[str]]:
    names: dict[str, set[str]] = {}
    for destination, name in keys:
        names.setdefault(destination, set()).add(name)
    return names
