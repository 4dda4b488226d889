"""BoardScheme: a WeightBoard as a TorchRL weight-sync scheme."""

from __future__ import annotations

import os
import weakref
from functools import partial
from typing import Any

from torch import nn
from torchrl.modules.inference_server import InferenceServer
from torchrl.weight_update.weight_sync_schemes import register_weight_sync_backend

from rlsync.core.errors import ConfigError
from rlsync.core.path import parse
from rlsync.sync.adopter import Adopt
from rlsync.sync.numbered_board import NumberedBoard
from rlsync.sync.program_end import end_with_program
from rlsync.sync.starting import StartLogs
from rlsync.torchrl_plugin.compat import servers
from rlsync.torchrl_plugin.compat.schemes import around_updates, forget_sender, schemes_of, set_context
from rlsync.torchrl_plugin.link import BoardLink
from rlsync.torchrl_plugin.served import (
    ONE_VERSION,
    OWN_COLLECTORS,
    check_interface,
    refuse_different_moments,
    served,
)
from rlsync.torchrl_plugin.served_server import ServedServer
from rlsync.torchrl_plugin.worker import AdoptAt
from rlsync.torchrl_plugin.worker_scheme import WorkerScheme, announce, on_the_learner

BACKEND = "board"


class BoardScheme(WorkerScheme):
    """Weights through a :class:`rlsync.WeightBoard`: no waits, no torn read, exact stamps.

    Stands in ``weight_sync_schemes=`` of MultiSyncCollector, MultiAsyncCollector and, with
    ``launcher="mp"``, DistributedCollector, with ``policy=`` or ``policy_factory=``; and in ``weight_sync=``
    of AsyncBatchedCollector, InferenceServer and ProcessInferenceServer. Workers adopt between rollouts, in
    the thread that acts, and every frame carries the version that acted as ``policy_version``. The learner's
    own parameters are neither moved nor shared. A policy without weights has versions, too. The workers end
    with the program, also when an exception ends it. Publish with :class:`rlsync.SyncWeights`; TorchRL's
    ``UpdateWeights`` and ``collector.update_policy_weights_()`` work as well.

    Args:
        adopt: ``"alias"`` points the worker's parameters at the board (no copy); ``"copy"`` copies out.
            Compiled policies and workers on other devices than the CPU copy by themselves, and so do
            buffers.
        adopt_at: ``"rollout"`` adopts between two rollouts. ``"policy_call"`` adopts before each call of the
            policy, too, for rollouts that are long. Then the frames of one rollout may have several versions.
        start_timeout_s: how long the workers may take to make their environments and policies, seconds.
            ``None`` waits for ever for those that live.
        per_worker_weights: an argument of TorchRL's schemes; must be false.

    Raises:
        ConfigError: ``adopt`` or ``adopt_at`` is neither, or ``per_worker_weights`` is true. From the
            collector's constructor: a board does not reach its workers, or its destinations adopt at
            different times.
        WorkerLost: from the collector's constructor, when a worker process ended without a word.
        AdoptionTimeout: from the collector's constructor, when a worker does not stand in time.

    Source: torchrl.weight_update.WeightSyncScheme, whose other schemes it can replace.

    Example:
        >>> BoardScheme("copy").adopt
        'copy'
        >>> BoardScheme("both")
        Traceback (most recent call last):
        ...
        rlsync.core.errors.ConfigError: no adoption mode 'both'
          where  BoardScheme(adopt='both')
          cure   choose one of: alias, copy
    """

    _link: BoardLink

    def __init__(
        self,
        adopt: Adopt = "alias",
        *,
        adopt_at: AdoptAt = "rollout",
        start_timeout_s: float | None = 300.0,
        per_worker_weights: bool = False,
        _link: BoardLink | None = None,
    ) -> None:
        self._check(adopt, adopt_at)
        if per_worker_weights:
            raise ConfigError(ONE_VERSION, "BoardScheme(per_worker_weights=True)", OWN_COLLECTORS)
        self.start_timeout_s = start_timeout_s
        self._pid = os.getpid()
        self._first_worker = 0
        self._board: NumberedBoard | None = None
        if _link is None:
            from rlsync.torchrl_plugin.weight_board import WeightBoard  # which imports this file

            self._board = WeightBoard()
            _link = BoardLink(self._board)
        super().__init__(adopt, adopt_at, _link)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_board": None}

    def init_on_receiver(self, *, model_id: str, context: Any = None, **kwargs: Any) -> None:
        """Begin in a worker or in an inference server; TorchRL calls it.

        Args:
            model_id: the destination.
            context: the worker's collector, or the server; by default the server that TorchRL has set.
            kwargs: as TorchRL passes them.
        """
        server = self.context if isinstance(self.context, InferenceServer) else None
        super().init_on_receiver(model_id=model_id, context=server if context is None else context, **kwargs)

    @property
    def initialized_on_sender(self) -> bool:
        """Whether this process is the learner. A forked worker inherits the learner's scheme as it is.

        False for an inference server: in a thread of the learner, the scheme is both ends, and TorchRL would
        erase the learner's.
        """
        return super().initialized_on_sender and self._pid == os.getpid() and self._link.served is None

    @property
    def board(self) -> NumberedBoard:
        """The board, on the learner's side.

        Raises:
            PublishError: in a worker.
        """
        return on_the_learner(self._link.board, self)

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
        """TorchRL's interface. Collectors pass the first five, and ``model`` beside their ``context``."""
        if servers.server_of(context) is not None:
            self.model_id = self.serving(context).connect(self, self.publisher)
            return
        placed = {"weights": weights, "params_map": params_map, "devices": devices}
        check_interface(context, placed | {"device_map_fn": device_map_fn}, {"model": model})
        schemes = schemes_of(context).items()
        refuse_different_moments({n: s.adopt_at for n, s in schemes if isinstance(s, BoardScheme)})
        parse(model_id)
        collector = served(context, model_id)
        end_with_program(collector.workers)
        self.model_id = model_id
        self.context = context
        self._first_worker = collector.first_worker
        publisher = self.publisher
        if publisher.serve(collector.workers, model_id):
            self._link.starting = StartLogs(collector.workers.num_workers, self.start_timeout_s)
            collector.prepare(publisher, self._link.starting)
            around_updates(context, publisher.one_publish)
            publisher.announce = partial(announce, weakref.ref(context))
        policy = collector.policy() if model_id == "policy" else None
        if policy is not None:
            publisher.publish_modules({"policy": policy}, "the collector")

    def serving(self, holder: object) -> ServedServer:
        """The inference server that was given this scheme as ``weight_sync``.

        Args:
            holder: the server, or the AsyncBatchedCollector that has it.

        Raises:
            ConfigError: it was given another scheme, or is an actor of Ray.
            PublishError: this board serves another server or collector already.
        """
        return self._link.serve(holder, self)

    def _setup_connection_and_weights_on_sender_impl(
        self, *, worker_idx: int | None = None, weights: Any | None = None
    ) -> None:
        if weights is not None:
            self.send(weights)
        # Workers of other schemes stand only when those are connected, too; TorchRL waits for them itself.
        schemes = schemes_of(self.context).values()
        if schemes and all(isinstance(scheme, BoardScheme) for scheme in schemes):
            logs = self._link.starting
            assert logs is not None, "made before the workers were started"
            try:
                served(self.context, str(self.model_id)).await_start(
                    self.publisher.has_told, self.start_timeout_s, logs
                )
            finally:
                logs.close()

    def _init_on_receiver_impl(
        self,
        model_id: str,
        context: Any = None,
        worker_idx: int = 0,
        model: nn.Module | None = None,
    ) -> None:
        forget_sender(self)
        self.model_id = model_id
        if isinstance(context, InferenceServer):
            self.worker_idx = worker_idx
            set_context(self, context)
            self._link.in_server(model_id, self.adopt, context)
            return
        self._board = None
        self.begin_in_worker(model_id, worker_idx - self._first_worker, model)
        if context is not None:
            self.context = context

    def receive(self, timeout: float | None = None) -> None:
        """Adopt, in an inference server, between two batches. Workers adopt by themselves, between rollouts.

        Args:
            timeout: not used: nobody waits.
        """
        if self._link.server is not None:
            self._link.server.between_batches()

    def shutdown(self) -> None:
        """Close the board if it is this scheme's own; in a worker, adopt for this destination no more."""
        super().shutdown()
        self._link.leave(self.model_id)
        if self._board is not None:
            self._board.close()


def register_backend() -> None:
    """Make ``WeightSyncScheme.from_backend("board")`` return a :class:`BoardScheme`.

    Example:
        >>> from torchrl.weight_update import WeightSyncScheme
        >>> register_backend()
        >>> type(WeightSyncScheme.from_backend("board")).__name__
        'BoardScheme'
    """
    register_weight_sync_backend(BACKEND)(BoardScheme)
