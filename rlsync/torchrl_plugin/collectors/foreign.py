"""The endpoints of other collectors and servers: third-party, distributed, or with TorchRL's own schemes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from functools import partial
from typing import NoReturn, Protocol, runtime_checkable

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torchrl.collectors.distributed import DistributedCollector, RayCollector, RPCCollector

from rlsync.core.errors import ConfigError, DestinationNotFound, PublishError
from rlsync.core.ledger import NOTHING, Stamp
from rlsync.core.path import Path, parse, walk
from rlsync.core.plan import no_destination
from rlsync.sync.endpoint import Endpoint
from rlsync.sync.publisher import Publisher
from rlsync.tensors.layout import Layout, LeafSpec
from rlsync.tensors.leaves import Leaves
from rlsync.torchrl_plugin.compat import collectors, distributed, schemes, stamps, wrap_batches
from rlsync.torchrl_plugin.compat.distributed import Remote
from rlsync.torchrl_plugin.compat.stamps import is_stamped
from rlsync.torchrl_plugin.served import specs_of
from rlsync.transport.contract import ReaderStatus, Transport
from rlsync.transport.rules import Key, check_newer, laid_out

#: The argument of a process collector that puts its workers on a board.
WITH_A_BOARD = "weight_sync_schemes={'policy': rlsync.BoardScheme()}"

#: The argument of an inference server, or of the collector that has one, that puts it on a board.
WITH_A_BOARD_SERVER = "weight_sync=rlsync.BoardScheme()"


def what_keeps_them(collector: object) -> str:
    """What keeps rlsync's promises where ``collector`` does not, with its verb."""
    match collector:
        case collectors.MultiCollector() | DistributedCollector():
            return f"{WITH_A_BOARD} keeps them"
        case RPCCollector():
            return f"on one host, DistributedCollector(launcher='mp', {WITH_A_BOARD}) keeps them"
        case RayCollector():
            return (
                "weight_sync_schemes={'policy': rlsync.RayBoardScheme()} with "
                "collector_kwargs={'track_policy_version': True} keeps them"
            )
    return f"MultiSyncCollector and MultiAsyncCollector keep them, with {WITH_A_BOARD}"


@runtime_checkable
class ShowsModels(Protocol):
    """A collector that says which module it has for a destination."""

    def get_model(self, model_id: str) -> object:
        """The module."""


class ForeignEndpoint(Endpoint):
    """Any other collector: its own ``update_policy_weights_`` carries weights that were checked."""

    num_workers = 0
    takes_parts = False  # TorchRL copies the names of a module's own parameters

    def __init__(self, collector: object, destinations: list[str]) -> None:
        self.collector = collector
        self.destinations = destinations or ["policy"]
        self.transport = CallTransport(collector, bool(destinations))
        self.publisher = Publisher(self.transport, leaves_at=self.specs)

    @property
    def description(self) -> str:
        return f"{type(self.collector).__name__}.update_policy_weights_, as TorchRL does it"

    @property
    def notes(self) -> tuple[str, ...]:
        return (f"this transport {self.unkept}; {what_keeps_them(self.collector)}",)

    @property
    def unkept(self) -> str:
        """Which of rlsync's promises this transport does not keep, in words."""
        if self.stamped:
            stamps = "stamps may be wrong"
        else:
            stamps = "frames carry no policy_version"
        return f"keeps none of rlsync's promises: reads may be torn and {stamps}"

    @property
    def stamped(self) -> bool:
        return is_stamped(self.collector)

    @property
    def in_flight(self) -> bool:
        return collectors.collects_in_the_background(self.collector)

    def locate(self, path: Path, where: str) -> Key:
        name = str(path)
        if name not in self.destinations:
            raise no_destination(name, where, self.destinations)
        if name != "policy" and isinstance(self.collector, collectors.MultiCollector):
            problem = f"TorchRL's schemes hang on the destination {name!r} of a process collector"
            cure = "take the scheme from a board: board = rlsync.WeightBoard(); board.scheme()"
            raise DestinationNotFound(problem, where, cure)
        return name, ""

    def specs(self, destination: str) -> list[LeafSpec] | None:
        # Distributed collectors have no get_model; they hold what their workers copied.
        model: object
        try:
            if isinstance(self.collector, ShowsModels):
                model = self.collector.get_model(destination)
            else:
                path = parse(destination)
                model = walk(self.collector, path, error=DestinationNotFound, root_name="collector")
        except (ValueError, AttributeError, KeyError, DestinationNotFound):
            return None
        if isinstance(model, nn.Module):
            return Leaves(model, f"collector.{destination}").specs()
        return None

    def verification(self) -> NoReturn:
        problem = f"the workers of this {type(self.collector).__name__} cannot be asked what they act with"
        cure = "leave VerifySync out: " + what_keeps_them(self.collector)
        raise ConfigError(problem, "VerifySync.register", cure)


class OtherServerEndpoint(ForeignEndpoint):
    """A server whose weights do not come from a board."""

    @property
    def notes(self) -> tuple[str, ...]:
        return (f"this transport {self.unkept}; {WITH_A_BOARD_SERVER} keeps them",)

    unkept = (
        "does not keep rlsync's promises: policy_version on frames is the server's own count of updates, "
        "not the published version"
    )
    in_flight = True

    def specs(self, destination: str) -> list[LeafSpec] | None:
        return specs_of(self.collector)

    def verification(self) -> NoReturn:
        problem = "this inference server cannot be asked what it acts with"
        where = f"VerifySync.register; the collector is a {type(self.collector).__name__}"
        raise ConfigError(problem, where, f"{WITH_A_BOARD_SERVER} lets it answer")


class CallTransport(Transport):
    """A transport that calls ``collector.update_policy_weights_`` with the tensors of each publish.

    TorchRL carries the bytes, so only law 2 of :class:`rlsync.transport.contract.Transport` (the stamp)
    holds.
    """

    background = False
    through_host = False
    layout: Layout | None = None
    newest_stamp: Stamp = NOTHING

    def __init__(self, collector: object, schemed: bool) -> None:
        self._collector = collector
        self._schemed = schemed
        self.underway: Stamp | None = None  #: of the publish that is being made now

    @property
    def handle(self) -> NoReturn:
        problem = "TorchRL's workers do not subscribe"
        raise ConfigError(problem, type(self._collector).__name__, "use a BoardScheme")

    def lay_out(self, layout: Layout) -> None:
        self.layout = layout

    def publish(
        self, tensors: Sequence[Tensor | None], later: Set[int] = frozenset(), *, stamp: Stamp
    ) -> int | None:
        check_newer(stamp, self.newest_stamp)
        weights: dict[str, TensorDict] = {}
        for entry in laid_out(self).entries:
            tensor = tensors[entry.owner]
            if tensor is not None:  # cloned: TorchRL may queue or share what it is given
                tree = weights.setdefault(entry.destination, TensorDict())
                tree.set(tuple(entry.leaf.name.split(".")), tensor.detach().clone())
        self.underway = stamp
        try:
            self._update(weights)
        finally:
            self.underway = None
        self.newest_stamp = stamp
        return stamp.version

    def _update(self, weights: dict[str, TensorDict]) -> None:
        update = getattr(self._collector, "update_policy_weights_", None)
        if not callable(update):
            cure = "use a TorchRL collector, or one that has update_policy_weights_"
            raise PublishError(
                f"{type(self._collector).__name__} takes no weights", "SyncWeights", cure
            )
        if self._schemed:
            update(weights_dict=weights)
        else:
            update(weights["policy"])

    def status(self) -> list[ReaderStatus]:
        """Empty: TorchRL's workers cannot be seen."""
        return []

    def wait(self, version: int, timeout_s: float, readers: Iterable[int] | None = None) -> None:
        """Nothing to wait for: TorchRL's update returns when it is done."""

    def ask(self, lowest: int) -> NoReturn:
        problem = "TorchRL's workers cannot be asked"
        raise ConfigError(problem, type(self._collector).__name__, "use a BoardScheme")


_WHILE_A_ROLLOUT_RUNS = (
    "TorchRL applies weights while a rollout runs, so no version can be named for a frame"
)


class RemoteEndpoint(ForeignEndpoint):
    """A DistributedCollector, RPCCollector or RayCollector that sends by TorchRL's own scheme.

    Frames are stamped, by an actor of Ray or by the learner, where TorchRL applies weights between rollouts
    only. Then every update through the collector is a version, also one of the user's.
    """

    collector: Remote
    needs_every_leaf = True  # a worker receives one tensor for each leaf that it has

    def __init__(self, collector: Remote, destinations: list[str]) -> None:
        super().__init__(collector, destinations)
        self.unknown = _why_unknown(collector)

    @property
    def stamped(self) -> bool:
        return not self.unknown

    @property
    def unkept(self) -> str:
        return f"keeps none of rlsync's promises: reads may be torn, and {self.unknown}"

    @property
    def notes(self) -> tuple[str, ...]:
        if self.unknown:
            return super().notes
        return (
            "TorchRL carries the weights, and applies them between rollouts: stamps are exact, a publish "
            "waits for the workers, and what they act with cannot be verified",
        )

    def connect(self, publish_default: Callable[[], object]) -> None:
        """Number every update of the collector, and stamp its frames, where that is exact."""
        if self.unknown:
            return
        schemes.around_updates(self.collector, self._numbered)
        wrap_batches(self.collector, partial(map, self._stamp))

    @contextmanager
    def _numbered(self, _: object, worker_ids: object) -> Iterator[None]:
        """An update of the collector: a publish of ours, or one that somebody else makes."""
        ours = self.transport.underway
        ledger = self.publisher.ledger
        if ours is None:
            stamp = ledger.next
        else:
            stamp = ours
        if isinstance(self.collector, RayCollector):
            distributed.number_next_update(self.collector, stamp.version)
        elif worker_ids is not None:
            problem = "the learner stamps the frames of all workers with one version"
            where = (
                f"{type(self.collector).__name__}.update_policy_weights_(worker_ids={worker_ids!r})"
            )
            raise PublishError(problem, where, "leave worker_ids out")
        yield
        if ours is None:
            ledger.record(stamp)

    def _stamp(self, batch: TensorDictBase | None) -> TensorDictBase | None:
        if batch is None:
            return None
        if isinstance(self.collector, RayCollector):
            # TorchRL wrote the root of a batch's first frame in the rollout before.
            return batch.set(stamps.STAMP, batch.get(("next", stamps.STAMP)).clone())
        for key in (stamps.STAMP, ("next", stamps.STAMP)):
            version = self.publisher.version
            batch.set(key, torch.full(batch.shape, version, dtype=torch.int64, device="cpu"))
        return batch


def _why_unknown(collector: Remote) -> str:
    """Why the version that made a frame cannot be known; empty if it can."""
    if not distributed.single_collectors(collector):
        return f"a {collector.collector_class.__name__} in a node passes weights on without their version"
    if isinstance(collector, RayCollector):
        return _why_unknown_on_ray(collector)
    if not distributed.waits_for_learner(collector):
        return f"{_WHILE_A_ROLLOUT_RUNS} (sync=True avoids that)"
    if distributed.sends_to_some_workers(collector):
        return "the collector sends weights by itself (leave update_interval and max_weight_update_interval out)"
    return ""


def _why_unknown_on_ray(collector: RayCollector) -> str:
    if not distributed.applies_between_rollouts(collector):
        return "only a RayWeightSyncScheme sends a number with the weights"
    if collector.replay_buffer is not None:
        return "workers write to the replay buffer what the learner has not seen (leave replay_buffer out)"
    if not distributed.actors_are_stamped(collector):
        return (
            "frames carry no policy_version (pass collector_kwargs={'track_policy_version': True})"
        )
    return ""
