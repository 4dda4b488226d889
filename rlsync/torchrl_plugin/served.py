"""Which collectors a BoardScheme serves, and what it needs of each kind."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torchrl.collectors import MultiAsyncCollector
from torchrl.collectors.distributed import DistributedCollector, RayCollector, RPCCollector

from rlsync.core.errors import ConfigError
from rlsync.core.plan import POLICY
from rlsync.sync.processes import await_ready
from rlsync.sync.starting import StartLog, StartLogs
from rlsync.sync.workers_publisher import WorkerProcesses, WorkersPublisher
from rlsync.torchrl_plugin.compat import collectors, distributed, schemes, stamps
from rlsync.torchrl_plugin.compat.stamps import STAMP
from rlsync.torchrl_plugin.ending import waits
from rlsync.torchrl_plugin.ending.kept_rollouts import keep_rollouts


class Served:
    """A collector under construction whose workers will read a board.

    ``workers`` is how a publisher sees them, the same object whenever it is asked.
    """

    def __init__(self, workers: WorkerProcesses) -> None:
        self.workers = workers

    def policy(self) -> object:
        """What holds the weights that the workers act with first; ``None`` if they make it themselves."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class LoggedMaker:
    """What makes a worker's environments, and logs what the worker prints meanwhile."""

    make: Callable[..., Any]
    log: StartLog

    def __call__(self, **kwargs: Any) -> Any:
        with self.log.making():
            return self.make(**kwargs)


class ServedProcesses(Served):
    """A MultiSyncCollector or MultiAsyncCollector."""

    workers: collectors.MultiCollector
    first_worker = 0  #: the number that TorchRL gives to the first worker

    def policy(self) -> object:
        """Workers receive it without its memory, and take the weights from the board."""
        if not collectors.has_own_policy_template(self.workers):
            return None
        schemes.send_whole_if_no_module(self.workers)
        return schemes.weights_of(self.workers.policy)

    def prepare(self, publisher: WorkersPublisher, logs: StartLogs) -> None:
        """Make the workers stamp frames, and log what they print at their start. Called before they start."""
        stamps.turn_on_stamps(self.workers)
        collectors.around_env_makers(self.workers, lambda worker, make: LoggedMaker(make, logs[worker]))
        if isinstance(self.workers, MultiAsyncCollector):
            keep_rollouts(self.workers)
        collectors.after_load_state_dict(self.workers, partial(publish_loaded, publisher))

    def await_start(self, told: Callable[[int], bool], timeout_s: float | None, logs: StartLogs) -> None:
        """Wait until the workers stand: these say so on a pipe, or why not.

        WorkerLost: a worker ended before it stood. AdoptionTimeout: one does not stand in time.
        """
        waits.await_start(self.workers, timeout_s, logs)


class ServedNodes(Served):
    """A DistributedCollector whose workers are single collectors on this host."""

    workers: distributed.DistributedWorkers
    first_worker = distributed.FIRST_RANK

    def __init__(self, collector: DistributedCollector) -> None:
        super().__init__(distributed.distributed_workers(collector))
        self._policy = distributed.own_policy(collector)

    def policy(self) -> object:
        return self._policy

    def prepare(self, publisher: WorkersPublisher, logs: StartLogs) -> None:
        """What these workers print is not logged."""
        distributed.stamp_nodes(self.workers.collector)
        if self._policy is not None:
            distributed.send_policy_by_value(self.workers.collector, self._policy)

    def await_start(self, told: Callable[[int], bool], timeout_s: float | None, logs: StartLogs) -> None:
        """``told(worker)`` is whether one has left its note on the board, which says that it stands.

        If a worker does not stand, all are ended: TorchRL would leave them.
        """

        def ready(worker: int, seconds: float) -> bool:
            deadline = time.monotonic() + seconds
            while not told(worker):
                if time.monotonic() >= deadline:
                    return False
                time.sleep(0.01)
            return True

        try:
            await_ready(self.workers.procs, ready, timeout_s)
        except BaseException:
            self.workers.shutdown(0.0)
            raise


def served(collector: object, destination: str) -> ServedProcesses | ServedNodes:
    """How a board serves a collector under construction; ConfigError if it does not reach its workers."""
    where = f"weight_sync_schemes[{destination!r}] of {type(collector).__name__}"
    match collector:
        case collectors.MultiCollector():
            return ServedProcesses(collector)
        case DistributedCollector():
            _check_on_this_host(collector, where)
            return ServedNodes(collector)
        case RayCollector():
            raise ConfigError(
                "a board is memory of one host, and Ray starts workers on any node",
                where,
                "use RayBoardScheme instead, which keeps a board on each node",
            )
        case RPCCollector():
            collector.shutdown()  # TorchRL asks only when its workers stand, and would leave them
            raise ConfigError(
                "a board must know a collector before its workers start, and RPCCollector starts them first",
                where,
                "use DistributedCollector(launcher='mp') with the scheme on one host, or RayCollector with a "
                "RayBoardScheme on several",
            )
    raise ConfigError(
        f"a board serves process collectors, not {type(collector).__name__}",
        where,
        "use MultiSyncCollector or MultiAsyncCollector; an in-process Collector needs no scheme, "
        "SyncWeights alone does it",
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
        raise ConfigError(
            f"a board does not reach the workers of a {collector.collector_class.__name__} in each node",
            where,
            "leave collector_class out, and give each environment a node of its own",
        )
    if argument := distributed.updates_by_itself(collector):
        raise ConfigError(
            "a board publishes to all workers at once, and this collector would send to one at a time",
            f"{where}, with {argument}",
            "leave it out: SyncWeights, or collector.update_policy_weights_(), publishes between batches",
        )


def publish_loaded(publisher: WorkersPublisher, state_dict: Mapping[str, Any]) -> None:
    """Publish the policy of a state dict that a collector has loaded, unless a hook publishes the learner's.

    What acts was published. So a worker takes its weights from the board again at its next rollout, and
    weights that were only loaded would be lost. Versions go on counting from that of the state dict.
    """
    loaded = state_dict.get("worker0", {}).get("policy_state_dict")
    if loaded is None or publisher.publish_default is not None or POLICY not in publisher.destinations:
        return
    publisher.ledger.advance_to(int(state_dict.get(STAMP) or 0))
    publisher.send_over(POLICY, loaded)
