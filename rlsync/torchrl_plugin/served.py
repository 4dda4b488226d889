"""Which collectors and inference servers a BoardScheme serves, and what it needs of each kind."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing.process import BaseProcess
from typing import Any

from torch import nn
from torchrl.collectors import AsyncBatchedCollector, MultiAsyncCollector
from torchrl.collectors.distributed import DistributedCollector, RayCollector, RPCCollector
from torchrl.envs import EnvBase
from torchrl.modules.inference_server import InferenceServer, ProcessInferenceServer
from torchrl.weight_update import WeightSyncScheme

from rlsync.core.errors import ConfigError, DestinationNotFound
from rlsync.core.plan import POLICY
from rlsync.sync.families import require_children
from rlsync.sync.processes import WorkerProcesses, await_ready
from rlsync.sync.starting import StartLog, StartLogs
from rlsync.sync.workers_publisher import WorkersPublisher
from rlsync.tensors.layout import LeafSpec
from rlsync.tensors.leaves import Leaves
from rlsync.tensors.sendable import check_sendable
from rlsync.torchrl_plugin.compat import collectors, distributed, schemes, servers, stamps
from rlsync.torchrl_plugin.compat.stamps import STAMP
from rlsync.torchrl_plugin.ending import waits
from rlsync.torchrl_plugin.ending.watch import Watch
from rlsync.transport.board.writer import BoardWriter


class Served:
    """A collector under construction whose workers will read a board. ``workers`` stays the same object."""

    def __init__(self, workers: WorkerProcesses) -> None:
        self.workers = workers

    def policy(self) -> object:
        """What holds the weights that the workers act with first; ``None`` if they make it themselves."""
        raise NotImplementedError


def check_policy(policy: object, collector: str) -> None:
    """Refuse (ConfigError) a policy that cannot be sent to the workers of a collector."""
    if isinstance(policy, nn.Module):
        way_out = "pass policy_factory=..., a function that makes the policy in each worker"
        method = collectors.start_method()
        check_sendable(
            policy,
            POLICY,
            {POLICY: policy},
            where=f"policy of {collector}",
            start_method=method,
            way_out=way_out,
        )


def make_logged(make: Callable[..., EnvBase], log: StartLog, **kwargs: object) -> EnvBase:
    """Make a worker's environments, and log what the worker prints meanwhile."""
    with log.making():
        return make(**kwargs)


class ServedProcesses(Served):
    """A MultiSyncCollector or MultiAsyncCollector."""

    workers: collectors.MultiCollector
    first_worker = 0  #: the number that TorchRL gives to the first worker

    def policy(self) -> object:
        """Workers receive it without its memory, and take the weights from the board."""
        if not collectors.has_own_policy_template(self.workers):
            return None
        schemes.send_whole_if_meta_changes_it(self.workers)
        return schemes.weights_of(self.workers.policy)

    def prepare(self, publisher: WorkersPublisher, logs: StartLogs) -> None:
        """Make the workers stamp frames, and log what they print at their start.

        Called before they start. ConfigError: TorchRL would send a policy without its weights, and no scheme
        brings them; or Python lets this process start no other.
        """
        require_children()
        name = type(self.workers).__name__
        sent: object = None
        if collectors.has_own_policy_template(self.workers):
            check_policy(self.workers.policy, name)
            sent = schemes.weights_of(self.workers.policy)
        brought = list(schemes.schemes_of(self.workers))
        if POLICY not in brought and isinstance(sent, nn.Module) and Leaves(sent, POLICY).leaves:
            raise ConfigError(
                "no scheme brings the workers the weights of their policy",
                f"weight_sync_schemes={brought} of {name}",
                "write {'policy': BoardScheme()}; a map may name parts of it, as {'policy.module[0]': ...}; "
                "for more destinations take board.scheme() of one WeightBoard for each",
            )
        stamps.turn_on_stamps(self.workers)
        collectors.lead_groups(self.workers)
        collectors.around_env_makers(
            self.workers, lambda at, make: partial(make_logged, make, logs.each[at])
        )
        if isinstance(self.workers, MultiAsyncCollector):
            waits.keep_rollouts(self.workers)
        collectors.after_load_state_dict(self.workers, partial(publish_loaded, publisher))

    def await_start(
        self,
        publisher: WorkersPublisher,
        timeouts_s: tuple[float | None, float | None],
        logs: StartLogs,
    ) -> None:
        """Wait until workers say that they stand, then watch them; timeouts: start, and silence."""
        # the scheme of another destination has waited for them
        if waits.have_started(self.workers):
            return
        collectors.end_groups(self.workers)
        to_start_s, silent_s = timeouts_s
        board = publisher.transport
        if isinstance(board, BoardWriter):
            order = board.order_of_arrival(silent_s)
            if order is not None:
                collectors.let_arrive(self.workers, order)
        waits.await_start(
            self.workers, to_start_s, logs, lambda: Watch(publisher, self.workers, silent_s)
        )


class ServedNodes(Served):
    """A DistributedCollector whose workers are single collectors on this host."""

    workers: distributed.DistributedWorkers
    first_worker = distributed.FIRST_RANK

    def policy(self) -> nn.Module | None:
        return distributed.own_policy(self.workers.collector)

    def prepare(self, publisher: WorkersPublisher, logs: StartLogs) -> None:
        """What these workers print is not logged."""
        require_children()
        distributed.stamp_nodes(self.workers.collector)
        policy = self.policy()
        if policy is not None:
            check_policy(policy, type(self.workers.collector).__name__)
            distributed.send_policy_by_value(self.workers.collector, policy)

    def await_start(
        self,
        publisher: WorkersPublisher,
        timeouts_s: tuple[float | None, float | None],
        logs: StartLogs,
    ) -> None:
        """A worker that has left its note on the board stands. If one does not, end all of them."""

        def ready(worker: int, seconds: float) -> bool:
            deadline = time.monotonic() + seconds
            while not publisher.has_told(worker):
                if time.monotonic() >= deadline:
                    return False
                time.sleep(0.01)
            return True

        try:
            await_ready(self.workers.procs, ready, timeouts_s[0])
        except BaseException:
            self.workers.shutdown(0.0)
            raise


class ServedServer:
    """What a publisher asks of a collector, asked of an inference server that was given ``scheme``."""

    num_workers = 1

    def __init__(self, holder: object, scheme: object) -> None:
        server = servers.server_of(holder)
        if server is None or isinstance(server, servers.RayInferenceServer):
            raise ConfigError(
                "a board serves inference servers of this host, in a thread or in a process",
                f"BoardScheme, {type(holder).__name__}",
                "use service_backend='thread' or 'process'; an actor of Ray takes weights by its own "
                "update_model_weights",
            )
        if servers.scheme_of_server(server) is not scheme:
            problem = f"this scheme is not the weight_sync of that {type(holder).__name__}"
            cure = "pass one scheme to both: weight_sync=scheme when the server or the collector is made"
            raise ConfigError(problem, "BoardScheme.init_on_sender", cure)
        self._holder = weakref.ref(holder)
        self._server = weakref.ref(server)
        self.in_a_process = isinstance(server, ProcessInferenceServer)
        self.destination: str = servers.destination_of_server(server)
        self.stamped = servers.is_stamped_by(server)
        self._specs: list[LeafSpec] | None = None

    def serves(self, holder: object) -> bool:
        return servers.server_of(holder) is self._server()

    def connect(self, scheme: WeightSyncScheme, publisher: WorkersPublisher) -> str:
        """Let the collector's own method publish, and stamp both ends of a step; the policy's name."""
        holder = self._holder()
        if isinstance(holder, AsyncBatchedCollector):
            servers.send_by(holder, {self.destination: scheme})
            schemes.around_updates(holder, lambda to, _: publisher.one_publish(to))
            servers.stamp_both_ends(holder)
        return self.destination

    @property
    def procs(self) -> list[BaseProcess]:
        """The process of the server; none for a thread, and before the start."""
        server = self._server()
        if server is None:
            return []
        process = servers.process_of(server)
        if process is None:
            return []
        return [process]

    @property
    def closed(self) -> bool:
        return self._server() is None

    def get_model(self, model_id: str) -> nn.Module:
        """The learner's module for a destination; ValueError if it holds none."""
        holder = self._holder()
        if isinstance(holder, AsyncBatchedCollector) and isinstance(holder.policy, nn.Module):
            return holder.policy
        raise ValueError(f"the learner holds no module {model_id!r}")

    def shutdown(self, timeout: float | None = None, *, raise_on_error: bool = True) -> None:
        """End the server, and the collector that asks it."""
        holder = self._holder()
        if isinstance(holder, AsyncBatchedCollector):
            holder.shutdown(timeout=timeout, raise_on_error=raise_on_error)
        elif isinstance(holder, InferenceServer | ProcessInferenceServer):
            holder.shutdown(timeout=timeout)

    def expected(self, destination: str) -> list[LeafSpec] | None:
        """The leaves of the policy, which a factory makes once more, before the server has started."""
        if destination != self.destination:
            return None
        if self._specs is None:
            self._specs = specs_of(self._holder())
        if self._specs is None:
            problem = (
                f"the {destination!r} of this inference server is no module, so it has no weights"
            )
            cure = "serve an nn.Module, or leave weight_sync out"
            raise DestinationNotFound(problem, "BoardScheme as weight_sync", cure)
        return self._specs


def specs_of(holder: object) -> list[LeafSpec] | None:
    """The leaves of the policy that a server serves, or a collector's server; ``None`` if it is no module."""
    policy = servers.policy_like_served(holder)
    if isinstance(policy, nn.Module):
        return Leaves(policy, "the served policy").specs()
    return None


def served(collector: object, destination: str) -> ServedProcesses | ServedNodes:
    """How a board serves a collector under construction; ConfigError if it does not reach its workers."""
    where = f"weight_sync_schemes[{destination!r}] of {type(collector).__name__}"
    match collector:
        case collectors.MultiCollector():
            return ServedProcesses(collector)
        case DistributedCollector():
            _check_on_this_host(collector, where)
            return ServedNodes(distributed.workers_of(collector, distributed.DistributedWorkers))
        case RayCollector():
            problem = "a board is memory of one host, and Ray starts workers on any node"
            raise ConfigError(
                problem, where, "use RayBoardScheme instead, which keeps a board on each node"
            )
        case RPCCollector():
            collector.shutdown()  # TorchRL asks only when its workers stand, and would leave them
            raise ConfigError(
                "a board must know a collector before its workers start, and RPCCollector starts them first",
                where,
                "use DistributedCollector(launcher='mp') with the scheme on one host, or RayCollector with a "
                "RayBoardScheme on several",
            )
    cure = (
        "use MultiSyncCollector or MultiAsyncCollector; an in-process Collector needs no scheme, "
    )
    cure += "SyncWeights alone does it"
    raise ConfigError(
        f"a board serves process collectors, not {type(collector).__name__}", where, cure
    )


def _check_on_this_host(collector: DistributedCollector, where: str) -> None:
    if collector.launcher != "mp":
        raise ConfigError(
            f"a board is memory of one host, and launcher={collector.launcher!r} may start workers on others",
            where,
            "pass launcher='mp' to keep them on this host; for several hosts use RayCollector with a "
            "RayBoardScheme, which keeps a board on each node",
        )
    if not distributed.single_collectors(collector):
        problem = f"a board does not reach the workers of a {collector.collector_class.__name__} in each node"
        cure = "leave collector_class out, and give each environment a node of its own"
        raise ConfigError(problem, where, cure)
    refuse_updates_of_one(collector, where)


def refuse_updates_of_one(collector: DistributedCollector | RayCollector, where: str) -> None:
    """Refuse a collector that would send weights to one worker at a time (ConfigError)."""
    argument = distributed.sends_to_one_worker(collector)
    if argument:
        problem = "a board publishes to all workers at once, and this collector would send to one at a time"
        cure = "leave it out: SyncWeights, or collector.update_policy_weights_(), publishes between batches"
        raise ConfigError(problem, f"{where}, with {argument}", cure)


def publish_loaded(publisher: WorkersPublisher, state_dict: Mapping[str, Any]) -> None:
    """Publish the policy of a loaded state dict, unless a hook publishes; versions go on from its."""
    loaded = state_dict.get("worker0", {}).get("policy_state_dict")
    if (
        loaded is None
        or publisher.publish_default is not None
        or POLICY not in publisher.destinations
    ):
        return
    publisher.ledger.advance_to(int(state_dict.get(STAMP) or 0))
    publisher.send_over(POLICY, loaded)
