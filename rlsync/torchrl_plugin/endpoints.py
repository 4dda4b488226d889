"""Where weights go: one endpoint for each kind of collector, all with the same face."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from tensordict import TensorDict
from torch import Tensor

from rlsync.core.errors import ConfigError, DestinationNotFound, PublishError
from rlsync.core.path import Path, nearest_name, parse, walk
from rlsync.core.plan import no_destination
from rlsync.tensors.layout import Layout, LeafSpec
from rlsync.tensors.leaves import Leaves
from rlsync.tensors.target import write
from rlsync.torchrl_plugin import compat
from rlsync.torchrl_plugin.scheme import BoardScheme
from rlsync.torchrl_plugin.sender import BoardSender, Key
from rlsync.transport.local import LocalTransport


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

    def publish(self, leaves: Mapping[Key, Tensor]) -> int | None:
        """Publish one version; ``None`` when it was coalesced."""

    def advance_to(self, version: int) -> None:
        """Never give out ``version`` or a lower one again."""

    def lag_versions(self) -> int:
        """Newest published version minus the oldest one that a living worker acts with."""

    def wait(self, timeout_s: float) -> None:
        """Wait until all workers act with the newest version."""


def endpoint_of(collector: object) -> Endpoint:
    """The endpoint for a collector.

    Raises:
        ConfigError: some of a collector's schemes are boards and some are not, or on different boards.
    """
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


class BoardEndpoint:
    """Process collectors whose schemes are on one board."""

    def __init__(self, sender: BoardSender, adopt: str) -> None:
        self.sender = sender
        self._adopt = adopt

    @property
    def transport(self) -> str:
        workers = self.sender.collector.num_workers
        return f"board: {workers} worker processes, adopted by {self._adopt}, one copy a publish"

    @property
    def notes(self) -> tuple[str, ...]:
        return ()

    @property
    def stamped(self) -> bool:
        return True

    @property
    def version(self) -> int:
        return self.sender.board.version

    def connect(self, publish_default: Callable[[], object]) -> None:
        self.sender.publish_default = publish_default

    def locate(self, path: Path, where: str) -> Key:
        offered = self.sender.destinations
        inside = [d for d in offered if path.startswith(parse(d))]
        if not inside:
            raise no_destination(str(path), where, offered, nearest_name(str(path), offered))
        destination = max(inside, key=len)
        prefix = path.below(parse(destination)).leaf_prefix()
        self._check_prefix(destination, prefix, path, where)
        return destination, prefix

    def _check_prefix(self, destination: str, prefix: str, path: Path, where: str) -> None:
        specs = self.specs(destination)
        if not prefix or specs is None:
            return
        if not any(s.name == prefix or s.name.startswith(prefix + ".") for s in specs):
            parents = {s.name.rpartition(".")[0] for s in specs} - {""}
            near = nearest_name(prefix, parents)
            raise DestinationNotFound(
                f"no leaves under {prefix!r} in {destination!r}",
                f"path {str(path)!r}, {where}",
                (f"did you mean {near!r}? " if near else "") + f"modules: {', '.join(sorted(parents))}",
            )

    def specs(self, destination: str) -> list[LeafSpec] | None:
        return self.sender.specs(destination)

    def tensors(self, destination: str) -> None:
        return None

    def publish(self, leaves: Mapping[Key, Tensor]) -> int | None:
        return self.sender.publish(leaves)

    def advance_to(self, version: int) -> None:
        self.sender.board.advance_to(version)

    def lag_versions(self) -> int:
        return max((r.lag_versions for r in self.sender.board.status() if r.alive), default=0)

    def wait(self, timeout_s: float) -> None:
        board = self.sender.board
        board.wait(board.version, timeout_s, range(self.sender.collector.num_workers))


class LocalEndpoint:
    """An in-process Collector: its own copies are written between rollouts."""

    def __init__(self, collector: compat.Collector) -> None:
        self.collector = collector
        self._stands: dict[str, tuple[Path, Leaves]] = {}
        self._keys: list[Key] = []
        self._transport = LocalTransport(Layout.build({}), self._copy)

    @property
    def transport(self) -> str:
        return "local: one process, written between rollouts"

    @property
    def notes(self) -> tuple[str, ...]:
        if self.stamped:
            return ()
        return ("frames are not stamped: pass track_policy_version=True to the collector",)

    @property
    def version(self) -> int:
        return self._transport.version

    @property
    def stamped(self) -> bool:
        return compat.is_stamped(self.collector)

    def connect(self, publish_default: Callable[[], object]) -> None:
        compat.around_rollouts(self.collector, self._acting)

    def locate(self, path: Path, where: str) -> Key:
        self._stands[str(path)] = path, Leaves(self._walk(path, where), f"collector.{path}")
        return str(path), ""

    def specs(self, destination: str) -> list[LeafSpec]:
        return self._leaves(destination).specs()

    def tensors(self, destination: str) -> dict[str, Tensor]:
        leaves = self._leaves(destination)
        return dict(zip(leaves.names, leaves.tensors(), strict=True))

    def publish(self, leaves: Mapping[Key, Tensor]) -> int:
        if list(leaves) != self._keys:
            self._lay_out(leaves)
        version = self._transport.publish([leaves[key] for key in self._keys])
        compat.announce_version(self.collector, self._transport.adopted)
        return version

    def advance_to(self, version: int) -> None:
        self._transport.advance_to(version)

    def lag_versions(self) -> int:
        return self._transport.version - self._transport.adopted

    def wait(self, timeout_s: float) -> None:
        """Nothing to wait for: a publish arrives at once, or when the running rollout ends."""

    def _lay_out(self, leaves: Mapping[Key, Tensor]) -> None:
        chosen: dict[str, list[LeafSpec]] = {}
        for (destination, name), tensor in leaves.items():
            leaf = LeafSpec(name, "parameter", tuple(tensor.shape), tensor.dtype)
            chosen.setdefault(destination, []).append(leaf)
        self._transport.layout = layout = Layout.build(chosen)
        self._keys = [(e.destination, e.leaf.name) for e in layout.entries]

    def _walk(self, path: Path, where: str) -> object:
        return walk(self.collector, path, error=DestinationNotFound, root_name="the collector", where=where)

    def _leaves(self, destination: str) -> Leaves:
        path, leaves = self._stands[destination]
        module = self._walk(path, "sync map")
        if module is not leaves.root or not leaves.unchanged():
            leaves = Leaves(module, f"collector.{destination}")
            self._stands[destination] = path, leaves
        return leaves

    @contextmanager
    def _acting(self, collector: compat.Collector) -> Iterator[None]:
        with self._transport.acting() as version:
            compat.stamp(collector, version)
            yield

    def _copy(self, version: int, layout: Layout, views: Sequence[Tensor]) -> None:
        arrived = dict(zip(layout.entries, views, strict=True))
        for destination in layout.destinations:
            mine = {e.leaf.name: v for e, v in arrived.items() if e.destination == destination}
            write(self._leaves(destination), mine)


class ForeignEndpoint:
    """Any other collector: its own ``update_policy_weights_`` carries weights that were checked."""

    def __init__(self, collector: object, destinations: list[str]) -> None:
        self.collector = collector
        self._schemed = bool(destinations)
        self.destinations = destinations or ["policy"]
        self._version = 0

    @property
    def transport(self) -> str:
        return f"{type(self.collector).__name__}.update_policy_weights_, as TorchRL does it"

    @property
    def notes(self) -> tuple[str, ...]:
        return (
            "this transport makes none of rlsync's promises: reads may be torn and stamps may lie; "
            "weight_sync_schemes={'policy': rlsync.BoardScheme()} makes them",
        )

    @property
    def version(self) -> int:
        return self._version

    @property
    def stamped(self) -> bool:
        return compat.is_stamped(self.collector)

    def connect(self, publish_default: Callable[[], object]) -> None:
        """Nothing to do: weights go through the collector's own method."""

    def locate(self, path: Path, where: str) -> Key:
        name = str(path)
        if name not in self.destinations:
            near = nearest_name(name, self.destinations)
            raise no_destination(name, where, self.destinations, near)
        if name != "policy" and isinstance(self.collector, compat.MultiCollector):
            raise DestinationNotFound(
                f"TorchRL's schemes hang on the destination {name!r} of a process collector",
                where,
                "take the scheme from a board: board = rlsync.WeightBoard(); board.scheme()",
            )
        return name, ""

    def specs(self, destination: str) -> list[LeafSpec] | None:
        get_model = getattr(self.collector, "get_model", None)
        if not callable(get_model):
            return None
        try:
            model = get_model(destination)
        except (ValueError, AttributeError, KeyError):
            return None
        if not isinstance(model, torch.nn.Module):
            return None
        return Leaves(model, f"collector.{destination}").specs()

    def tensors(self, destination: str) -> None:
        return None

    def publish(self, leaves: Mapping[Key, Tensor]) -> int:
        weights: dict[str, TensorDict] = {}
        for (destination, name), tensor in leaves.items():
            held = weights.setdefault(destination, TensorDict())
            held.set(tuple(name.split(".")), tensor.detach().clone())  # it may be queued, or be shared
        update = getattr(self.collector, "update_policy_weights_", None)
        if not callable(update):
            raise PublishError(
                f"{type(self.collector).__name__} takes no weights",
                "SyncWeights",
                "use a TorchRL collector, or one that has update_policy_weights_",
            )
        if self._schemed:
            update(weights_dict=weights)
        else:
            update(weights["policy"])
        self._version += 1
        return self._version

    def advance_to(self, version: int) -> None:
        self._version = max(self._version, version)

    def lag_versions(self) -> int:
        return 0

    def wait(self, timeout_s: float) -> None:
        """Nothing to wait for: TorchRL's update returns when it is done."""
