"""BoardScheme: a WeightBoard as a TorchRL weight-sync scheme."""

from __future__ import annotations

import os
import weakref
from functools import partial
from typing import Any, TypeVar, get_args

from torch import nn
from torchrl.weight_update.weight_sync_schemes import register_weight_sync_backend

from rlsync.core.errors import ConfigError, PublishError
from rlsync.core.path import parse
from rlsync.sync.adopter import Adopt
from rlsync.sync.numbered_board import NumberedBoard
from rlsync.sync.program_end import end_with_program
from rlsync.sync.workers_publisher import WorkersPublisher
from rlsync.torchrl_plugin import compat, waits
from rlsync.torchrl_plugin.collectors.board import BoardEndpoint
from rlsync.torchrl_plugin.link import BoardLink
from rlsync.torchrl_plugin.served import Served

BACKEND = "board"

T = TypeVar("T")


class BoardScheme(compat.WeightSyncScheme):
    """Weights through a :class:`rlsync.WeightBoard`: no waits, no torn read, exact stamps.

    Stands in ``weight_sync_schemes=`` of MultiSyncCollector and MultiAsyncCollector, with ``policy=`` or
    ``policy_factory=``, and in ``weight_sync=`` of AsyncBatchedCollector, InferenceServer and
    ProcessInferenceServer. Workers adopt between rollouts, in the thread that acts, and every frame carries
    the version that acted as ``policy_version``. The learner's own parameters are neither moved nor
    shared. The workers end with the program, also when an exception ends it. Publish with
    :class:`rlsync.SyncWeights`; TorchRL's ``UpdateWeights`` and ``collector.update_policy_weights_()`` work
    as well.

    Args:
        adopt: ``"alias"`` points the worker's parameters at the board (no copy); ``"copy"`` copies out.
            Compiled policies and workers on other devices than the CPU copy by themselves, and so do
            buffers.
        start_timeout_s: how long the workers may take to make their environments and policies, seconds.
            ``None`` waits for ever for those that live.

    Raises:
        ConfigError: ``adopt`` is neither; or the collector is not a process collector.
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

    def __init__(
        self,
        adopt: Adopt = "alias",
        *,
        start_timeout_s: float | None = 300.0,
        _link: BoardLink | None = None,
    ) -> None:
        if adopt not in get_args(Adopt):
            raise ConfigError(
                f"no adoption mode {adopt!r}",
                f"BoardScheme(adopt={adopt!r})",
                f"choose one of: {', '.join(get_args(Adopt))}",
            )
        super().__init__(strategy="tensordict")
        self.adopt: Adopt = adopt
        self.start_timeout_s = start_timeout_s
        self._pid = os.getpid()
        self._board: NumberedBoard | None = None
        if _link is None:
            from rlsync.torchrl_plugin.weight_board import WeightBoard  # which imports this file

            self._board = WeightBoard()
            _link = BoardLink(self._board)
        self._link = _link

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_board": None}

    def init_on_receiver(self, *, model_id: str, context: Any = None, **kwargs: Any) -> None:
        """Begin in a worker or in an inference server; TorchRL calls it.

        Args:
            model_id: the destination.
            context: the worker's collector, or the server; by default the server that TorchRL has set.
            kwargs: as TorchRL passes them.
        """
        server = self.context if isinstance(self.context, compat.InferenceServer) else None
        super().init_on_receiver(model_id=model_id, context=context or server, **kwargs)

    @property
    def initialized_on_sender(self) -> bool:
        """Whether this process is the learner. A forked worker inherits the learner's scheme as it is.

        False for an inference server: in a thread of the learner, the scheme is both ends, and TorchRL would
        erase the learner's.
        """
        return super().initialized_on_sender and self._pid == os.getpid() and self._link.served is None

    @property
    def publisher(self) -> WorkersPublisher:
        """The learner's side.

        Raises:
            PublishError: in a worker.
        """
        return _on_the_learner(self._link.publisher)

    @property
    def board(self) -> NumberedBoard:
        """The board, on the learner's side.

        Raises:
            PublishError: in a worker.
        """
        return _on_the_learner(self._link.board)

    def create_transport(self, **_: Any) -> WorkersPublisher:
        """The learner's end, which is the transport of all workers.

        Raises:
            PublishError: in a worker.
        """
        return self.publisher

    def _init_on_sender_impl(self, model_id: str, context: Any, ctx: Any = None) -> None:
        if compat.server_of(context) is not None:
            self.model_id = self.serving(context).connect(self, self.publisher)
            return
        if not isinstance(context, compat.MultiCollector):
            raise ConfigError(
                f"a board serves process collectors, not {type(context).__name__}",
                f"weight_sync_schemes[{model_id!r}]",
                "use MultiSyncCollector or MultiAsyncCollector; an in-process Collector needs no scheme, "
                "SyncWeights alone does it",
            )
        parse(model_id)
        end_with_program(context)
        self.model_id = model_id
        self.context = context
        publisher = self.publisher
        if publisher.serve(context, model_id):
            compat.turn_on_stamps(context)
            compat.around_updates(context, publisher.one_publish)
            publisher.announce = partial(_announce, weakref.ref(context))
        if model_id == "policy" and compat.has_own_policy_template(context):
            # Workers receive this policy without its memory and take the weights from the board.
            publisher.publish_modules({"policy": context.policy}, "the collector")

    def serving(self, holder: object) -> Served:
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
        schemes = compat.schemes_of(self.context).values()
        if schemes and all(isinstance(scheme, BoardScheme) for scheme in schemes):
            waits.await_start(self.context, self.start_timeout_s)

    def _init_on_receiver_impl(
        self,
        model_id: str,
        context: Any = None,
        worker_idx: int = 0,
        model: nn.Module | None = None,
    ) -> None:
        compat.forget_sender(self)
        self.model_id = model_id
        self.worker_idx = worker_idx
        if isinstance(context, compat.InferenceServer):
            compat.set_context(self, context)
            self._link.in_server(model_id, self.adopt, context)
            return
        self._board = None
        worker = self._link.in_worker(worker_idx)
        worker.declare(model_id, self.adopt)
        if model is not None:
            worker.prepare(model_id, model)
        if context is not None:
            self.context = context

    @property
    def context(self) -> Any:
        """The collector, once it exists."""
        return super().context

    @context.setter
    def context(self, collector: Any) -> None:
        compat.set_context(self, collector)
        if self.initialized_on_receiver and collector is not None:
            self._link.in_worker(self.worker_idx).attach(collector)

    def _setup_connection_and_weights_on_receiver_impl(self, *, worker_idx: int | None = None) -> None:
        """Nothing: the worker adopts from the board when it next collects."""

    def send(self, weights: Any = None, worker_ids: int | list[int] | None = None) -> None:
        """Publish ``weights`` for this destination; returns without waiting for any worker.

        Args:
            weights: a module, a tensordict, a dict of tensors; ``None`` for the learner's own weights.
            worker_ids: must be ``None`` or name all workers.

        Raises:
            LayoutMismatch: the weights do not fit the leaves in the workers.
            PublishError: ``worker_ids`` leaves out a worker: a board has one newest version for all.
        """
        if self.model_id is None:
            raise PublishError("this scheme has no collector yet", "BoardScheme.send", "pass it to one")
        self._check_all_workers(worker_ids)
        self.publisher.send(self.model_id, weights)

    def wait(self, timeout_s: float) -> None:
        """Wait until what reads the board acts with the newest version.

        Args:
            timeout_s: give up after this many seconds.

        Raises:
            WorkerLost: a worker, or the process of the inference server, is dead.
            AdoptionTimeout: the deadline passed.
        """
        BoardEndpoint(self.publisher, {}).wait(timeout_s)

    def _check_all_workers(self, worker_ids: int | list[int] | None) -> None:
        if worker_ids is None:
            return
        asked = {worker_ids} if isinstance(worker_ids, int) else set(worker_ids)
        workers = set(range(self.publisher.collector.num_workers))
        if asked != workers:
            raise PublishError(
                f"a board publishes to all workers, not to {sorted(asked, key=str)} alone",
                f"update_policy_weights_(worker_ids={worker_ids!r}), workers {sorted(workers)}",
                "leave worker_ids out, or give workers of their own kind a collector of their own",
            )

    def receive(self, timeout: float | None = None) -> None:
        """Adopt, in an inference server, between two batches. Workers adopt by themselves, between rollouts.

        Args:
            timeout: not used: nobody waits.
        """
        if self._link.server is not None:
            self._link.server.between_batches()

    def shutdown(self) -> None:
        """Close the board if it is this scheme's own."""
        super().shutdown()
        if self._board is not None:
            self._board.close()


def _on_the_learner(held: T | None) -> T:
    if held is None:
        raise PublishError("a worker does not publish", "BoardScheme", "publish from the learner")
    return held


def _announce(collector: weakref.ref[Any], version: int) -> None:
    compat.announce_version(collector(), version)


def register_backend() -> None:
    """Make ``WeightSyncScheme.from_backend("board")`` return a :class:`BoardScheme`.

    Example:
        >>> from torchrl.weight_update import WeightSyncScheme
        >>> register_backend()
        >>> type(WeightSyncScheme.from_backend("board")).__name__
        'BoardScheme'
    """
    register_weight_sync_backend(BACKEND)(BoardScheme)
