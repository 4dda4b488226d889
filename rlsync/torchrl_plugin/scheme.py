"""WeightBoard, and BoardScheme: a board as a TorchRL weight-sync scheme."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torchrl.modules.inference_server import InferenceServer
from torchrl.weight_update.weight_sync_schemes import register_weight_sync_backend

from rlsync.core.errors import ConfigError
from rlsync.core.extensions import BOARD
from rlsync.core.ledger import Ledger
from rlsync.core.plan import POLICY
from rlsync.core.user_input import check_timeouts
from rlsync.sync.adopter import Adopt
from rlsync.sync.processes import close_with_program, end_with_program
from rlsync.sync.starting import StartLogs
from rlsync.sync.workers_publisher import WorkersPublisher
from rlsync.torchrl_plugin.compat import servers
from rlsync.torchrl_plugin.compat.schemes import forget_sender, schemes_of, set_context
from rlsync.torchrl_plugin.served import Served, served
from rlsync.torchrl_plugin.worker import AdoptAt
from rlsync.torchrl_plugin.worker_scheme import ONE_VERSION, OWN_COLLECTORS, Link, WorkerScheme
from rlsync.transport.board.format import MAX_SLOTS
from rlsync.transport.board.writer import BoardWriter
from rlsync.transport.contract import Handle, ReaderStatus, Transport, transport_named


class WeightBoard:
    """A board that hands out TorchRL schemes, one for each destination; all are published as one version.

    Its schemes share one publisher, which draws the numbers from this board's ledger. To publish by hand, use
    a :class:`rlsync.sync.publisher.Publisher` of ``board.writer`` and ``board.ledger``.

    Args:
        max_slots: upper bound of slots in memory. When all are leased, a publish is coalesced. The default
            never coalesces.
        transport: how weights travel: ``"board"``, shared memory, or the name by which an installed package
            offers a transport, among the entry points ``rlsync.transports``.

    Raises:
        ConfigError: ``max_slots`` is out of range, or there is no such transport.

    Example:
        >>> board = WeightBoard()
        >>> schemes = {"policy": board.scheme(), "env.transform[0].module": board.scheme("copy")}
        >>> board.close()
    """

    def __init__(
        self,
        max_slots: int = MAX_SLOTS,
        transport: str = BOARD,
        *,
        _writer: BoardWriter | None = None,
    ) -> None:
        self.writer: Transport  #: What workers read.
        if transport != BOARD:
            self.writer = transport_named(transport)
        elif _writer is not None:
            self.writer = _writer
        else:
            self.writer = BoardWriter(max_slots)
        #: The owner of this board's version numbers.
        self.ledger = Ledger()
        # schemes hold the link, and with it the publisher
        self._link: weakref.ref[Link] | None = None

    def scheme(self, adopt: Adopt = "alias", *, adopt_at: AdoptAt = "rollout") -> BoardScheme:
        """A scheme for one destination on this board.

        Args:
            adopt: see :class:`BoardScheme`.
            adopt_at: see :class:`BoardScheme`; the same for all destinations of a board.

        Raises:
            ConfigError: there is no such mode.
        """
        return BoardScheme(adopt, adopt_at=adopt_at, _board=self)

    def link(self) -> Link:
        """What the schemes of this board share; made anew when the last one of them is gone."""
        link = None
        if self._link is not None:
            link = self._link()
        if link is None:
            link = Link(WorkersPublisher(self.writer, self.ledger))
            self._link = weakref.ref(link)
        return link

    @property
    def handle(self) -> Handle:
        """What a process needs to read the board."""
        return self.writer.handle

    @property
    def version(self) -> int:
        """The newest published version; 0 before the first."""
        return max(self.ledger.version, self.writer.newest_stamp.version)

    def status(self) -> list[ReaderStatus]:
        """One entry for each worker that attached and did not leave by itself."""
        return self.writer.status()

    def wait(self, version: int, timeout_s: float, readers: Iterable[int] | None = None) -> None:
        """Wait until workers have adopted a version; see :meth:`rlsync.transport.contract.Transport.wait`.

        Args:
            version: the version to wait for, or a newer one.
            timeout_s: give up after this many seconds.
            readers: the worker numbers expected; by default those attached now, of which there must be one.

        Raises:
            WorkerLost: at once, when one of them is dead.
            AdoptionTimeout: the deadline passed; names each missing worker, its pid and state.
        """
        self.writer.wait(version, timeout_s, readers)

    def close(self) -> None:
        """Close the board. Workers keep what they act with and see that it is closed."""
        self.writer.close()


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
        prove: before its first frame each worker finds out whether its parameters act: whether the outputs of
            the policy depend on each of them. Those that do not are named when a hook is registered.
        start_timeout_s: how long the workers may take to make their environments and policies, seconds.
            ``None`` waits for ever for those that live.
        silent_timeout_s: how many seconds the learner waits for a live worker process that begins no rollout;
            longer than the longest rollout. Then it raises AdoptionTimeout; for a dead worker it raises
            WorkerLost at once. ``None`` waits for ever for those that live.
        transport: see :class:`rlsync.WeightBoard`.
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

    link: Link

    def __init__(
        self,
        adopt: Adopt = "alias",
        *,
        adopt_at: AdoptAt = "rollout",
        prove: bool = True,
        start_timeout_s: float | None = 300.0,
        silent_timeout_s: float | None = 300.0,
        transport: str = BOARD,
        per_worker_weights: bool = False,
        _board: WeightBoard | None = None,
    ) -> None:
        super().__init__(adopt, adopt_at, prove=prove)
        if per_worker_weights:
            raise ConfigError(ONE_VERSION, "BoardScheme(per_worker_weights=True)", OWN_COLLECTORS)
        check_timeouts(
            "BoardScheme", start_timeout_s=start_timeout_s, silent_timeout_s=silent_timeout_s
        )
        self.start_timeout_s = start_timeout_s
        self.silent_timeout_s = silent_timeout_s
        self._first_worker = 0
        self._owns_board = _board is None
        if _board is None:
            _board = WeightBoard(transport=transport)
        self._board: WeightBoard | None = _board
        self.link = _board.link()

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_board": None}

    def init_on_receiver(self, *, model_id: str, context: object = None, **kwargs: Any) -> None:
        """Begin in a worker or in an inference server; TorchRL calls it.

        Args:
            model_id: the destination.
            context: the worker's collector, or the server; by default the server that TorchRL has set.
            kwargs: as TorchRL passes them.
        """
        if context is None and isinstance(self.context, InferenceServer):
            context = self.context
        super().init_on_receiver(model_id=model_id, context=context, **kwargs)

    @property
    def initialized_on_sender(self) -> bool:
        """Whether this process is the learner.

        False for an inference server: in a thread of the learner, the scheme is both ends, and TorchRL would
        erase the learner's.
        """
        return super().initialized_on_sender and self.link.served is None

    @property
    def board(self) -> WeightBoard:
        """The board, on the learner's side.

        Raises:
            PublishError: in a worker.
        """
        _ = self.publisher  # a worker has none
        assert self._board is not None, "the learner has one"
        return self._board

    def _init_on_sender_impl(
        self, model_id: str = POLICY, context: object = None, **kwargs: Any
    ) -> None:
        if servers.server_of(context) is not None:
            self.model_id = self.link.serve(context, self).connect(self, self.publisher)
        else:
            super()._init_on_sender_impl(model_id, context, **kwargs)

    def _serve(self, collector: object, model_id: str) -> Served:
        readers = served(collector, model_id)
        end_with_program(readers.workers)
        close_with_program(self)
        self._first_worker = readers.first_worker
        return readers

    def _prepare(self) -> None:
        readers = served(self.context, str(self.model_id))
        logs = StartLogs(readers.workers.num_workers, self.start_timeout_s)
        self.link.starting = logs
        readers.prepare(self.publisher, logs)

    def _setup_connection_and_weights_on_sender_impl(
        self, *, worker_idx: int | None = None, weights: object = None
    ) -> None:
        super()._setup_connection_and_weights_on_sender_impl(worker_idx=worker_idx, weights=weights)
        # Workers of other schemes stand only when those are connected, too; TorchRL waits for them itself.
        schemes = schemes_of(self.context).values()
        if schemes and all(isinstance(scheme, BoardScheme) for scheme in schemes):
            logs = self.link.starting
            assert logs is not None, "made before the workers were started"
            try:
                readers = served(self.context, str(self.model_id))
                timeouts_s = self.start_timeout_s, self.silent_timeout_s
                readers.await_start(self.publisher, timeouts_s, logs)
            finally:
                logs.close()

    def _init_on_receiver_impl(
        self, model_id: str, context: object = None, worker_idx: int = 0, model: object = None
    ) -> None:
        forget_sender(self)
        if isinstance(context, InferenceServer):
            self.model_id = model_id
            self.worker_idx = worker_idx
            set_context(self, context)
            self.link.in_server(model_id, self.adopt, context)
            return
        self._board = None
        super()._init_on_receiver_impl(model_id, context, worker_idx - self._first_worker, model)

    def shutdown(self) -> None:
        """Close the board if it is this scheme's own; in a worker, adopt for this destination no more."""
        super().shutdown()
        self.link.leave(self.model_id)
        if self._owns_board and self._board is not None:
            self._board.close()


def register_backend() -> None:
    """Make ``WeightSyncScheme.from_backend("board")`` return a :class:`BoardScheme`.

    Example:
        >>> from torchrl.weight_update import WeightSyncScheme
        >>> register_backend()
        >>> type(WeightSyncScheme.from_backend("board")).__name__
        'BoardScheme'
    """
    register_weight_sync_backend("board")(BoardScheme)
