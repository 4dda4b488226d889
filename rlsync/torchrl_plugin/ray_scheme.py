"""RayBoardScheme: boards on the nodes of a Ray cluster as a TorchRL weight-sync scheme."""

from __future__ import annotations

import os
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from rlsync.core.path import parse
from rlsync.sync.adopter import Adopt
from rlsync.torchrl_plugin.compat import collectors, distributed
from rlsync.torchrl_plugin.compat.schemes import around_updates, schemes_of, set_context, weights_of
from rlsync.torchrl_plugin.node_board import NodeBoardScheme
from rlsync.torchrl_plugin.served import check_interface, refuse_different_moments
from rlsync.torchrl_plugin.served_actors import check_actors
from rlsync.torchrl_plugin.worker import AdoptAt
from rlsync.torchrl_plugin.worker_scheme import WorkerScheme, announce

if TYPE_CHECKING:
    from rlsync.torchrl_plugin.ray_link import RayLink


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

    Raises:
        ConfigError: ``adopt`` or ``adopt_at`` is neither. From the collector's constructor: it is no
            RayCollector, its frames are not stamped, its actors start processes and have no board for these,
            or it would send weights to one actor at a time.

    Source: torchrl.weight_update.RayWeightSyncScheme, which it replaces.

    Example:
        >>> RayBoardScheme("copy").adopt
        'copy'
        >>> RayBoardScheme("both")
        Traceback (most recent call last):
        ...
        rlsync.core.errors.ConfigError: no adoption mode 'both'
          where  RayBoardScheme(adopt='both')
          cure   choose one of: alias, copy
    """

    _link: RayLink | None

    def __init__(self, adopt: Adopt = "alias", *, adopt_at: AdoptAt = "rollout") -> None:
        self._check(adopt, adopt_at)
        super().__init__(adopt, adopt_at, None)
        self._pid = os.getpid()

    @property
    def initialized_on_sender(self) -> bool:
        """Whether this process is the learner."""
        return super().initialized_on_sender and self._pid == os.getpid()

    def _init_on_sender_impl(
        self,
        model_id: str = "policy",
        context: Any = None,
        ctx: Any = None,
        num_workers: int | None = None,
        remote_collectors: Any = None,
        model: Any = None,
        weights: Any = None,
        params_map: Any = None,
        devices: Any = None,
        device_map_fn: Any = None,
    ) -> None:
        """TorchRL's interface. RayCollector passes its actors, and ``model`` beside its ``context``."""
        placed = {"weights": weights, "params_map": params_map, "devices": devices}
        check_interface(
            context, placed | {"device_map_fn": device_map_fn}, {"model": model}, of="RayBoardScheme"
        )
        parse(model_id)
        schemes = schemes_of(context)
        check_actors(context, model_id, schemes, RayBoardScheme, NodeBoardScheme)
        ours = [scheme for scheme in schemes.values() if isinstance(scheme, RayBoardScheme)]
        refuse_different_moments({n: s.adopt_at for n, s in schemes.items() if isinstance(s, RayBoardScheme)})
        self.model_id = model_id
        self.context = context
        workers = distributed.actor_workers(context)
        links = [scheme._link for scheme in ours if scheme._link is not None]
        self._link = links[0] if links else _new_link(workers)
        publisher = self.publisher
        if publisher.serve(workers, model_id):
            distributed.needs_no_connection(context, self._link.before_batch)
            around_updates(context, publisher.one_publish)
            publisher.announce = partial(announce, weakref.ref(context))
        policy = distributed.policy_of_learner(context) if model_id == "policy" else None
        if policy is not None:
            publisher.publish_modules({"policy": weights_of(policy)}, "the collector")

    def _setup_connection_and_weights_on_sender_impl(
        self, *, worker_idx: int | None = None, weights: Any | None = None
    ) -> None:
        if weights is not None:
            self.send(weights)

    def _init_on_receiver_impl(
        self,
        model_id: str,
        context: Any = None,
        worker_idx: int = 0,
        model: nn.Module | None = None,
    ) -> None:
        self.model_id = model_id
        if isinstance(context, collectors.MultiCollector):
            # Its worker processes adopt, from a board of this actor.
            inner = schemes_of(context)[model_id]
            assert isinstance(inner, NodeBoardScheme), "check_actors has looked"
            assert self._link is not None
            set_context(self, context)
            self._link.supply(inner.board, worker_idx, context.num_workers)
            return
        self.begin_in_worker(model_id, worker_idx, model)
        if context is not None:
            self.context = context

    def receive(self, timeout: float | None = None) -> None:
        """Nothing: an actor adopts by itself, between rollouts.

        Args:
            timeout: not used: nobody waits.
        """

    def shutdown(self) -> None:
        """On the learner's side, close the transport; in an actor, adopt for this destination no more."""
        super().shutdown()
        if self._link is not None:
            self._link.leave(self.model_id)
            self._link.close()


def _new_link(workers: distributed.ActorWorkers) -> RayLink:
    from rlsync.torchrl_plugin.ray_link import RayLink  # loads ray, which only RayCollector needs

    return RayLink(workers)
