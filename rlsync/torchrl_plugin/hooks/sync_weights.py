"""SyncWeights: the hook."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path as FilePath

import torch
from tensordict import TensorDictBase
from torch import Tensor

from rlsync.core.errors import ConfigError
from rlsync.core.ledger import Ledger
from rlsync.core.plan import Receipt, Source, SyncPlan
from rlsync.core.trigger import Counters, Every, Trigger
from rlsync.sync.bound_map import BoundMap
from rlsync.sync.endpoint import Endpoint
from rlsync.sync.unchanged import UNCHANGED_PUBLISHES, check_limit
from rlsync.sync.verification import Verification
from rlsync.torchrl_plugin import compat
from rlsync.torchrl_plugin.collectors.board import BoardEndpoint
from rlsync.torchrl_plugin.collectors.choose import endpoint_of, warn_without_board
from rlsync.torchrl_plugin.hooks.misuse import no_trainer
from rlsync.torchrl_plugin.hooks.publish_hook import PublishHook
from rlsync.torchrl_plugin.training import training_of

#: The age in optimizer steps of a frame whose version the ledger does not know.
UNKNOWN = -1


@dataclass(frozen=True, slots=True)
class Staleness:
    """The age of frames, one entry a frame.

    Args:
        versions: the learner's version minus the stamped one.
        optim_steps: optimizer steps done since the stamped version was published; -1 for versions that the
            ledger does not know, because they are too old or nobody counted steps.
    """

    versions: Tensor
    optim_steps: Tensor


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
        history: how many receipts are kept.
        receipts_file: receipts are appended here, one JSON object a line.
        finite: refuse to publish weights that are not all finite; costs one more reading of them. The
            publish raises a PublishError that names the leaf, and nothing is published.
        background: a publish by the trigger copies what the optimizers write in a thread, during the next
            forward and backward pass, and is joined before an optimizer writes again; workers see the
            version when it is copied. Whatever else writes to these weights after an optimizer's step
            must do so at a stage before this hook's. Needs workers on a board.
        max_unchanged_publishes: after so many publishes in a row that sent the same weights, although the
            optimizers made steps in between, a NothingChanged warning says what the optimizers change
            instead; a whole number of at least 2. ``None`` never warns.

    Raises:
        SyncMapError: the map cannot be carried out.
        ConfigError: an argument is wrong, or the trainer already has such a hook. In ``trainer.train()``: the
            hook has no trainer, because it was given to ``register_op`` without ``trainer=``, or its stage
            passes arguments.

    Source: torchrl.trainers.UpdateWeights, which it replaces.

    Example:
        >>> from rlsync import Every, SyncWeights
        >>> hook = SyncWeights({"policy": "loss_module.actor_network"}, when=Every(4, "optim_steps"))
        >>> str(hook.when)
        'every 4 optim_steps'
        >>> # hook.register(trainer)
    """

    def __init__(
        self,
        sync_map: Mapping[str, str | Source],
        when: Trigger | None = None,
        *,
        trainer: compat.Trainer | None = None,
        history: int = 1000,
        receipts_file: str | FilePath | None = None,
        finite: bool = False,
        background: bool = False,
        max_unchanged_publishes: int | None = UNCHANGED_PUBLISHES,
    ) -> None:
        super().__init__(
            Every(1, "batches") if when is None else when,
            history=history,
            receipts_file=receipts_file,
        )
        check_limit(max_unchanged_publishes)
        self.sync_map = sync_map
        self.finite = finite
        self.background = background
        self.max_unchanged_publishes = max_unchanged_publishes
        self._bound_map: BoundMap | None = None
        if trainer is not None:
            self._bind(trainer, "sync_weights")

    def register(self, trainer: compat.Trainer, name: str = "sync_weights") -> None:
        """Resolve, check, and register at the stages where the trigger's counters change.

        Args:
            trainer: the trainer.
            name: under which the hook is kept in checkpoints.
        """
        if self.trainer is None:
            self._bind(trainer, name)
        self.require_trainer(trainer, "SyncWeights.register")
        units = self.when.units()
        if "optim_steps" in units:
            trainer.register_op("post_optim", self)
        if units - {"optim_steps"}:
            trainer.register_op("post_steps", self)

    def _bind(self, trainer: compat.Trainer, name: str) -> None:
        endpoint = endpoint_of(trainer.collector)
        if self.background:
            _require_background(trainer, endpoint)
        self._bound_map = BoundMap(
            self.sync_map,
            trainer,
            endpoint,
            training=training_of(trainer),
            max_unchanged_publishes=self.max_unchanged_publishes,
            finite=self.finite,
        )
        try:
            self._enrol(trainer, name)
        except BaseException:
            self._bound_map = None
            raise
        endpoint.connect(self.publish)
        warn_without_board(endpoint, "SyncWeights.register")
        trainer.register_op("post_optim", self._count_optim_step)
        trainer.register_op("post_steps", self._count_batch_done)
        if self.background and not endpoint.in_flight:
            # Workers that wait for the learner act with what was published for their rollout.
            trainer.register_op("post_steps_log", self._join_before_rollout)
        self._owe("start")

    def _join_before_rollout(self, batch: object) -> None:
        self.join()

    @property
    def _bound(self) -> BoundMap:
        if self._bound_map is None:
            raise no_trainer(self, "pass trainer=trainer to SyncWeights, or ")
        return self._bound_map

    def _require_bound(self) -> None:
        _ = self._bound

    @property
    def plan(self) -> SyncPlan:
        """The resolved map."""
        return replace(self._bound.plan, trigger=str(self.when))

    @property
    def ledger(self) -> Ledger:
        """Numbers and times of the versions that the workers read, whoever published them."""
        return self._bound.endpoint.publisher.ledger

    @property
    def version(self) -> int:
        """The newest published version; 0 before the first."""
        return self._bound.endpoint.publisher.version

    def join(self) -> None:
        """Wait until what was published in the background is visible.

        Raises:
            PublishError: it was written to meanwhile, and is not published.
        """
        if self._bound_map is not None:
            self._bound_map.endpoint.publisher.join()

    def lag_versions(self) -> int:
        """Newest published version minus the oldest one that a living worker acts with."""
        return self.version - min(self.acting_versions(), default=self.version)

    def acting_versions(self) -> list[int]:
        """The version that each living worker acts with, where the transport can tell."""
        endpoint = self._bound.endpoint
        readers = endpoint.publisher.transport.status()  # others may read along: an evaluator
        return [r.adopted_version for r in readers if r.alive and r.reader < endpoint.num_workers]

    @property
    def in_flight(self) -> bool:
        """Whether workers may be collecting while the learner publishes."""
        return self._bound.endpoint.in_flight

    @property
    def adopts_within_rollouts(self) -> bool:
        """Whether a worker may adopt during a rollout, so that its frames have several versions."""
        endpoint = self._bound.endpoint
        return isinstance(endpoint, BoardEndpoint) and endpoint.adopt_at != "rollout"

    def wait(self, timeout_s: float) -> None:
        """Wait until every worker acts with the newest version.

        Args:
            timeout_s: give up after this many seconds.

        Raises:
            WorkerLost: a worker is dead.
            AdoptionTimeout: the deadline passed; names the workers.
        """
        self._bound.endpoint.wait(timeout_s)

    def verification(self) -> Verification:
        """What compares the weights that act with those that were published.

        Raises:
            ConfigError: the workers of this collector cannot be asked, or are being asked already.
        """
        return self._bound.endpoint.verification()

    def check(self) -> Verification:
        """The old name of :meth:`verification`."""
        warnings.warn("SyncWeights.check is now SyncWeights.verification", DeprecationWarning, stacklevel=2)
        return self.verification()

    def staleness(self, batch: TensorDictBase) -> Staleness:
        """How old the frames of a batch are, now.

        Args:
            batch: frames that carry ``policy_version``; any shape.

        Returns:
            Two int64 tensors, one entry a frame, in the order of ``policy_version`` when it is flattened.
        """
        stamps = batch.get(compat.STAMP).flatten()
        versions, place = stamps.unique(return_inverse=True)
        ledger, steps = self.ledger, self.counters().optim_steps
        ages = [ledger.optim_steps_since(version, steps) for version in versions.tolist()]
        known = torch.tensor([UNKNOWN if age is None else age for age in ages], dtype=torch.int64)
        return Staleness(self.version - stamps, known.to(stamps.device)[place])

    def require_stamps(self, who: str) -> None:
        """Refuse a collector whose frames do not say which version acted.

        Args:
            who: who needs the stamps, for the error.

        Raises:
            ConfigError: the frames carry no ``policy_version``.
        """
        endpoint = self._bound.endpoint
        if not endpoint.stamped:
            raise ConfigError(
                "frames do not carry the version that acted",
                f"{who} on this trainer's collector",
                "; ".join(endpoint.notes),
            )

    def _publish(self, reason: str, now: Counters) -> Receipt:
        in_background = self.background and reason == "trigger"
        return self._bound.publish(reason, now, in_background=in_background)


def _require_background(trainer: compat.Trainer, endpoint: Endpoint) -> None:
    if not endpoint.publisher.transport.background:
        raise ConfigError(
            "weights of this collector are not published in the background",
            f"SyncWeights(background=True), transport {endpoint.description}",
            "leave it out, or use a process collector with a BoardScheme",
        )
    if not compat.optimizers(trainer):
        raise ConfigError(
            "this trainer has no optimizer before whose step a publish could be joined",
            "SyncWeights(background=True)",
            "give the trainer its optimizer, or leave background out",
        )
