"""LogPolicyLag: how old the frames are that the learner consumes, and how far the workers lag."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.trainers import TrainerHookBase

from rlsync.torchrl_plugin import compat
from rlsync.torchrl_plugin.hooks.sync_weights import SyncWeights


class LogPolicyLag(TrainerHookBase):
    """Log the staleness of consumed frames and the workers' policy lag through the trainer's logger.

    A frame is consumed when it is part of a batch that an optimizer step is about to use; a frame that is
    used twice counts twice. Its staleness is the learner's version at that moment minus the version
    stamped on it, and the optimizer steps that lie between the two. The hook works where batches come
    from the collector and where they come from a replay buffer, with synchronous and asynchronous
    collection.

    Logs, under ``prefix``, once an iteration of the trainer:

    - ``lag_versions``: newest published version minus the oldest one that a living worker acts with;
    - ``staleness_versions_mean``, ``_p95``, ``_max`` and ``staleness_optim_steps_mean``, ``_p95``,
      ``_max``: over the frames consumed since the last time, when there were any;
    - ``consumed_frames``: how many these were.

    Args:
        sync: the hook that publishes, bound to the same trainer.
        prefix: what the names begin with.

    Raises:
        ConfigError: at :meth:`register`, when the frames carry no stamps, or ``sync`` is bound to another
            trainer.

    Example:
        >>> from rlsync import SyncWeights
        >>> hook = LogPolicyLag(SyncWeights({"policy": "loss_module.actor_network"}))
        >>> # hook.register(trainer), after the SyncWeights was registered
    """

    def __init__(self, sync: SyncWeights, *, prefix: str = "policy_lag") -> None:
        self.sync = sync
        self.prefix = prefix
        self._versions: list[Tensor] = []
        self._optim_steps: list[Tensor] = []

    def register(self, trainer: compat.Trainer, name: str = "policy_lag") -> None:
        """Watch what this trainer consumes; register after its replay buffer.

        Args:
            trainer: the trainer.
            name: under which the hook is kept in checkpoints.
        """
        self.sync.require_trainer(trainer, "LogPolicyLag.register")
        self.sync.require_stamps("LogPolicyLag")
        trainer.register_op("process_optim_batch", self._consume)
        trainer.register_op("post_steps_log", self._report)
        trainer.register_module(name, self)

    def _consume(self, batch: TensorDictBase) -> TensorDictBase:
        age = self.sync.staleness(batch)
        self._versions.append(age.versions)
        self._optim_steps.append(age.optim_steps)
        return batch

    def _report(self, batch: TensorDictBase | None = None) -> dict[str, Any]:
        told: dict[str, Any] = {"lag_versions": self.sync.lag_versions()}
        if self._versions:
            ages = torch.cat(self._versions), torch.cat(self._optim_steps)
            told["consumed_frames"] = ages[0].numel()
            for unit, age in zip(("versions", "optim_steps"), ages, strict=True):
                told |= {f"staleness_{unit}_{what}": value for what, value in _spread(age).items()}
            self._versions, self._optim_steps = [], []
        return {f"{self.prefix}/{name}": value for name, value in told.items()}

    def state_dict(self) -> dict[str, Any]:
        """Nothing to keep: what was not reported yet is reported before a checkpoint is written."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing to load.

        Args:
            state_dict: not used.
        """


def _spread(age: Tensor) -> dict[str, float]:
    age = age.double()
    return {
        "mean": float(age.mean()),
        "p95": float(torch.quantile(age, 0.95)),
        "max": float(age.max()),
    }
