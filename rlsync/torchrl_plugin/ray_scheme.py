"""RayBoardScheme and NodeBoardScheme: boards on the nodes of a Ray cluster, as schemes of TorchRL."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, SupportsIndex

from torchrl.collectors.distributed import RayCollector

from rlsync.core.errors import ConfigError
from rlsync.core.ledger import Ledger
from rlsync.sync.adopter import Adopt
from rlsync.sync.workers_publisher import WorkersPublisher
from rlsync.torchrl_plugin.compat import collectors, distributed
from rlsync.torchrl_plugin.compat.schemes import schemes_of, set_context, weights_of
from rlsync.torchrl_plugin.scheme import BoardScheme, WeightBoard
from rlsync.torchrl_plugin.served import Served, refuse_updates_of_one
from rlsync.torchrl_plugin.worker import AdoptAt
from rlsync.torchrl_plugin.worker_scheme import Link, WorkerScheme
from rlsync.transport.board.writer import BoardWriter

if TYPE_CHECKING:
    from rlsync.transport.ray.learner import RayTransport
    from rlsync.transport.ray.receiver import NodeReceiver

#: How long a version may take to all actors of a collector that waits for them, seconds.
ARRIVES_WITHIN_S = 120.0


class NodeBoardScheme(BoardScheme):
    """A board in each actor of a RayCollector, which a RayBoardScheme supplies with the learner's versions.

    Stands in ``collector_kwargs["weight_sync_schemes"]`` of a RayCollector whose actors start worker
    processes (``collector_class="sync"`` or ``"async"``). Workers adopt and stamp as on one host, for the
    destination ``"policy"``. Each actor that gets this scheme makes a board of its own.

    Args:
        adopt, adopt_at, start_timeout_s: see :class:`BoardScheme`.

    Example:
        >>> inner = {"policy": NodeBoardScheme("copy")}
        >>> inner["policy"].adopt
        'copy'
    """

    def __init__(
        self,
        adopt: Adopt = "alias",
        *,
        adopt_at: AdoptAt = "rollout",
        start_timeout_s: float | None = 300.0,
    ) -> None:
        board = WeightBoard()
        # What the actor's own collector publishes is older than any learner's.
        board.ledger = Ledger(generation=0)
        super().__init__(adopt, adopt_at=adopt_at, start_timeout_s=start_timeout_s, _board=board)
        self._owns_board = True

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[Any, ...]:
        if self.model_id is None and self._board is not None:
            options = {"adopt_at": self.adopt_at, "start_timeout_s": self.start_timeout_s}
            return partial(NodeBoardScheme, self.adopt, **options), ()
        return super().__reduce_ex__(protocol)


class RayBoardScheme(WorkerScheme):
    """Weights to the actors of a RayCollector, on any node: no waits, no torn read, exact stamps.

    Stands in ``weight_sync_schemes=`` of RayCollector, for one or more destinations, which are published as
    one version. A publish is one copy in the learner's memory. A thread puts the newest version into Ray's
    object store, once. Each actor pulls it while it collects, and adopts it between two rollouts. With
    ``sync=True`` the collector asks for the next batch only when every actor has the newest version. Publish
    with :class:`rlsync.SyncWeights`; TorchRL's ``UpdateWeights`` and ``collector.update_policy_weights_()``
    work as well. The collector must be asked to stamp: ``collector_kwargs={"track_policy_version": True}``.

    Actors that start worker processes (``collector_class="sync"`` or ``"async"``) have a board each, which
    these read: pass ``collector_kwargs={"weight_sync_schemes": {"policy": NodeBoardScheme()}}``, too.

    Args:
        adopt: ``"alias"`` points the actor's parameters at its board (no copy); ``"copy"`` copies out.
        adopt_at: ``"rollout"`` adopts between two rollouts, ``"policy_call"`` before each call of the policy,
            too.
        prove: see :class:`BoardScheme`.

    Raises:
        ConfigError: ``adopt`` or ``adopt_at`` is neither. From the collector's constructor: it is no
            RayCollector, its frames are not stamped, its actors start processes and have no board for these,
            or it would send weights to one actor at a time.

    Source: torchrl.weight_update.RayWeightSyncScheme, which it replaces.

    Example:
        >>> RayBoardScheme("copy").adopt
        'copy'
    """

    def __init__(
        self, adopt: Adopt = "alias", *, adopt_at: AdoptAt = "rollout", prove: bool = True
    ) -> None:
        super().__init__(adopt, adopt_at, prove=prove)
        self.link = None
        self._receiver: NodeReceiver | None = None

    def _serve(self, collector: object, model_id: str) -> Served:
        schemes = schemes_of(collector)
        served = ServedActors(_check_actors(collector, model_id, schemes))
        links = [scheme.link for scheme in schemes.values() if isinstance(scheme, RayBoardScheme)]
        self.link = next(filter(None, links), None)
        if self.link is None:
            # loads ray, which only RayCollector needs
            from rlsync.transport.ray.learner import RayTransport

            transport = RayTransport()
            transport.watch(served.workers.actors)
            self.link = Link(WorkersPublisher(transport))
            served.ask_before_batches(transport)
        return served

    def _init_on_receiver_impl(
        self, model_id: str, context: object = None, worker_idx: int = 0, model: object = None
    ) -> None:
        if not isinstance(context, collectors.MultiCollector):
            super()._init_on_receiver_impl(model_id, context, worker_idx, model)
            return
        # Its worker processes adopt, from a board of this actor.
        self.model_id = model_id
        inner = schemes_of(context)[model_id]
        assert isinstance(inner, NodeBoardScheme), "_check_actors has looked"
        assert self.link is not None
        assert isinstance(inner.board.writer, BoardWriter)
        set_context(self, context)
        first = worker_idx * context.num_workers
        numbers = range(first, first + context.num_workers)
        self._receiver = _receiving(self.link.handle, inner.board.writer, worker_idx, numbers)

    def shutdown(self) -> None:
        """On the learner's side, close the transport; in an actor, adopt for this destination no more."""
        super().shutdown()
        if self.link is not None:
            self.link.leave(self.model_id)
            if self.link.publisher is not None:
                self.link.publisher.transport.close()
        if self._receiver is not None:
            self._receiver.close()


def _receiving(handle: object, board: BoardWriter, actor: int, numbers: range) -> NodeReceiver:
    """In an actor: let a board have the learner's versions; AdoptionTimeout if the newest does not come."""
    from rlsync.transport.ray.receiver import NodeReceiver, RayHandle  # loads ray

    assert isinstance(handle, RayHandle)
    where = f"actor {actor}, process {os.getpid()}"
    receiver = NodeReceiver(
        handle.mailbox, f"{where}, {uuid.uuid4().hex[:6]}", board, numbers=numbers
    )
    receiver.report_now()  # the leaves of workers that stand: the learner checks its map by them
    receiver.await_stamp(handle.newest, ARRIVES_WITHIN_S, where)
    return receiver


class ServedActors(Served):
    """A RayCollector under construction; :func:`_check_actors` has looked at it."""

    workers: distributed.ActorWorkers

    def policy(self) -> object:
        policy = distributed.policy_of_learner(self.workers.collector)
        if policy is None:
            return None
        return weights_of(policy)

    def ask_before_batches(self, transport: RayTransport) -> None:
        """Where actors wait for the learner, let the newest version come to them before they go on."""
        workers = self.workers

        def await_arrival() -> None:
            if not workers.in_flight:
                transport.await_arrival(ARRIVES_WITHIN_S, range(workers.num_workers))

        distributed.needs_no_connection(workers.collector, await_arrival)


def _check_actors(
    collector: object, destination: str, schemes: Mapping[str, object]
) -> distributed.ActorWorkers:
    """The actors of a collector; ConfigError if boards cannot supply them with exact stamps."""
    where = f"weight_sync_schemes[{destination!r}] of {type(collector).__name__}"
    if not isinstance(collector, RayCollector):
        cure = "use BoardScheme for collectors whose workers are processes of this host"
        raise ConfigError(
            f"RayBoardScheme serves RayCollector, not {type(collector).__name__}", where, cure
        )
    others = [name for name, scheme in schemes.items() if not isinstance(scheme, RayBoardScheme)]
    if others:
        problem = (
            f"the destinations of this collector do not share one version: {', '.join(others)}"
        )
        raise ConfigError(problem, where, "give every destination a RayBoardScheme")
    if distributed.calls_a_policy_service(collector):
        problem = "these actors ask an inference server for their actions, and hold no weights"
        raise ConfigError(
            problem, where, "leave the scheme out, or give the collector the policy itself"
        )
    if not distributed.single_collectors(collector):
        _check_inner(collector, schemes, where)
    if not distributed.actors_are_stamped(collector):
        cure = "pass collector_kwargs={'track_policy_version': True} to the RayCollector"
        raise ConfigError(
            "the frames of these actors would not say which weights acted", where, cure
        )
    refuse_updates_of_one(collector, where)
    return distributed.workers_of(collector, distributed.ActorWorkers)


def _check_inner(collector: RayCollector, schemes: Mapping[str, object], where: str) -> None:
    """If the actors' own collectors start worker processes, these need boards."""
    name = collector.collector_class.__name__
    for arguments in collector.collector_kwargs:
        inner = arguments.get("weight_sync_schemes") or {}
        if list(inner) != ["policy"] or not isinstance(inner["policy"], NodeBoardScheme):
            raise ConfigError(
                f"a board does not reach the workers of a {name} in each actor",
                where,
                "pass collector_kwargs={'weight_sync_schemes': {'policy': NodeBoardScheme()}, ...}, or "
                "leave collector_class out, and give each environment an actor of its own",
            )
    if list(schemes) != ["policy"]:
        problem = (
            f"the workers of a {name} in each actor have one destination, not {', '.join(schemes)}"
        )
        cure = "leave collector_class out, and give each environment an actor of its own"
        raise ConfigError(problem, where, cure)
