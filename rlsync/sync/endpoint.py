"""What a map's destinations look like to the rest of sync: one endpoint for each kind of collector."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from torch import Tensor

from rlsync.core.path import Path
from rlsync.sync.acts import Acting
from rlsync.sync.publisher import Publisher
from rlsync.sync.verification import Verification
from rlsync.tensors.layout import LeafSpec
from rlsync.transport.rules import Key


class Endpoint(Protocol):
    """Where the destinations of a map are, and the publisher that reaches them."""

    publisher: Publisher  #: to the workers of this collector
    destinations: Sequence[str] = ()  #: that it offers, where it knows them
    #: Whether a publish that leaves out leaves of a destination would wait for ever.
    needs_every_leaf: bool = False
    #: Whether a tensor that is made of parts arrives as what it is.
    takes_parts: bool = True
    #: whether the frames of one rollout may have several versions
    adopts_within_rollouts: bool = False

    @property
    def description(self) -> str:
        """How the weights travel, in words."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of the plan should know."""

    @property
    def stamped(self) -> bool:
        """Whether frames carry the version that acted."""

    @property
    def num_workers(self) -> int:
        """How many workers act; their numbers are those of the transport's first readers."""

    @property
    def in_flight(self) -> bool:
        """Whether workers may be collecting while the learner publishes."""

    def connect(self, publish_default: Callable[[], object]) -> None:
        """Begin: ``collector.update_policy_weights_()`` without weights calls ``publish_default``."""
        return

    def locate(self, path: Path, where: str) -> Key:
        """The destination that ``path`` is in, and the leaf prefix below it; else DestinationNotFound."""

    def specs(self, destination: str) -> list[LeafSpec] | None:
        """The leaves of a destination; ``None`` when this collector does not show them."""

    def tensors(self, destination: str) -> dict[str, Tensor] | None:
        """The live tensors of a destination, by name, where this process holds them."""
        return None

    def around(self) -> dict[str, Tensor | None]:
        """All leaves that destinations may be parts of, by name, with tensors that this process holds."""
        leaves: dict[str, Tensor | None] = {}
        for destination in self.destinations:
            for spec in self.specs(destination) or ():
                leaves[f"{destination}.{spec.name}"] = None
        return leaves

    def acting(self, sent: Collection[str]) -> Acting:
        """What is known of which leaves act, at those destinations at least to which weights are ``sent``."""
        return Acting()

    def wait(self, timeout_s: float) -> None:
        """Wait until all workers act with the newest version; WorkerLost, AdoptionTimeout."""
        return

    def verification(self) -> Verification:
        """What compares what acts with what was published; ConfigError if workers cannot be asked."""
