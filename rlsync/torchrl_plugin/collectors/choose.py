"""Which endpoint serves a collector, and what a map brings from a trainer to it."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torchrl.collectors import Collector
from torchrl.collectors.distributed import DistributedSyncCollector
from torchrl.trainers import Trainer

from rlsync.core.errors import ConfigError, NoBoard, warn
from rlsync.core.plan import SyncPlan
from rlsync.sync.endpoint import Endpoint
from rlsync.sync.processes import close_with_program, end_with_program
from rlsync.sync.resolve import SyncMap, bind_routes, plan_of, with_training
from rlsync.sync.trained import Training
from rlsync.sync.workers_publisher import BoardCollector
from rlsync.torchrl_plugin.collectors.board import BoardEndpoint, ServerEndpoint
from rlsync.torchrl_plugin.collectors.foreign import (
    WITH_A_BOARD,
    ForeignEndpoint,
    OtherServerEndpoint,
    RemoteEndpoint,
    what_keeps_them,
)
from rlsync.torchrl_plugin.collectors.in_process import InProcessEndpoint
from rlsync.torchrl_plugin.compat import collectors, servers
from rlsync.torchrl_plugin.compat.distributed import Remote
from rlsync.torchrl_plugin.compat.schemes import schemes_of
from rlsync.torchrl_plugin.compat.trainers import optimizers, refuse_idle_shards
from rlsync.torchrl_plugin.scheme import BoardScheme
from rlsync.torchrl_plugin.worker_scheme import WorkerScheme


def endpoint_of(collector: object) -> Endpoint:
    """A collector's endpoint. ConfigError: it mixes boards with other schemes, or acts before a rollout."""
    if isinstance(collector, BoardCollector):
        publisher = collector.publisher
        return BoardEndpoint(publisher, dict.fromkeys(publisher.destinations, collector.adopt))
    server = servers.server_of(collector)
    if server is not None:
        scheme = servers.scheme_of_server(server)
        if isinstance(scheme, BoardScheme):
            return ServerEndpoint(scheme, collector)
        return OtherServerEndpoint(collector, [])
    if isinstance(collector, DistributedSyncCollector):
        problem = (
            "DistributedSyncCollector takes no weights, it sends its own policy every few batches"
        )
        cure = f"use DistributedCollector(sync=True, launcher='mp', {WITH_A_BOARD}), or leave the hook out"
        raise ConfigError(problem, "SyncWeights, UpdateWeights", cure)
    schemes = schemes_of(collector)
    boards = {name: scheme for name, scheme in schemes.items() if isinstance(scheme, WorkerScheme)}
    if boards:
        return _on_a_board(boards, list(schemes))
    if isinstance(collector, Collector) and not schemes:
        return _in_process(collector)
    if isinstance(collector, collectors.MultiCollector):
        end_with_program(collector)  # one on a board says so itself
        for scheme in schemes.values():
            close_with_program(scheme)
    if isinstance(collector, Remote):
        return RemoteEndpoint(collector, list(schemes))
    return ForeignEndpoint(collector, list(schemes))


def _in_process(collector: Collector) -> InProcessEndpoint:
    """The endpoint of a collector of this process; ConfigError: it acts before its rollout begins."""
    if collectors.acts_ahead(collector):
        problem = (
            "the first actions of each rollout of this collector are computed in the rollout before"
        )
        cure = "give it one environment, or a SerialEnv: then each frame has one version"
        raise ConfigError(problem, f"{type(collector).__name__} with an AsyncEnvPool", cure)
    return InProcessEndpoint(collector)


def _on_a_board(boards: Mapping[str, WorkerScheme], destinations: list[str]) -> BoardEndpoint:
    """The endpoint of a collector of processes; ConfigError: its destinations do not share one board."""
    schemes = list(boards.values())
    publisher = schemes[0].publisher
    shared = all(scheme.publisher is publisher for scheme in schemes)
    if len(boards) < len(destinations) or not shared:
        problem = "the destinations of this collector do not share one board"
        cure = "make one WeightBoard and take board.scheme() for each destination"
        raise ConfigError(problem, f"weight_sync_schemes={destinations}", cure)
    adopt = {name: scheme.adopt for name, scheme in boards.items()}
    adopt_at = schemes[0].adopt_at  # the same for all: a scheme refuses others
    return BoardEndpoint(publisher, adopt, adopt_at)


def warn_without_board(endpoint: Endpoint, who: str) -> None:
    """Warn if destinations are in worker processes, and nobody can know which weights acted there."""
    if not isinstance(endpoint, ForeignEndpoint):
        return
    processes = isinstance(endpoint.collector, collectors.MultiCollector)
    if processes or (isinstance(endpoint, RemoteEndpoint) and not endpoint.stamped):
        if processes:
            cure = f"pass {WITH_A_BOARD} to the collector"
        else:
            cure = what_keeps_them(endpoint.collector)
        problem = f"{endpoint.description}, {endpoint.unkept}"
        where = (
            f"{who}; the collector is a {type(endpoint.collector).__name__} without a BoardScheme"
        )
        warn(NoBoard(problem, where, cure))


def resolve(sync_map: SyncMap, trainer: Trainer) -> SyncPlan:
    """The plan of ``sync_map`` on ``trainer``, leaf by leaf, without changing either.

    Args:
        sync_map: ``{destination path on the collector: source path on the trainer}``; a
            :class:`Source` instead of a string declares a cast or exclusions.
        trainer: the trainer, with its collector.

    Returns:
        The plan; :meth:`SyncPlan.check` raises what keeps it from being carried out.

    Raises:
        SyncMapError: a path is wrong, or leads to weights that are not trained.
        ConfigError: the map is no mapping, some of the collector's schemes are boards and some are not, or
            the loss has networks that no optimizer step would change.

    Example:
        >>> from torch import nn
        >>> from types import SimpleNamespace
        >>> trainer = SimpleNamespace(loss_module=nn.Linear(2, 1), collector=object())
        >>> resolve({"policy": "loss_modul"}, trainer)
        Traceback (most recent call last):
        ...
        rlsync.core.errors.SourceNotFound: no 'loss_modul' on the trainer (SimpleNamespace)
          where  path 'loss_modul', sync map, entry 1
          cure   did you mean 'loss_module'? the trainer has: loss_module
    """
    endpoint = endpoint_of(trainer.collector)
    training = training_of(trainer)
    bound = bind_routes(sync_map, trainer, endpoint)
    return with_training(plan_of(bound, endpoint, training), bound, trainer, training)


def training_of(trainer: object) -> Training:
    """A trainer's optimizers and loss, or none; ConfigError: it has networks that no step would change."""
    if not isinstance(trainer, Trainer):
        return Training()
    refuse_idle_shards(trainer)

    def losses() -> dict[str, nn.Module]:
        loss = trainer.loss_module
        if isinstance(loss, nn.Module):
            return {"loss_module": loss}
        return {}

    return Training(lambda: optimizers(trainer), losses)
