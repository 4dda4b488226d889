"""SyncWeights: the hook."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path as FilePath

from tensordict import TensorDictBase
from torchrl.collectors import BaseCollector, Evaluator
from torchrl.trainers import Trainer

from rlsync.core import trace
from rlsync.core.errors import NothingPublished, warn
from rlsync.core.plan import Source, SyncPlan
from rlsync.core.trigger import Every, Trigger
from rlsync.sync.bound_map import BoundMap
from rlsync.sync.endpoint import Endpoint
from rlsync.sync.trained import UNCHANGED_PUBLISHES, check_limit
from rlsync.sync.workers_publisher import BoardCollector
from rlsync.torchrl_plugin.collectors.choose import endpoint_of, training_of, warn_without_board
from rlsync.torchrl_plugin.compat.collectors import policy_of
from rlsync.torchrl_plugin.compat.evaluators import pin
from rlsync.torchrl_plugin.compat.servers import server_of
from rlsync.torchrl_plugin.compat.stamps import STAMP
from rlsync.torchrl_plugin.hooks import misuse
from rlsync.torchrl_plugin.hooks.ages import Staleness, staleness_of
from rlsync.torchrl_plugin.hooks.publish_hook import MapSending, PublishHook
from rlsync.transport.contract import ReaderStatus, TellsAtOnce
from rlsync.transport.rules import living


class SyncWeights(PublishHook):
    """Publish the weights that a map names, when a trigger says so.

    The map is resolved and checked when the hook meets its trainer, at :meth:`register` or when
    ``trainer=`` is given. The hook replaces the UpdateWeights that stock trainers install, publishes once
    before the first frame and once after a resume, and keeps its counters in the trainer's checkpoints.

    Args:
        sync_map: ``{destination path on the collector: source path on the trainer}``. A
            :class:`rlsync.Source` in place of a source path declares a cast or exclusions.
        when: the trigger; by default every batch.
        trainer: bind now, for use with ``trainer.register_op(stage, hook)`` at a stage without
            arguments (``post_steps``, ``post_optim``, ``post_epoch``).
        collector: where the destinations are; by default the trainer's own collector. One trainer may have a
            hook for each of several collectors, for example one that evaluates. Each has its own map, trigger
            and versions.
        history: how many receipts are kept.
        receipts_file: receipts are appended here, one JSON object a line.
        versions_file: version numbers are reserved here, before they are used, so that a learner that is
            killed and resumed with this file never uses one twice. Each receipt then has the ``run_id`` that
            the file has.
        finite: refuse to publish weights that are not all finite; costs one more reading of them. The
            publish raises a PublishError that names the leaf, and nothing is published.
        background: a publish by the trigger copies what the optimizers write in a thread, during the next
            forward and backward pass, and is joined before an optimizer writes again; workers see the
            version when it is copied. Whatever else writes to these weights after an optimizer's step
            must do so at a stage before this hook's. Needs workers on a board.
        max_unchanged_publishes: after so many publishes in a row that sent the same weights, although the
            optimizers made steps in between, a NothingChanged warning says what the optimizers change
            instead; a whole number of at least 2. ``None`` never warns, and says that the weights may stand
            still: there is no NothingLearns warning of a source that is frozen either.

    Raises:
        SyncMapError: the map cannot be carried out.
        ConfigError: an argument is wrong, or the trainer already has such a hook for this collector. In
            ``trainer.train()``: the hook has no trainer, because it was given to ``register_op`` without
            ``trainer=``, or its stage passes arguments.

    Source: torchrl.trainers.UpdateWeights, which it replaces.

    Example:
        >>> from rlsync import Every, SyncWeights
        >>> hook = SyncWeights({"policy": "loss_module.actor_network"}, when=Every(4, "optim_steps"))
        >>> str(hook.when)
        'every 4 optim_steps'
        >>> # hook.register(trainer)
    """

    kept_as = "sync_weights"

    def __init__(
        self,
        sync_map: Mapping[str, str | Source],
        when: Trigger | None = None,
        *,
        trainer: Trainer | None = None,
        collector: BaseCollector | None = None,
        history: int = 1000,
        receipts_file: str | FilePath | None = None,
        versions_file: str | FilePath | None = None,
        finite: bool = False,
        background: bool = False,
        max_unchanged_publishes: int | None = UNCHANGED_PUBLISHES,
    ) -> None:
        if when is None:
            when = Every(1, "batches")
        super().__init__(when, history=history, receipts_file=receipts_file)
        check_limit(max_unchanged_publishes)
        self.sync_map = sync_map
        self.versions_file = versions_file
        self.collector = collector
        self.finite = finite
        self.background = background
        self.max_unchanged_publishes = max_unchanged_publishes
        if trainer is not None:
            self._bind(trainer)

    def _bind(self, trainer: Trainer, name: str = "") -> None:
        misuse.require(
            Trainer, trainer, self, "without one, publish by collector.update_policy_weights_()"
        )
        requested = self.collector
        if requested is None:
            collector = trainer.collector
        else:
            collector = requested
            if server_of(collector) is None and not isinstance(collector, BoardCollector):
                cure = "leave collector=... out: the trainer has a collector"
                misuse.require(BaseCollector, collector, self, cure)
        endpoint = endpoint_of(collector)
        if self.background:
            misuse.refuse_background(trainer, endpoint)

        # Either all of this succeeds, or the hook and the trainer are as they were.
        self.collector = collector
        try:
            bound = BoundMap(
                self.sync_map,
                trainer,
                endpoint,
                training=training_of(trainer),
                max_unchanged_publishes=self.max_unchanged_publishes,
                finite=self.finite,
            )
            if self.background:
                misuse.refuse_shards_in_background(bound.plan)
            self._sending = MapSending(bound, collector, in_background=self.background)
            with self._enrolled(trainer, name):
                self._register_ops(trainer, endpoint)
                warn_without_board(endpoint, "SyncWeights.register")
                self._warn_of_another_collector(trainer)
                for warning in bound.plan.warnings():
                    warn(warning)
                self._owe("start")
        except BaseException:
            self.collector = requested
            self._sending = None
            raise
        endpoint.connect(self.publish)  # last, because it changes the collector

    def _warn_of_another_collector(self, trainer: Trainer) -> None:
        """Warn if the frames that are learned from come from a collector that gets no weights."""
        trained_from = trainer.collector
        if self.collector is trained_from or misuse.is_fed(trainer, trained_from):
            return
        if self.bound.acts_in(policy_of(trained_from)):
            return
        problem = "this SyncWeights publishes to another collector than the trainer's"
        where = (
            f"SyncWeights(collector={type(self.collector).__name__}); the trainer's own has no hook"
        )
        cure = "leave collector out; or register the hook of the trainer's own collector first"
        warn(NothingPublished(problem, where, cure))

    def _register_ops(self, trainer: Trainer, endpoint: Endpoint) -> None:
        trainer.register_op("post_optim", self._count_optim_step)
        trainer.register_op("post_steps", self._count_batch)
        trainer.register_op("post_steps", self._batch_done)
        # which traces its rollouts by itself
        if trace.ON and not isinstance(self.collector, BoardCollector):
            trainer.register_op("batch_process", _trace_taken)
        if self.versions_file is not None:
            self.ledger.reserve_in(self.versions_file)
            trainer.register_op("shutdown", self.ledger.give_back)
        if self.background and not endpoint.in_flight:
            # Workers that wait for the learner act with what was published for their rollout.
            trainer.register_op("post_steps_log", lambda _: self.join())

    @property
    def sending(self) -> MapSending:
        sending = super().sending
        assert isinstance(sending, MapSending)
        return sending

    @property
    def bound(self) -> BoundMap:
        """The map, tied to its sources and to the endpoint that it is published to.

        Raises:
            ConfigError: this hook has no trainer.
        """
        return self.sending.bound

    @property
    def plan(self) -> SyncPlan:
        """The resolved map. Its notes name the UpdateWeights hooks that this hook replaced or kept."""
        plan = self.bound.plan
        return replace(plan, trigger=str(self.when), notes=(*plan.notes, *self.beside))

    def lag_versions(self) -> int:
        """Newest published version minus the oldest one that a living worker acts with."""
        oldest = self.oldest_acting()
        if oldest is None:
            return 0
        return self.version - oldest

    def oldest_acting(self) -> int | None:
        """The oldest version that a living worker acts with; ``None`` where the transport cannot tell.

        It costs next to nothing however many workers there are.
        """
        transport = self.sending.publisher.transport
        if not isinstance(transport, TellsAtOnce):
            return min(self.acting_versions(), default=None)
        versions = transport.adopted(self.bound.endpoint.num_workers)
        while oldest := min(filter(None, versions), default=None):
            worker = versions.index(oldest)
            if transport.lives(worker):
                return oldest
            versions[worker] = 0  # the others may be newer
        return None

    def acting_versions(self) -> list[int]:
        """The version that each living worker acts with, where the transport can tell."""
        return [worker.adopted_version for worker in self.acting_workers()]

    def acting_workers(self) -> list[ReaderStatus]:
        """What the transport knows of each living worker; nothing where it cannot tell."""
        return living(self.sending.publisher.transport, self.bound.endpoint.num_workers)

    def wait(self, timeout_s: float) -> None:
        """Wait until every worker acts with the newest version.

        Args:
            timeout_s: give up after this many seconds.

        Raises:
            WorkerLost: a worker is dead.
            AdoptionTimeout: the deadline passed; names the workers.
        """
        self.bound.endpoint.wait(timeout_s)

    def staleness(self, batch: TensorDictBase) -> Staleness:
        """How old the frames of a batch are, now.

        Args:
            batch: frames that carry ``policy_version``; any shape. The age of other frames is unknown, -1.

        Returns:
            Two int64 tensors, one entry a frame, in the order of ``policy_version`` when it is flattened.
        """
        return staleness_of(batch, self.ledger, self.version, self.counters().optim_steps)

    def pin(self, evaluator: Evaluator) -> None:
        """Let each evaluation by TorchRL's Evaluator act with one version, which its result names.

        The newest version when ``evaluate()`` or ``trigger_eval()`` is called acts; if none is at hand, one
        is published then. The result has it as ``eval/policy_version``. Call both from the thread that
        trains, without weights. Each evaluation begins with new episodes. A policy that shares memory with
        the learner or its collector is copied. Without a board, each publish makes one copy more.

        From TorchRL 0.15 on its ``EvaluatorHook`` may make the calls, and the weights that it brings are left
        out. Each episode of ``evaluate_episodes()`` has an entry ``policy_version``.

        Args:
            evaluator: has the backend ``"thread"`` or ``"process"``, and has not evaluated yet.

        Raises:
            ConfigError: this hook has no trainer, or the Evaluator runs on Ray or has evaluated already.
            DestinationNotFound: the Evaluator's worker has no scheme for a destination of the map.
            LayoutMismatch: the Evaluator's policy has other leaves than the collector's.
        """
        self.sending.pinned.append(pin(evaluator, self.bound, self._settle, self.publish))


def _trace_taken(batch: TensorDictBase) -> TensorDictBase:
    """Trace a batch of a TorchRL collector: which versions its frames say, and how many each."""
    stamped = batch.get(STAMP, None)
    if stamped is not None:
        versions, frames = stamped.unique(return_counts=True)
        for version, count in zip(versions.tolist(), frames.tolist(), strict=True):
            trace.write(trace.LEARNER, "take", version, frames=count)
    return batch
