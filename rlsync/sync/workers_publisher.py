"""WorkersPublisher: the publisher of one collector's workers, as a collector's methods call it."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol, runtime_checkable

from torch import Tensor

from rlsync.core.errors import PublishError
from rlsync.core.ledger import Ledger
from rlsync.core.plan import no_destination
from rlsync.sync.acts import Acting
from rlsync.sync.adopter import Adopt
from rlsync.sync.processes import WorkerProcesses
from rlsync.sync.publisher import Publisher
from rlsync.tensors.compare import Fit, check_same_leaves
from rlsync.tensors.layout import LeafSpec, specs_from_json
from rlsync.transport.contract import Note, Transport
from rlsync.transport.rules import Key, held, living

_log = logging.getLogger(__name__)


@runtime_checkable
class BoardCollector(WorkerProcesses, Protocol):
    """A collector whose own workers read a board, all the time, without a scheme of TorchRL's."""

    publisher: WorkersPublisher
    adopt: Adopt


class WorkersPublisher(Publisher):
    """Publishes to the workers of one collector, which tell by notes which leaves they have.

    Before that, ``leaves_at`` says which they will have, if it is set.
    """

    def __init__(self, transport: Transport, ledger: Ledger | None = None) -> None:
        super().__init__(transport, ledger)
        self.destinations: list[str] = []
        self.publish_default: Callable[[], object] | None = None
        self._collector: weakref.ref[WorkerProcesses] | None = None
        self._specs: dict[str, list[LeafSpec]] = {}
        self._staged: dict[Key, Tensor] | None = None
        self._sent = False
        self._default_wanted = False
        self._fits: dict[str, Fit] = {}

    @property
    def collector(self) -> WorkerProcesses:
        collector = None if self._collector is None else self._collector()
        if collector is None:
            problem = "this board has no collector"
            raise PublishError(problem, "BoardScheme", "pass the scheme to a process collector")
        return collector

    def serve(self, collector: WorkerProcesses, destination: str) -> bool:
        """Take ``destination``; whether it is this collector's first. PublishError: another collector."""
        if self._collector is not None and self._collector() is not collector:
            problem = "this board already serves another collector"
            cure = "make one WeightBoard, or one BoardScheme, for each collector"
            raise PublishError(problem, f"weight_sync_schemes[{destination!r}]", cure)
        first = self._collector is None
        self._collector = weakref.ref(collector)
        self.destinations.append(destination)
        return first

    def specs(self, destination: str) -> list[LeafSpec] | None:
        """The leaves in the workers, None while nobody can tell; LayoutMismatch: they do not agree."""
        if destination not in self._specs:
            self._read_notes()
        if destination in self._specs:
            return self._specs[destination]
        return super().specs(destination)

    def acting(self) -> Acting:
        """What the workers found out about which of their leaves act."""
        of_workers = []
        for worker in range(self.collector.num_workers):
            note = self.transport.note(worker, Note.ACTING)
            if note is not None:
                of_workers.append(Acting.from_json(note))
        return Acting.of_all(of_workers)

    def acting_versions(self) -> dict[int, int]:
        """The version that each living worker acts with, by its number; 0 before its first adoption."""
        workers = living(self.transport, self.collector.num_workers)
        return {worker.reader: worker.adopted_version for worker in workers}

    def has_told(self, worker: int) -> bool:
        """Whether a worker has said which leaves it has, of every destination."""
        note = self.transport.note(worker, Note.LEAVES)
        return note is not None and set(self.destinations) <= set(specs_from_json(note))

    def _read_notes(self) -> None:
        of_workers = []
        for worker in range(self.collector.num_workers):
            note = self.transport.note(worker, Note.LEAVES)
            if note is None:
                return  # the workers are still being constructed
            of_workers.append(specs_from_json(note))
        for worker, specs in enumerate(of_workers):
            for destination, leaves in specs.items():
                expected = of_workers[0][destination]
                where = f"{destination} of worker {worker}"
                check_same_leaves(leaves, expected, where, "of worker 0")
        self._specs = {name: _seen_in(of_workers, name) for name in of_workers[0]}

    @contextmanager
    def one_publish(self, destinations: Iterable[str] = ()) -> Iterator[None]:
        """Publish all sends inside to ``destinations`` as one version at the end; none if one fails."""
        for wanted in destinations:
            if wanted not in self.destinations:
                raise no_destination(wanted, "update_policy_weights_", self.destinations)
        if self._staged is not None:
            yield
            return
        self._staged = {}
        self._sent = False
        self._default_wanted = False
        try:
            yield
            staged = self._staged
        finally:
            self._staged = None
        if self._sent:
            self._publish_sent(staged)

    def _publish_sent(self, staged: dict[Key, Tensor]) -> None:
        before = self.coalesced
        if self._default_wanted and self.publish_default is not None:
            self._besides = staged  # what was sent explicitly goes into the same version
            try:
                self.publish_default()
            finally:
                self._besides = {}
        else:
            self.publish(staged)
        if self.coalesced > before:
            _log.warning(
                "a publish was coalesced: every slot of the board is leased, and nothing was written; "
                "the next publish carries the weights (allow more with max_slots)"
            )

    def send(self, destination: str, weights: object) -> None:
        """Publish ``weights``; ``None``: what ``publish_default`` publishes, or the collector's module."""
        with self.one_publish():
            assert self._staged is not None
            self._sent = True
            if weights is None and self.publish_default is not None:
                self._default_wanted = True
                return
            if weights is None and self.specs(destination) == []:
                return  # a policy without weights: the version counts all the same
            if weights is None:
                try:
                    weights = self.collector.get_model(destination)
                except (ValueError, AttributeError) as cause:
                    problem = f"nothing to send to {destination!r}: the learner's collector holds no such module"
                    cure = (
                        "pass the weights, or register a SyncWeights, whose map names their source"
                    )
                    raise PublishError(
                        problem, "update_policy_weights_() without weights", cure
                    ) from cause
            fit = Fit(f"the weights sent to {destination!r}", f"of {destination!r} in the workers")
            fit = self._fits.setdefault(destination, fit)
            self._staged.update(self.fitted(fit, destination, weights))

    def send_over(self, destination: str, weights: Mapping[str, Tensor]) -> None:
        """Publish the leaves that the workers have of a state dict; others keep their newest value."""
        in_workers = {spec.name for spec in self.specs(destination) or ()}
        leaves = {}
        for (published_to, name), tensor in held(self.transport).items():
            if published_to == destination:
                leaves[name] = tensor
        for name, tensor in weights.items():
            if name in in_workers:
                leaves[name] = tensor
        self.send(destination, leaves)


def _seen_in(
    workers: Sequence[Mapping[str, Sequence[LeafSpec]]], destination: str
) -> list[LeafSpec]:
    """The leaves of a destination, alike in all workers; their devices may differ."""
    of_each = [leaves[destination] for leaves in workers if destination in leaves]
    specs = []
    for same in zip(*of_each, strict=True):
        devices = dict.fromkeys(leaf.device for leaf in same)
        specs.append(replace(same[0], device=", ".join(devices)))
    return specs
