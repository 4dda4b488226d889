"""WatchWorkers: raises in a waiting learner when a worker is dead, stopped or hangs."""

from __future__ import annotations

from torchrl.collectors import AsyncBatchedCollector, BaseCollector
from torchrl.trainers import Trainer

from rlsync.core.errors import ConfigError
from rlsync.core.user_input import check_timeouts
from rlsync.torchrl_plugin.collectors.board import BoardEndpoint
from rlsync.torchrl_plugin.collectors.choose import endpoint_of
from rlsync.torchrl_plugin.compat import collectors
from rlsync.torchrl_plugin.ending.watch import Watch
from rlsync.torchrl_plugin.hooks.misuse import RegistersItself, require


class WatchWorkers(RegistersItself):
    """Raise in the learner, instead of waiting for ever, when a worker is dead, stopped or hangs.

    A BoardScheme watches the processes of its collector by itself, also in a loop without a trainer: for them
    this hook sets another timeout. An inference server on a board is watched from this hook on.

    If a worker is dead, a learner that waits for a batch, for frames in a replay buffer that the workers
    fill, for the lock of that buffer, or for the answer to a request raises WorkerLost at once. If a live one
    has not begun a rollout for ``silent_timeout_s`` seconds in which the learner waited, it raises
    AdoptionTimeout. A learner whose workers fill a replay buffer counts as waiting all the time, and looks at
    each ``update_policy_weights_()``, too. The other workers are ended first. The watch costs nothing while
    batches arrive. It cannot help when a worker is killed while it writes to a pipe, or while it counts the
    frames of a shared buffer.

    Args:
        silent_timeout_s: in seconds; longer than the longest rollout. ``None`` waits for ever for live
            workers.
        collector: whose workers; by default those of the trainer's own collector.

    Raises:
        ConfigError: the timeout is not above zero. At :meth:`register`: the collector has no workers on a
            board that could be watched, or has such a hook already.

    Example:
        >>> hook = WatchWorkers(silent_timeout_s=60.0)
        >>> # hook.register(trainer)
    """

    def __init__(
        self, silent_timeout_s: float | None = 300.0, *, collector: BaseCollector | None = None
    ) -> None:
        check_timeouts("WatchWorkers", silent_timeout_s=silent_timeout_s)
        self.silent_timeout_s = silent_timeout_s
        self.collector = collector

    def register(self, trainer: Trainer, name: str = "watch_workers") -> None:
        """Watch the workers of the collector.

        Args:
            trainer: the trainer.
            name: not used: the hook keeps nothing in checkpoints.
        """
        require(Trainer, trainer, self)
        if self.collector is None:
            watched = trainer.collector
        else:
            watched = self.collector
        endpoint = endpoint_of(watched)
        kinds = (collectors.MultiCollector, AsyncBatchedCollector)
        if not isinstance(endpoint, BoardEndpoint) or not isinstance(watched, kinds):
            raise ConfigError(
                "this collector has no workers on a board that WatchWorkers could watch",
                f"WatchWorkers.register; the collector is a {type(watched).__name__}",
                "pass weight_sync_schemes={'policy': BoardScheme()} to a process collector, or "
                "weight_sync=BoardScheme() to an AsyncBatchedCollector; leave it out for an UnrollCollector",
            )
        Watch.of(endpoint.publisher, watched).ask(self.silent_timeout_s)
