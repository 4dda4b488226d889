"""BoundStaleness: the learner consumes no frame that is older than a bound."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.trainers import Trainer

from rlsync.core.errors import ConfigError, StalenessExceeded
from rlsync.core.user_input import check_choice, check_count
from rlsync.torchrl_plugin.compat.stamps import STAMP
from rlsync.torchrl_plugin.compat.trainers import Reader
from rlsync.torchrl_plugin.hooks.ages import UNKNOWN, stamps_of
from rlsync.torchrl_plugin.hooks.logs import Logs
from rlsync.torchrl_plugin.hooks.misuse import RegistersItself
from rlsync.torchrl_plugin.hooks.sync_weights import SyncWeights

Action = Literal["drop", "wait", "raise"]
Unknown = Literal["keep", "drop", "raise"]


class BoundStaleness(Logs, RegistersItself, Reader):
    """Keep the staleness of every consumed frame at or below a bound, in versions.

    ``"drop"`` removes frames that are too old from the batch that an optimizer step is about to use. In a
    batch with several dimensions it removes whole rows. If no frame is left, the trainer ends the epoch.

    ``"wait"`` delays a publish that would make a frame too old. The hook publishes as soon as the current
    batch is consumed and the live workers act with newer weights. Training continues meanwhile, so a dead
    worker cannot block it. Waiting does not make a frame in a replay buffer younger: a frame that is too old
    raises StalenessExceeded.

    ``"raise"`` raises StalenessExceeded when a frame is too old.

    The age of a frame is unknown if it names no version of this learner: a recorded frame has no
    ``policy_version``, or -1. No bound can be kept for such frames, so ``unknown`` says what to do with them:
    ``"raise"`` raises StalenessExceeded, ``"drop"`` removes them as it removes old ones, ``"keep"`` lets them
    pass. Only the default promises that every consumed frame is within the bound without losing any: choose
    ``"keep"`` to train on recorded and collected frames together.

    Register it after the trainer's replay buffer and SyncWeights, and LogPolicyLag after this hook: then that
    logs only the frames that are consumed.

    With bound 0 and a collector that does not collect in the background, every frame is consumed under the
    version that made it. The run then makes the same updates as one that publishes after each batch.

    Once in each iteration it logs the totals ``staleness/dropped_frames`` and
    ``staleness/put_off_publishes``.

    One trainer may have one.

    Args:
        sync: the hook that publishes, bound to the same trainer.
        max_versions: the bound, in versions; a whole number, at least zero.
        action: what to do about frames above the bound.
        unknown: what to do about frames of unknown age.

    Raises:
        ConfigError: an argument is wrong. At :meth:`register`: the frames carry no stamps, or ``"wait"`` is
            used with workers that collect in the background, and the bound is 0 or they adopt within
            rollouts.
        StalenessExceeded: during training, when a frame is too old, with ``"raise"`` or ``"wait"``; or when
            its age is unknown, with ``unknown="raise"``.

    Example:
        >>> from rlsync import SyncWeights
        >>> sync = SyncWeights({"policy": "loss_module.actor_network"})
        >>> hook = BoundStaleness(sync, 2, "drop")
        >>> # sync.register(trainer); hook.register(trainer)
    """

    reads = (STAMP,)

    def __init__(
        self,
        sync: SyncWeights,
        max_versions: int,
        action: Action = "drop",
        *,
        unknown: Unknown = "raise",
    ) -> None:
        where = f"BoundStaleness(max_versions={max_versions!r})"
        check_count("a staleness bound in versions", max_versions, 0, where, "for example 2")
        check_choice("action", action, get_args(Action), f"BoundStaleness(action={action!r})")
        check_choice("action", unknown, get_args(Unknown), f"BoundStaleness(unknown={unknown!r})")
        super().__init__(sync, "staleness")
        self.max_versions = max_versions
        self.action = action
        self.unknown = unknown
        self.dropped_frames = 0
        self.put_off_publishes = 0
        self._in_hand: int | None = None
        self._put_off = False

    def register(self, trainer: Trainer, name: str = "bound_staleness") -> None:
        self._require(trainer, stamps=True)
        if self.action == "wait":
            self._check_can_wait()
            self.sync.gates.append(self._may_publish)
        self._enrol(trainer, name)
        trainer.register_op("process_optim_batch", self._consume)
        trainer.register_op("post_optim_complete_log", self._batch_done)
        trainer.register_op("post_steps", self._ask_again)

    def _check_can_wait(self) -> None:
        endpoint = self.sync.bound.endpoint
        if self.max_versions == 0 and endpoint.in_flight:
            raise ConfigError(
                "workers that collect in the background cannot hold bound 0: their next rollout begins "
                "before the learner publishes",
                "BoundStaleness(max_versions=0, action='wait')",
                "use MultiSyncCollector, a bound of at least 1, or action='drop'",
            )
        if endpoint.adopts_within_rollouts and endpoint.in_flight:
            problem = (
                "the oldest frame of a running rollout is not known: workers adopt within rollouts"
            )
            where = "BoundStaleness(action='wait') with BoardScheme(adopt_at='policy_call')"
            raise ConfigError(
                problem, where, "use action='drop', or let the workers adopt between rollouts"
            )

    def _consume(self, batch: TensorDictBase) -> TensorDictBase:
        stamps = stamps_of(batch, self.sync.version)
        unknown = stamps == UNKNOWN
        if self.action == "wait" and not bool(unknown.all()):
            self._in_hand = int(stamps[~unknown].min())
        age = self.sync.staleness(batch).versions.view_as(stamps)
        stale = (age > self.max_versions) & ~unknown
        if self.unknown == "raise" and bool(unknown.any()):
            raise self._exceeded(
                f"{int(unknown.sum())} of {stamps.numel()} frames do not say which version made them",
                "BoundStaleness(unknown='keep') consumes such frames, unknown='drop' does not",
            )
        if self.action != "drop" and bool(stale.any()):
            oldest = int(age[stale].max())
            raise self._exceeded(
                f"{int(stale.sum())} of {stamps.numel()} frames are up to {oldest} versions old",
                "publish less often, raise the bound, or use action='drop'",
            )
        dropped = stale
        if self.unknown == "drop":
            dropped = stale | unknown
        if bool(dropped.any()):
            return self._rest(batch, dropped)
        return batch

    def _exceeded(self, problem: str, cure: str) -> StalenessExceeded:
        step = self.sync.counters().optim_steps + 1
        where = f"optimizer step {step}, version {self.sync.version}"
        return StalenessExceeded(f"{problem}; the bound is {self.max_versions}", where, cure)

    def _rest(self, batch: TensorDictBase, dropped: Tensor) -> TensorDictBase:
        rows = dropped
        if dropped.ndim > 1:
            rows = dropped.flatten(1).any(1)
        frames_of_a_row = dropped.numel() // max(1, rows.numel())
        self.dropped_frames += int(torch.count_nonzero(rows)) * frames_of_a_row
        if bool(rows.all()):
            raise StopIteration  # tells TorchRL that this epoch has no more batches
        return batch[~rows]

    def _may_publish(self) -> bool:
        """Whether every frame that is not consumed yet would be within the bound after the next publish."""
        # A publish is put off and not waited for: an asynchronous worker begins its next rollout, and adopts,
        # only when the learner takes its batch, so a learner that waited here would wait for ever.
        oldest = []
        if self._in_hand is not None:
            oldest.append(self._in_hand)
        if self.sync.bound.endpoint.in_flight:
            acting = self.sync.oldest_acting()
            if acting is not None:
                oldest.append(acting)
        may = max(self.sync.ledger.ages(oldest), default=-1) + 1 <= self.max_versions
        self.put_off_publishes += not may
        self._put_off = not may
        return may

    def _batch_done(self, optim_steps: int, average_losses: TensorDictBase | None) -> None:
        self._in_hand = None

    def _ask_again(self) -> None:
        """If a publish was put off, try again now that the batch is consumed."""
        if self._put_off:
            self._put_off = False
            self.sync()

    def _metrics(self) -> dict[str, float]:
        return self.state_dict()

    def state_dict(self) -> dict[str, Any]:
        """The counts of dropped frames and delayed publishes."""
        return {"dropped_frames": self.dropped_frames, "put_off_publishes": self.put_off_publishes}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the counts of a checkpoint.

        Args:
            state_dict: what :meth:`state_dict` returned.
        """
        self.dropped_frames = int(state_dict["dropped_frames"])
        self.put_off_publishes = int(state_dict["put_off_publishes"])
