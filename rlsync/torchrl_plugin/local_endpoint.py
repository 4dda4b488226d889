"""The endpoint of an in-process Collector."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import Tensor

from rlsync.core.errors import DestinationNotFound
from rlsync.core.path import Path, walk
from rlsync.tensors.layout import Layout, LeafSpec
from rlsync.tensors.leaves import Leaves
from rlsync.tensors.target import write
from rlsync.torchrl_plugin import compat
from rlsync.torchrl_plugin.check import LocalCheck
from rlsync.torchrl_plugin.sender import Key
from rlsync.transport.local import LocalTransport


class LocalEndpoint:
    """An in-process Collector: its own copies are written between rollouts."""

    def __init__(self, collector: compat.Collector) -> None:
        self.collector = collector
        self._stands: dict[str, tuple[Path, Leaves]] = {}
        self._keys: list[Key] = []
        self._check = LocalCheck(self._leaves)
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

    @property
    def publishes_in_background(self) -> bool:
        return False

    def join(self) -> None:
        """Nothing to wait for: a publish is made when it returns."""

    def publish(self, leaves: Mapping[Key, Tensor], steady: Collection[Key] = ()) -> int:
        if list(leaves) != self._keys:
            self._lay_out(leaves)
        version = self._transport.publish([leaves[key] for key in self._keys])
        compat.announce_version(self.collector, self._transport.adopted)
        return version

    def advance_to(self, version: int) -> None:
        self._transport.advance_to(version)

    def acting_versions(self) -> list[int]:
        return [self._transport.adopted]

    @property
    def in_flight(self) -> bool:
        return self.collector.is_running()

    def wait(self, timeout_s: float) -> None:
        """Nothing to wait for: a publish arrives at once, or when the running rollout ends."""

    def check(self) -> LocalCheck:
        return self._check

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
            self._check.acted(version)

    def _copy(self, version: int, layout: Layout, views: Sequence[Tensor]) -> None:
        arrived = dict(zip(layout.entries, views, strict=True))
        for destination in layout.destinations:
            mine = {e.leaf.name: v for e, v in arrived.items() if e.destination == destination}
            write(self._leaves(destination), mine)
        self._check.adopted(version, layout, views)
