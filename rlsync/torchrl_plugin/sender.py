"""The learner's side of a board under TorchRL: which leaves it carries, and one publish for all of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.process import BaseProcess
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from rlsync.core.errors import PublishError
from rlsync.core.path import nearest_name
from rlsync.core.plan import no_destination
from rlsync.tensors.compare import check_same_leaves, fitted
from rlsync.tensors.layout import Layout, LeafSpec
from rlsync.tensors.leaves import Leaves, memory_key
from rlsync.torchrl_plugin import compat
from rlsync.transport.board import WeightBoard

#: A destination of the collector and a leaf of it.
Key = tuple[str, str]


@runtime_checkable
class BoardCollector(Protocol):
    """A collector whose own workers read a board, all the time, without a scheme of TorchRL's."""

    board_sender: BoardSender
    num_workers: int

    @property
    def procs(self) -> list[BaseProcess]:
        """The worker processes, by their numbers."""

    @property
    def closed(self) -> bool:
        """Whether the workers were ended."""

    def get_model(self, model_id: str) -> nn.Module:
        """The learner's module for a destination."""

    def shutdown(self, timeout: float | None = None, *, raise_on_error: bool = True) -> None:
        """End the workers."""


class BoardSender:
    """Publishes leaves by name on a board; destinations that a publish leaves out keep their weights.

    Args:
        board: where to.
    """

    def __init__(self, board: WeightBoard) -> None:
        self.board = board
        self.destinations: list[str] = []
        self.publish_default: Callable[[], object] | None = None
        self.after_publish: Callable[[int], None] | None = None
        self._collector: weakref.ref[compat.MultiCollector | BoardCollector] | None = None
        self._specs: dict[str, list[LeafSpec]] = {}
        self._laid_out: dict[str, list[LeafSpec]] = {}
        self._brought: dict[str, set[str]] = {}  # by destination; its other leaves are brought no more
        self._last_keys: frozenset[Key] = frozenset()
        self._owners: list[Key] = []
        self._ties: list[tuple[Key, Key]] = []
        self._carried: dict[Key, Tensor] = {}
        self._unannounced: int | None = None
        self._staged: dict[Key, Tensor] | None = None
        self._default_wanted = False

    @property
    def collector(self) -> compat.MultiCollector | BoardCollector:
        """The collector whose workers read the board."""
        collector = self._collector and self._collector()
        if collector is None:
            raise PublishError(
                "this board has no collector",
                "BoardScheme",
                "pass the scheme to a process collector",
            )
        return collector

    def serve(self, collector: compat.MultiCollector | BoardCollector, destination: str) -> None:
        """Take ``destination`` of ``collector`` on this board."""
        if self._collector is not None and self._collector() is not collector:
            raise PublishError(
                "this board already serves another collector",
                f"weight_sync_schemes[{destination!r}]",
                "make one WeightBoard, or one BoardScheme, for each collector",
            )
        if self._collector is None:
            self._collector = weakref.ref(collector)
            if isinstance(collector, compat.MultiCollector):
                compat.turn_on_stamps(collector)
                compat.around_updates(collector, self.one_publish)
        self.destinations.append(destination)

    def specs(self, destination: str) -> list[LeafSpec] | None:
        """The leaves that stand at ``destination`` in the workers, or ``None`` while nobody can tell.

        Raises:
            LayoutMismatch: the workers do not agree.
        """
        if destination not in self._specs:
            self._read_notes()
        return self._specs.get(destination)

    def _read_notes(self) -> None:
        notes = [self.board.note(worker) for worker in range(self.collector.num_workers)]
        said = [Layout.from_json(note).destinations for note in notes if note is not None]
        if len(said) < len(notes):
            return  # the workers are still being constructed
        for worker, stands in enumerate(said):
            for destination, leaves in stands.items():
                check_same_leaves(
                    leaves, said[0][destination], f"{destination} of worker {worker}", "of worker 0"
                )
        self._specs = said[0]

    @contextmanager
    def one_publish(self, destinations: Iterable[str] = ()) -> Iterator[None]:
        """All sends inside are published as one version at the end, or not at all if one fails.

        Args:
            destinations: those that will be sent.

        Raises:
            DestinationNotFound: this board does not serve one of them.
        """
        for wanted in destinations:
            if wanted not in self.destinations:
                near = nearest_name(wanted, self.destinations)
                raise no_destination(wanted, "update_policy_weights_", self.destinations, near)
        if self._staged is not None:
            yield
            return
        self._staged, self._default_wanted = {}, False
        try:
            yield
            staged = self._staged
        finally:
            self._staged = None
        if self._default_wanted and self.publish_default is not None:
            self.publish_default()
        if staged:
            self.publish(staged)

    def send(self, destination: str, weights: object) -> None:
        """Publish ``weights``, checked, for one destination; ``None`` stands for the learner's own."""
        if weights is None and self.publish_default is not None:
            with self.one_publish():
                self._default_wanted = True
            return
        if weights is None:
            weights = self._learners_own(destination)
        where, against = f"the weights sent to {destination!r}", f"of {destination!r} in the workers"
        sent = fitted(weights, where, self.specs(destination), against)
        keyed = {(destination, name): tensor for name, tensor in sent.items()}
        if self._staged is None:
            self.publish(keyed)
        else:
            self._staged.update(keyed)

    def _learners_own(self, destination: str) -> object:
        try:
            return self.collector.get_model(destination)
        except (ValueError, AttributeError) as cause:
            raise PublishError(
                f"nothing to send to {destination!r}: the learner's collector holds no such module",
                "update_policy_weights_() without weights",
                "pass the weights, or register a SyncWeights, whose map names their source",
            ) from cause

    def publish_module(self, destination: str, module: nn.Module, where: str) -> None:
        """Publish every leaf of a module.

        Args:
            destination: to whom.
            module: whose leaves.
            where: how errors call it.

        Raises:
            LayoutMismatch: a leaf cannot travel.
        """
        leaves = Leaves(module, where)
        leaves.specs()
        named = zip(leaves.names, leaves.tensors(), strict=True)
        self.publish({(destination, name): tensor for name, tensor in named})

    def publish(self, leaves: Mapping[Key, Tensor], steady: Collection[Key] = ()) -> int | None:
        """Publish one version of everything: ``leaves``, and what is not among them as it was.

        Args:
            leaves: what is published.
            steady: those that nobody writes to before :meth:`join`; they may be copied after this.
        """
        self.join()
        same = leaves.keys() == self._last_keys
        if (not same and self._brings_others(leaves)) or self._tie_broken(leaves):
            self._lay_out(leaves)
        if not same:
            self._last_keys = frozenset(leaves)
        tensors = [leaves.get(key) for key in self._owners]
        later = {i for i, key in enumerate(self._owners) if key in steady} if steady else set()
        carried = [self._carry(i) if t is None else t for i, t in enumerate(tensors)]
        version = self.board.publish(carried, later)
        if version is not None:
            self._carried.clear()
            self._unannounced = version
            if not later:
                self.join()
        return version

    def join(self) -> None:
        """Wait until what was published is there.

        Raises:
            PublishError: it was written to meanwhile, and is not published.
        """
        version, self._unannounced = self._unannounced, None
        if version is not None:
            self.board.join()
            compat.announce_version(self.collector, version)
            if self.after_publish is not None:
                self.after_publish(version)

    def _carry(self, owner: int) -> Tensor:
        carried = self._carried.get(self._owners[owner])
        return self.board.newest_views()[owner] if carried is None else carried

    def _brings_others(self, leaves: Iterable[Key]) -> bool:
        return any(self._brought.get(d) != names for d, names in _by_destination(leaves).items())

    def _tie_broken(self, leaves: Mapping[Key, Tensor]) -> bool:
        return any(
            tied in leaves and owner in leaves and leaves[tied].data_ptr() != leaves[owner].data_ptr()
            for tied, owner in self._ties
        )

    def _lay_out(self, leaves: Mapping[Key, Tensor]) -> None:
        self._keep_others(leaves)
        self._brought |= _by_destination(leaves)
        first: dict[object, str] = {}
        laid_out: dict[str, list[LeafSpec]] = {}
        for destination, name in dict.fromkeys([*self._carried, *leaves]):
            tensor = leaves.get((destination, name))
            spec = self._spec(destination, name, tensor)
            tie = spec.tie if (destination, spec.tie) in self._carried else ""
            if tensor is not None:
                tied = first.setdefault((destination, memory_key(tensor)), name) if tensor.numel() else name
                tie = "" if tied == name else tied
            once = name not in self._brought[destination]
            laid_out.setdefault(destination, []).append(replace(spec, tie=tie, once=once))
        layout = Layout.build(laid_out)
        self.board.lay_out(layout)
        self._owners = [(e.destination, e.leaf.name) for e in layout.owned]
        self._ties = [
            ((e.destination, e.leaf.name), (e.destination, e.leaf.tie)) for e in layout.entries if e.leaf.tie
        ]
        self._laid_out = laid_out

    def _keep_others(self, leaves: Mapping[Key, Tensor]) -> None:
        """Set aside the published leaves that the coming publish leaves out; a new layout loses them."""
        if self.board.newest:
            layout, views = self.board.newest_leaves()
            for entry, view in zip(layout.entries, layout.spread(views), strict=True):
                key = (entry.destination, entry.leaf.name)
                if key not in leaves:
                    self._carried.setdefault(key, view.clone())

    def _spec(self, destination: str, name: str, tensor: Tensor | None) -> LeafSpec:
        stands = [*(self.specs(destination) or ()), *self._laid_out.get(destination, ())]
        for spec in stands:
            if spec.name == name:
                return spec
        if tensor is None:
            raise PublishError(f"nothing is known of {name}", destination, "publish it first")
        return LeafSpec(name, "parameter", tuple(tensor.shape), tensor.dtype)


def _by_destination(keys: Iterable[Key]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for destination, name in keys:
        found.setdefault(destination, set()).add(name)
    return found
