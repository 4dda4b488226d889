"""The endpoint of an in-process Collector."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn
from torchrl.collectors import Collector

from rlsync.core import trace
from rlsync.core.errors import DestinationNotFound
from rlsync.core.path import Path, walk
from rlsync.sync.acts import Acting
from rlsync.sync.endpoint import Endpoint
from rlsync.sync.held import settings_of
from rlsync.sync.publisher import Publisher
from rlsync.sync.sample import Shadow
from rlsync.sync.verification import Answers, Verification, digests_of
from rlsync.tensors.derived import KeepsDerived, keepers, outdate
from rlsync.tensors.device import NOTHING_QUEUED, Moment, queued_devices
from rlsync.tensors.layout import Layout, LeafSpec
from rlsync.tensors.leaves import Leaves
from rlsync.tensors.target import write
from rlsync.torchrl_plugin.compat import collectors, in_place_of, stamps
from rlsync.torchrl_plugin.worker import acting_in, shadow_of
from rlsync.transport.local import LocalTransport
from rlsync.transport.rules import Key


class InProcessEndpoint(Endpoint):
    """An in-process Collector: its own copies are written between rollouts."""

    description = "local: one process, written between rollouts"
    num_workers = 1

    def __init__(self, collector: Collector) -> None:
        self.collector = collector
        self._found: dict[str, tuple[Path, Leaves]] = {}
        # looked for when they are needed first
        self._keepers: tuple[KeepsDerived, ...] | None = None
        self._call = collectors.policy_call(collector)
        self._acts: Acting | None = None
        self._unnumbered = False  # whether TorchRL has written what acts since the newest version
        # A publish writes in the learner's thread, a rollout may run in another. On an accelerator each has
        # streams of its own, so that the two must be put in order.
        self._devices: frozenset[torch.device] = frozenset()
        self._written = NOTHING_QUEUED
        self._read = NOTHING_QUEUED
        transport = LocalTransport()
        self._reader = transport.subscribe(self._apply)
        self._answers = Answers(self._reader, self._digests, self._arriving)
        self._answers.shadow = self._shadow
        self.publisher = Publisher(transport, leaves_at=self.specs)
        # While a rollout runs, frames carry the version that acts, not the newest one.
        self.publisher.announce = lambda _: stamps.announce_version(collector, self._reader.version)

    @property
    def notes(self) -> tuple[str, ...]:
        if self.stamped:
            return ()
        return ("frames are not stamped: pass track_policy_version=True to the collector",)

    @property
    def stamped(self) -> bool:
        return stamps.is_stamped(self.collector)

    @property
    def in_flight(self) -> bool:
        return bool(self.collector.is_running())

    def connect(self, publish_default: Callable[[], object]) -> None:
        collectors.around_rollouts(self.collector, self._acting)

        @in_place_of(self.collector, "update_policy_weights_")
        def update(collector: Collector, *args: object, **kwargs: object) -> None:
            with self._reader.acting():  # between two rollouts
                self._read.order()
                self._unnumbered = True
                type(collector).update_policy_weights_(collector, *args, **kwargs)
                self._outdate()
                if self.in_flight:
                    self._number()

    def locate(self, path: Path, where: str) -> Key:
        self._found[str(path)] = path, Leaves(self._walk(path, where), f"collector.{path}")
        self._keepers = None
        return str(path), ""

    def specs(self, destination: str) -> list[LeafSpec]:
        return self._leaves(destination).specs()

    def tensors(self, destination: str) -> dict[str, Tensor]:
        leaves = self._leaves(destination)
        return dict(zip(leaves.names, leaves.tensors(), strict=True))

    def around(self) -> dict[str, Tensor | None]:
        parameters: dict[str, Tensor | None] = {}
        for first in dict.fromkeys(Path(path.segments[:1]) for path, _ in self._found.values()):
            whole = self._walk(first, "sync map")
            if isinstance(whole, nn.Module):
                for name, parameter in whole.named_parameters():
                    parameters[f"{first}.{name}"] = parameter
        return parameters

    def acting(self, sent: Collection[str]) -> Acting:
        """Looked at once, before anything runs: it writes to what acts, which a rollout may use later."""
        if self.in_flight:
            return Acting(unknown=dict.fromkeys(self._found, "it acts already, in another thread"))
        if self._acts is None:
            fed: dict[str, object] = {}
            settings: dict[str, Mapping[str, str]] = {}
            for name, (_, leaves) in self._found.items():
                settings[name] = settings_of(leaves.root, name)
                if name in sent:
                    fed[name] = leaves.root
            acts = acting_in(self.collector, self._call, fed, ())
            self._acts = replace(acts, settings=settings)
        return self._acts

    def wait(self, timeout_s: float) -> None:
        self.publisher.transport.wait(self.publisher.version, timeout_s, [0])

    def verification(self) -> Verification:
        return Verification(
            self.publisher, lambda: self.num_workers, lambda _: "the collector of this process"
        )

    def _walk(self, path: Path, where: str) -> object:
        return walk(
            self.collector, path, error=DestinationNotFound, root_name="the collector", where=where
        )

    def _leaves(self, destination: str) -> Leaves:
        path, leaves = self._found[destination]
        module = self._walk(path, "sync map")
        if module is not leaves.root or not leaves.unchanged():
            leaves = Leaves(module, f"collector.{destination}")
            self._found[destination] = path, leaves
            self._keepers = None
        return leaves

    def _outdate(self) -> None:
        """Drop what acts keeps of a computation with the weights of before."""
        if self._keepers is None:
            acts = self._places().values()
            self._keepers = keepers([collectors.policy_of(self.collector), *acts])
        outdate(self._keepers)

    def _number(self) -> None:
        """Publish what acts, which TorchRL has written: its frames need a number of their own."""
        self._unnumbered = False
        layout = self.publisher.transport.layout
        if layout is not None:  # else nothing was published yet
            live = {name: self.tensors(name) for name in layout.destinations}
            brought: dict[Key, Tensor] = {}
            for entry in layout.entries:
                tensor = live[entry.destination][entry.leaf.name]
                brought[entry.destination, entry.leaf.name] = tensor
            self.publisher.publish(brought)

    @contextmanager
    def _acting(self, collector: Collector) -> Iterator[None]:
        if self._unnumbered:
            self._number()
        with self._reader.acting() as version:
            stamps.stamp(collector, version)
            if trace.ON:
                trace.write(trace.LEARNER, "begin", version)
                trace.write(trace.LEARNER, "stamp", version)
            self._written.order()
            with self._answers.around(version):
                yield
            self._read = Moment.now(self._devices)

    def _places(self) -> dict[str, object]:
        """What stands at each destination now."""
        return {name: self._leaves(name).root for name in self._found}

    def _shadow(self) -> Shadow:
        return shadow_of(self.collector, self._call, self._places())

    def _arriving(self, destination: str) -> list[str]:
        layout = self.publisher.transport.layout
        if layout is None:
            return []
        return [leaf.name for leaf in layout.destinations.get(destination, ())]

    def _digests(self, parameters: bool) -> dict[str, int]:
        """Digests of the live leaves that publishes bring, by destination."""
        digests: dict[str, int] = {}
        for name in self._found:
            brought = self._arriving(name)
            if brought:
                leaves = self._leaves(name).leaves
                digests[name] = digests_of(leaves, brought, parameters=parameters)
        return digests

    def _apply(self, version: int, layout: Layout, views: Sequence[Tensor]) -> bool:
        arrived: dict[str, dict[str, Tensor]] = {name: {} for name in layout.destinations}
        for entry, view in zip(layout.entries, views, strict=True):
            arrived[entry.destination][entry.leaf.name] = view
        self._read.order()
        self._unnumbered = False
        for destination, tensors in arrived.items():
            write(self._leaves(destination), tensors)
        self._outdate()
        live: list[Tensor] = []
        for destination in arrived:
            live += self._leaves(destination).tensors()
        self._devices = queued_devices(live)
        self._written = Moment.now(self._devices)
        self._answers.fresh = True
        return False
