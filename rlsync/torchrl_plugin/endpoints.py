"""Where weights go: one endpoint for each kind of collector, all with the same face."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Protocol

from torch import Tensor

from rlsync.core.errors import ConfigError
from rlsync.core.path import Path
from rlsync.tensors.layout import LeafSpec
from rlsync.torchrl_plugin import compat
from rlsync.torchrl_plugin.board_endpoint import BoardEndpoint
from rlsync.torchrl_plugin.check import Check
from rlsync.torchrl_plugin.foreign_endpoint import ForeignEndpoint
from rlsync.torchrl_plugin.local_endpoint import LocalEndpoint
from rlsync.torchrl_plugin.scheme import BoardScheme
from rlsync.torchrl_plugin.sender import BoardCollector, Key


class Endpoint(Protocol):
    """What a sync needs of a collector."""

    @property
    def transport(self) -> str:
        """How the weights travel, in words."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of the plan should know."""

    @property
    def stamped(self) -> bool:
        """Whether frames carry the version that acted."""

    @property
    def version(self) -> int:
        """The newest published version."""

    def connect(self, publish_default: Callable[[], object]) -> None:
        """Begin: workers adopt what is published here from now on.

        Args:
            publish_default: what ``collector.update_policy_weights_()`` without weights publishes.
        """

    def locate(self, path: Path, where: str) -> Key:
        """The destination of this collector that ``path`` lies in, and the leaf prefix below it."""

    def specs(self, destination: str) -> list[LeafSpec] | None:
        """The leaves that stand there; ``None`` when this collector does not show them."""

    def tensors(self, destination: str) -> dict[str, Tensor] | None:
        """The live tensors that stand there, by name, where this process holds them."""

    @property
    def publishes_in_background(self) -> bool:
        """Whether a publish may go on after it has returned."""

    def publish(self, leaves: Mapping[Key, Tensor], steady: Collection[Key] = ()) -> int | None:
        """Publish one version; ``None`` when it was coalesced.

        Args:
            leaves: what is published.
            steady: those that nobody writes to before :meth:`join`.
        """

    def join(self) -> None:
        """Wait until what was published is there."""

    def advance_to(self, version: int) -> None:
        """Never give out ``version`` or a lower one again."""

    def acting_versions(self) -> list[int]:
        """The version that each living worker acts with, where this can be told."""

    @property
    def in_flight(self) -> bool:
        """Whether workers may be collecting while the learner publishes."""

    def wait(self, timeout_s: float) -> None:
        """Wait until all workers act with the newest version."""

    def check(self) -> Check:
        """What compares the weights that act with those that were published.

        Raises:
            ConfigError: the workers of this collector cannot be asked.
        """


def endpoint_of(collector: object) -> Endpoint:
    """The endpoint for a collector.

    Raises:
        ConfigError: some of a collector's schemes are boards and some are not, or on different boards.
    """
    if isinstance(collector, BoardCollector):
        return BoardEndpoint(collector.board_sender, "alias")
    schemes = compat.schemes_of(collector)
    boards = [s for s in schemes.values() if isinstance(s, BoardScheme)]
    if boards:
        senders = {id(s.sender) for s in boards}
        if len(boards) < len(schemes) or len(senders) > 1:
            raise ConfigError(
                "the destinations of this collector do not share one board",
                f"weight_sync_schemes={list(schemes)}",
                "make one WeightBoard and take board.scheme() for each destination",
            )
        return BoardEndpoint(boards[0].sender, boards[0].adopt)
    if isinstance(collector, compat.Collector) and not schemes:
        return LocalEndpoint(collector)
    return ForeignEndpoint(collector, list(schemes))
