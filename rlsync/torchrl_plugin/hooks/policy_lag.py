"""LogPolicyLag: logs the staleness of consumed frames and the policy lag of the workers."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.trainers import Trainer

from rlsync.torchrl_plugin.compat.trainers import free_name
from rlsync.torchrl_plugin.hooks.ages import UNKNOWN
from rlsync.torchrl_plugin.hooks.misuse import Logs, RegistersItself
from rlsync.torchrl_plugin.hooks.sync_weights import SyncWeights


class LogPolicyLag(RegistersItself, Logs):
    """Log the staleness of consumed frames and the workers' policy lag through the trainer's logger.

    A frame is consumed when it is part of a batch that an optimizer step is about to use. A frame that is
    used twice counts twice. Its staleness in versions is the learner's version at that moment minus the
    version stamped on the frame. Its staleness in optimizer steps is the number of steps between the two
    versions. The hook works with batches from the collector and from a replay buffer, with synchronous and
    asynchronous collection.

    Once in each iteration of the trainer it logs, under ``prefix``:

    - ``lag_versions``: the newest published version minus the oldest one that a live worker acts with, when
      the batch arrives: before it is learned from, and before the next publish;
    - ``staleness_versions_mean``, ``_p95``, ``_max`` and ``staleness_optim_steps_mean``, ``_p95``,
      ``_max``: over the frames consumed since the last log, if there were any;
    - ``consumed_frames``: the number of these frames; ``consumed_versions``: how many versions acted in them;
    - ``frames_of_unknown_age``: those among them that name no version of this learner, as recorded frames do
      not, or one that the ledger does not know; and ``share_of_unknown_age``, from 0 to 1. The former are
      left out of both kinds of staleness, the latter of ``staleness_optim_steps_*``.

    Args:
        sync: the hook that publishes, bound to the same trainer.
        prefix: the beginning of the logged names.

    Raises:
        ConfigError: at :meth:`register`, if the frames carry no stamps, or if ``sync`` is bound to another
            trainer.

    Example:
        >>> from rlsync import SyncWeights
        >>> hook = LogPolicyLag(SyncWeights({"policy": "loss_module.actor_network"}))
        >>> # after the SyncWeights: hook.register(trainer)
    """

    def __init__(self, sync: SyncWeights, *, prefix: str = "policy_lag") -> None:
        self.sync = sync
        self.prefix = prefix
        self._lag_versions = 0
        self._versions: list[Tensor] = []
        self._acted: set[int] = set()
        self._optim_steps: list[Tensor] = []

    def register(self, trainer: Trainer, name: str = "policy_lag") -> None:
        """Observe the batches that this trainer consumes. Call it after its replay buffer is registered.

        Args:
            trainer: the trainer.
            name: the hook's name in checkpoints.
        """
        self.sync.require_trainer(trainer, "LogPolicyLag.register")
        self._refuse_same_names(trainer)
        self.sync.require_stamps("LogPolicyLag")
        trainer.register_op("pre_steps_log", self._arrived)
        trainer.register_op("process_optim_batch", self._consume)
        trainer.register_op("post_steps_log", self._report)
        trainer.register_module(free_name(trainer, name), self)

    def _arrived(self, batch: TensorDictBase | None = None) -> None:
        self._lag_versions = self.sync.lag_versions()

    def _consume(self, batch: TensorDictBase) -> TensorDictBase:
        age = self.sync.staleness(batch)
        known = age.versions[age.versions != UNKNOWN]
        self._acted |= set((self.sync.version - known).unique().tolist())
        self._versions.append(age.versions)
        self._optim_steps.append(age.optim_steps)
        return batch

    def _report(self, batch: TensorDictBase | None = None) -> dict[str, Any]:
        metrics: dict[str, Any] = {"lag_versions": self._lag_versions}
        if self._versions:
            versions, steps = torch.cat(self._versions), torch.cat(self._optim_steps)
            unknown = int((steps == UNKNOWN).sum())
            metrics["consumed_frames"] = steps.numel()
            metrics["consumed_versions"] = len(self._acted)
            metrics["frames_of_unknown_age"] = unknown
            metrics["share_of_unknown_age"] = unknown / max(1, steps.numel())
            for unit, ages in (("versions", versions), ("optim_steps", steps)):
                known = ages[ages != UNKNOWN]
                if known.numel():
                    metrics |= {f"staleness_{unit}_{what}": value for what, value in _spread(known).items()}
            self._versions, self._optim_steps, self._acted = [], [], set()
        return {f"{self.prefix}/{name}": value for name, value in metrics.items()}


def _spread(age: Tensor) -> dict[str, float]:
    age = age.double()
    return {
        "mean": float(age.mean()),
        "p95": float(torch.quantile(age, 0.95)),
        "max": float(age.max()),
    }
