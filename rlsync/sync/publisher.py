"""Publisher: leaves by name become versions, drawn from a ledger and carried by a transport."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

from torch import Tensor

from rlsync.core.errors import PublishError
from rlsync.core.ledger import Ledger, Stamp
from rlsync.sync.ranks import Ranks, without_board
from rlsync.tensors.layout import Layout, LeafSpec
from rlsync.tensors.leaves import Leaves, memory_key
from rlsync.tensors.sharded import any_sharded, own_part
from rlsync.transport.board.writer import BoardWriter
from rlsync.transport.contract import Transport
from rlsync.transport.rules import Key, keyed

#: ``leaves_at(destination)``: the leaves of a destination in the workers; ``None`` while nobody can tell.
LeavesAt = Callable[[str], Sequence[LeafSpec] | None]

#: ``seen(version, layout, tensors)``: a version is visible to workers; its tensors, where they were given.
Seen = Callable[[int, Layout, Sequence[Tensor | None]], None]


@dataclass(frozen=True, slots=True)
class Unjoined:
    """A publish whose copy may still be going on.

    Args:
        stamp: its generation and number.
        layout: what it carries.
        tensors: what was given for each entry that owns its bytes.
    """

    stamp: Stamp
    layout: Layout
    tensors: Sequence[Tensor | None]


class Publisher:
    """Publishes leaves by name, as one version; destinations that a publish leaves out keep their weights.

    The ledger gives the number, the transport carries the bytes. A number is used up only when the version is
    visible.

    Args:
        transport: carries the bytes.
        ledger: gives the numbers; by default a new one.
        leaves_at: which leaves a destination has in the workers.
    """

    def __init__(
        self, transport: Transport, ledger: Ledger | None = None, leaves_at: LeavesAt | None = None
    ) -> None:
        self.transport = transport
        self.ledger = Ledger() if ledger is None else ledger
        self.coalesced = 0  #: publishes for which the transport had no room
        self.announce: Callable[[int], object] | None = None  #: told the number of each visible version
        self.seen: Seen | None = None
        self.ranks: Ranks | None = None  #: the learner's other ranks, once a sharded leaf was met
        self._leaves_at = leaves_at
        self._laid_out: dict[str, list[LeafSpec]] = {}
        self._brought: dict[str, set[str]] = {}  # by destination: the leaves that publishes bring
        self._last_keys: frozenset[Key] = frozenset()
        self._owners: list[Key] = []
        self._ties: list[tuple[Key, Key]] = []
        self._unjoined: Unjoined | None = None
        self._extra: Mapping[Key, Tensor] = {}

    @property
    def version(self) -> int:
        """The newest published version; 0 before the first."""
        # A background copy may have made a version visible that was not joined yet.
        return max(self.ledger.version, self.transport.newest_stamp.version)

    def specs(self, destination: str) -> list[LeafSpec] | None:
        """The leaves of a destination in the workers; ``None`` while nobody can tell."""
        found = None if self._leaves_at is None else self._leaves_at(destination)
        return None if found is None else list(found)

    def publish_modules(self, modules: Mapping[str, object], where: str) -> None:
        """Publish every leaf of some modules as one version; nothing when there are none.

        Args:
            modules: by destination.
            where: whose they are, for errors.

        Raises:
            LayoutMismatch: a leaf cannot travel.
        """
        found: dict[Key, Tensor] = {}
        for destination, module in modules.items():
            leaves = Leaves(module, f"{where}, {destination!r}")
            leaves.specs()  # refuses leaves that cannot travel
            named = zip(leaves.names, leaves.tensors(), strict=True)
            found |= {(destination, name): tensor for name, tensor in named}
        if modules:
            self.publish(found)

    def publish(self, leaves: Mapping[Key, Tensor], steady: Collection[Key] = ()) -> int | None:
        """Publish one version of everything: ``leaves``, and what is not among them as it was.

        Args:
            leaves: what is published. The other ranks of the learner bring their parts of those that are
                sharded.
            steady: those that nobody writes to before :meth:`join`; they may be copied after this returns.

        Returns:
            The version; ``None`` when it was coalesced.

        Raises:
            PublishError: another rank does not bring its parts.
        """
        self.join()
        if self._extra:
            leaves = {**leaves, **self._extra}
        if (self.ranks is None or not self.ranks.met) and any_sharded(leaves.values()):
            self.meet_ranks(leaves)
        with self.decision():
            return self._publish(leaves, steady)

    def meet_ranks(self, leaves: Mapping[Key, Tensor]) -> Ranks:
        """Find the other ranks of the learner that hold parts of some leaves.

        Args:
            leaves: what will be published.

        Raises:
            PublishError: a rank does not come.
            LayoutMismatch: a rank has a leaf sharded in another way, or the transport is no board.
        """
        if self.ranks is None:
            if not isinstance(self.transport, BoardWriter):
                raise without_board("the weights are", type(self.transport).__name__)
            self.ranks = Ranks(self.transport)
        self.ranks.meet(leaves)
        return self.ranks

    def decision(self) -> AbstractContextManager[None]:
        """Tell the other ranks of the learner, if there are any, what was published inside."""
        return nullcontext() if self.ranks is None else self.ranks.decision()

    def _publish(self, leaves: Mapping[Key, Tensor], steady: Collection[Key]) -> int | None:
        layout = self._layout_for(leaves)
        tensors = [leaves.get(key) for key in self._owners]
        later = {i for i, key in enumerate(self._owners) if key in steady} if steady else frozenset()
        stamp = self.ledger.next
        version = self.transport.publish(tensors, later, stamp=stamp)
        if version is None:
            self.coalesced += 1
            return None
        self._unjoined = Unjoined(stamp, layout, tensors)
        if not later:
            self.join()
        return version

    def join(self) -> None:
        """Wait until what was published is visible.

        Raises:
            PublishError: it was written to meanwhile, and is not published.
        """
        published, self._unjoined = self._unjoined, None
        if published is None:
            return
        stamp = published.stamp
        try:
            self.transport.join()
        finally:
            # A write that came too late to be seen by the copy is reported, and the version is visible.
            if self.transport.newest_stamp == stamp:
                self.ledger.record(stamp)
        if self.announce is not None:
            self.announce(stamp.version)
        if self.seen is not None:
            self.seen(stamp.version, published.layout, published.tensors)

    def _layout_for(self, leaves: Mapping[Key, Tensor]) -> Layout:
        """The transport's layout, made anew where these leaves need another one."""
        layout, same = self.transport.layout, leaves.keys() == self._last_keys
        if layout is None or (not same and self._brings_others(leaves)) or self._tie_broken(leaves):
            layout = self._lay_out(leaves)
        if not same:
            self._last_keys = frozenset(leaves)
        return layout

    def _brings_others(self, leaves: Iterable[Key]) -> bool:
        return any(self._brought.get(d) != names for d, names in _by_destination(leaves).items())

    def _tie_broken(self, leaves: Mapping[Key, Tensor]) -> bool:
        return any(
            tied in leaves and owner in leaves and _pointer(leaves[tied]) != _pointer(leaves[owner])
            for tied, owner in self._ties
        )

    def _lay_out(self, leaves: Mapping[Key, Tensor]) -> Layout:
        """Lay the transport out for these leaves, and for what its newest version holds besides."""
        newest = self.transport.newest_leaves()
        held = {} if newest is None else keyed(*newest)
        kept = {key: None for key in held if key not in leaves}
        self._brought |= _by_destination(leaves)
        first: dict[object, str] = {}
        laid_out: dict[str, list[LeafSpec]] = {}
        for destination, name in dict.fromkeys([*kept, *leaves]):
            tensor = leaves.get((destination, name))
            spec = self._spec(destination, name, tensor)
            tie = spec.tie if (destination, spec.tie) in kept else ""
            if tensor is not None:
                tied = first.setdefault((destination, memory_key(tensor)), name) if tensor.numel() else name
                tie = "" if tied == name else tied
            excluded = name not in self._brought[destination]
            laid_out.setdefault(destination, []).append(replace(spec, tie=tie, excluded=excluded))
        layout = Layout.build(laid_out)
        self.transport.lay_out(layout)
        self._owners = [(e.destination, e.leaf.name) for e in layout.owned]
        self._ties = [
            ((e.destination, e.leaf.name), (e.destination, e.leaf.tie)) for e in layout.entries if e.leaf.tie
        ]
        self._laid_out = laid_out
        return layout

    def _spec(self, destination: str, name: str, tensor: Tensor | None) -> LeafSpec:
        known = [*(self.specs(destination) or ()), *self._laid_out.get(destination, ())]
        for spec in known:
            if spec.name == name:
                return spec
        if tensor is None:
            raise PublishError(f"nothing is known of {name}", destination, "publish it first")
        return LeafSpec(name, "parameter", tuple(tensor.shape), tensor.dtype)


def _pointer(tensor: Tensor) -> int:
    return own_part(tensor).data_ptr()


def _by_destination(keys: Iterable[Key]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for destination, name in keys:
        found.setdefault(destination, set()).add(name)
    return found
