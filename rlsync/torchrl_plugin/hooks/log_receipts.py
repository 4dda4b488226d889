"""LogReceipts: what publishing cost, as metrics of the trainer's logger."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDictBase
from torchrl.trainers import Trainer

from rlsync.torchrl_plugin.compat.trainers import free_name
from rlsync.torchrl_plugin.hooks.misuse import Logs, RegistersItself
from rlsync.torchrl_plugin.hooks.sync_weights import SyncWeights


class LogReceipts(RegistersItself, Logs):
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
        self.sync = sync
        self.prefix = prefix
        self.lag_versions = 0  #: when the newest batch arrived

    def register(self, trainer: Trainer, name: str = "log_receipts") -> None:
        """Log after every batch of this trainer.

        Args:
            trainer: the trainer.
            name: the hook's name in checkpoints.
        """
        self.sync.require_trainer(trainer, "LogReceipts.register")
        self._refuse_same_names(trainer)
        trainer.register_op("pre_steps_log", self._arrived)
        trainer.register_op("post_steps_log", self._report)
        trainer.register_module(free_name(trainer, name), self)

    def _arrived(self, batch: TensorDictBase | None = None) -> None:
        self.lag_versions = self.sync.lag_versions()

    def _report(self, batch: TensorDictBase | None = None) -> dict[str, Any] | None:
        if not self.sync.receipts:
            return None
        newest = self.sync.receipts[-1]
        metrics = {
            "version": self.sync.version,
            "lag_versions": self.lag_versions,
            "publish_ms": newest.duration_s * 1e3,
            "copied_bytes": newest.copied_bytes,
        }
        return {f"{self.prefix}/{name}": value for name, value in metrics.items()}
