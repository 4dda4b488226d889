"""Hooks that log through the trainer's logger what a SyncWeights does: LogReceipts and LogPolicyLag."""

from __future__ import annotations

from abc import abstractmethod

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.trainers import Trainer, TrainerHookBase

from rlsync.core.errors import ConfigError
from rlsync.torchrl_plugin.compat.stamps import STAMP
from rlsync.torchrl_plugin.compat.trainers import Reader, free_name, registered_modules
from rlsync.torchrl_plugin.hooks.ages import UNKNOWN
from rlsync.torchrl_plugin.hooks.misuse import (
    RegistersItself,
    require,
    require_stamps,
    require_trainer,
)
from rlsync.torchrl_plugin.hooks.sync_weights import SyncWeights


class Logs(TrainerHookBase):
    """A hook that logs metrics about a :class:`SyncWeights` under a prefix. A trainer may have several."""

    def __init__(self, sync: SyncWeights, prefix: str) -> None:
        require(SyncWeights, sync, self, "give the SyncWeights of the trainer")
        self.sync = sync
        self.prefix = prefix  #: the beginning of the logged names
        self.lag_versions = 0  #: when the newest batch arrived

    @abstractmethod
    def register(self, trainer: Trainer, name: str = "logs") -> None:
        """Work on this trainer, on which the SyncWeights is registered already.

        Args:
            trainer: the trainer.
            name: the hook's name in checkpoints.
        """

    def _metrics(self) -> dict[str, float]:
        """What is logged once in each iteration of the trainer, by name without the prefix."""
        raise NotImplementedError

    def _require(self, trainer: Trainer, *, stamps: bool = False) -> None:
        """Refuse a trainer without this SyncWeights or with such a hook, and frames without ``stamps``."""
        who = type(self).__name__
        require_trainer(self.sync, trainer, f"{who}.register")
        for other in registered_modules(trainer):
            if (
                isinstance(other, Logs)
                and type(other) is type(self)
                and other.prefix == self.prefix
            ):
                problem = f"this trainer already has a {who} that logs under {self.prefix!r}"
                cure = f"register one {who} for each SyncWeights, each with a prefix of its own if it has one"
                raise ConfigError(problem, f"{who}.register", cure)
        if stamps:
            require_stamps(self.sync, who)

    def _enrol(self, trainer: Trainer, name: str) -> None:
        """Log through a trainer, and become part of its checkpoints."""
        trainer.register_op("post_steps_log", self._report)
        trainer.register_module(free_name(trainer, name), self)

    def _arrived(self, batch: TensorDictBase | None = None) -> None:
        self.lag_versions = self.sync.lag_versions()

    def _report(self, batch: TensorDictBase | None = None) -> dict[str, float]:
        return {f"{self.prefix}/{name}": value for name, value in self._metrics().items()}


class LogReceipts(Logs, RegistersItself):
    """Log the newest receipt through the trainer's logger, once in each iteration of the trainer.

    It logs, under ``prefix``:

    - ``version``: the newest published version;
    - ``lag_versions``: the policy lag of the slowest worker when the batch arrived, before the next publish.
      Right after a publish it would be at least 1 for every worker, however fast it adopts;
    - ``publish_ms``: the milliseconds for which the newest publish held the learner;
    - ``copied_bytes``: the bytes that it copied.

    The trainer's logger may be any of TorchRL's. A trainer without a logger keeps the values in its history
    and writes nothing.

    Args:
        sync: the hook whose receipts are logged, bound to the same trainer.
        prefix: the beginning of the logged names.

    Raises:
        ConfigError: at :meth:`register`, if ``sync`` is bound to another trainer, or to none.

    Example:
        >>> from rlsync import SyncWeights
        >>> hook = LogReceipts(SyncWeights({"policy": "loss_module.actor_network"}))
        >>> # after the SyncWeights: hook.register(trainer)
    """

    def __init__(self, sync: SyncWeights, *, prefix: str = "sync") -> None:
        super().__init__(sync, prefix)

    def register(self, trainer: Trainer, name: str = "log_receipts") -> None:
        self._require(trainer)
        self._enrol(trainer, name)
        trainer.register_op("pre_steps_log", self._arrived)

    def _metrics(self) -> dict[str, float]:
        if not self.sync.receipts:
            return {}
        newest = self.sync.receipts[-1]
        return {
            "version": self.sync.version,
            "lag_versions": self.lag_versions,
            "publish_ms": newest.duration_s * 1e3,
            "copied_bytes": newest.copied_bytes,
        }


class LogPolicyLag(Logs, RegistersItself, Reader):
    """Log the staleness of consumed frames and the workers' policy lag through the trainer's logger.

    A frame is consumed when it is part of a batch that an optimizer step is about to use. A frame that is
    used twice counts twice. Its staleness in versions is the learner's version at that moment minus the
    version stamped on the frame. Its staleness in optimizer steps is the number of steps between the two
    versions. The hook works with batches from the collector and from a replay buffer, which must be
    registered before it, with synchronous and asynchronous collection.

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

    reads = (STAMP,)

    def __init__(self, sync: SyncWeights, *, prefix: str = "policy_lag") -> None:
        super().__init__(sync, prefix)
        self._versions: list[Tensor] = []
        self._acted: set[int] = set()
        self._optim_steps: list[Tensor] = []

    def register(self, trainer: Trainer, name: str = "policy_lag") -> None:
        self._require(trainer, stamps=True)
        self._enrol(trainer, name)
        trainer.register_op("pre_steps_log", self._arrived)
        trainer.register_op("process_optim_batch", self._consume)

    def _consume(self, batch: TensorDictBase) -> TensorDictBase:
        age = self.sync.staleness(batch)
        known = age.versions[age.versions != UNKNOWN]
        self._acted |= set((self.sync.version - known).unique().tolist())
        self._versions.append(age.versions)
        self._optim_steps.append(age.optim_steps)
        return batch

    def _metrics(self) -> dict[str, float]:
        metrics: dict[str, float] = {"lag_versions": self.lag_versions}
        if self._versions:
            versions = torch.cat(self._versions)
            steps = torch.cat(self._optim_steps)
            unknown = int((steps == UNKNOWN).sum())
            metrics["consumed_frames"] = steps.numel()
            metrics["consumed_versions"] = len(self._acted)
            metrics["frames_of_unknown_age"] = unknown
            metrics["share_of_unknown_age"] = unknown / max(1, steps.numel())
            for unit, ages in (("versions", versions), ("optim_steps", steps)):
                known = ages[ages != UNKNOWN]
                if known.numel():
                    known = known.double()
                    metrics[f"staleness_{unit}_mean"] = float(known.mean())
                    metrics[f"staleness_{unit}_p95"] = float(torch.quantile(known, 0.95))
                    metrics[f"staleness_{unit}_max"] = float(known.max())
            self._versions = []
            self._optim_steps = []
            self._acted = set()
        return metrics
