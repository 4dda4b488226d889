"""What publishing cost and how old the acting weights are, as metrics."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDictBase
from torchrl.trainers import Trainer, TrainerHookBase

from rlsync import SyncWeights


class SyncMetrics(TrainerHookBase):
    """Logs the version, the policy lag of the slowest worker and the duration of the newest publish.

    The lag is taken when a batch arrives, before the learner publishes again: it says how old the weights are
    that act. Right after a publish it would say at least 1 of every worker, however fast it adopts.

    Args:
        sync: the hook whose receipts are read.

    Raises:
        ConfigError: ``sync`` is bound to no trainer, or, at :meth:`register`, to another one.
    """

    def __init__(self, sync: SyncWeights) -> None:
        self.sync = sync
        self.lag_versions = 0  #: when the newest batch arrived

    def arrived(self, batch: TensorDictBase | None = None) -> None:
        """A batch arrived: take the lag."""
        self.lag_versions = self.sync.lag_versions()

    def __call__(self, batch: TensorDictBase | None = None) -> dict[str, Any] | None:
        version = self.sync.version
        if not self.sync.receipts:
            return None
        return {
            "sync/version": version,
            "sync/lag_versions": self.lag_versions,
            "sync/publish_ms": self.sync.receipts[-1].duration_s * 1e3,
        }

    def register(self, trainer: Trainer, name: str = "sync_metrics") -> None:
        """Log after every batch of this trainer."""
        self.sync.require_trainer(trainer, "SyncMetrics.register")
        trainer.register_op("pre_steps_log", self.arrived)
        trainer.register_op("post_steps_log", self)
        trainer.register_module(name, self)

    def state_dict(self) -> dict[str, Any]:
        """Nothing to keep."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing to load."""
