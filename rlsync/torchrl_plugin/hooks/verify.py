"""VerifySync: proof that the workers act with what was published."""

from __future__ import annotations

import logging
import time
from typing import Any, Literal, get_args

from torchrl.trainers import TrainerHookBase

from rlsync.core.errors import ConfigError, PublishError
from rlsync.core.trigger import Counters, Every, Trigger
from rlsync.torchrl_plugin import compat
from rlsync.torchrl_plugin.check import Check, Deviation, Found
from rlsync.torchrl_plugin.hooks.sync_weights import SyncWeights

Action = Literal["raise", "log"]

_BATCHES_TO_ANSWER = 2

_log = logging.getLogger(__name__)


class VerifySync(TrainerHookBase):
    """Compare what each worker acts with against what was published, while training goes on.

    When the trigger is due the workers are asked. Each answers at the end of the first rollout that it
    makes with the newest version or a later one, from the live tensors of the modules that act, for each
    destination:

    - its parameters, after that rollout: whatever overwrote them since the adoption shows;
    - its buffers and extra state, before that rollout, if it adopted them for it: they are compared as
      they arrived, since forward() may change them.

    Leaves that no publish brings any more (those that a route excludes) are left out. An in-process
    collector is looked at when the next version is published, and after the rollout with it; what it
    shares with the learner is not compared with itself. Nothing waits: collection goes on, an answer
    costs a worker one reading of its weights, and a check costs the learner one reading of them for each
    version that is published until the answers are in.

    A worker that acts with anything else is named, and so is one that has not answered after
    ``timeout_s`` seconds and two more batches: it is stopped, or never adopts. Dead workers are not:
    :meth:`SyncWeights.wait` and ``board.status()`` tell of them.

    Logs, under ``prefix``, once an iteration of the trainer: ``checks`` and ``deviations`` since the
    beginning, and for the present check ``answered``, the workers that have answered, and ``whole``,
    those whose answers covered buffers and extra state.

    Args:
        sync: the hook that publishes, bound to the same trainer.
        when: the trigger; by default every ten batches. Asked after each batch; a check that is still
            waiting for answers delays the next.
        action: ``"raise"`` a PublishError, or ``"log"`` an error to Python's logging and go on.
        timeout_s: how long a worker may take to answer; longer than its longest rollout.
        prefix: what the names of logged values begin with.

    Raises:
        ConfigError: an argument is wrong; at :meth:`register`, when the workers of the collector cannot
            be asked, or ``sync`` is bound to another trainer.
        PublishError: in the trainer's loop, with ``action="raise"``: names worker, pid, destination and
            version.

    Example:
        >>> from rlsync import Every, SyncWeights
        >>> sync = SyncWeights({"policy": "loss_module.actor_network"})
        >>> hook = VerifySync(sync, when=Every(100, "batches"))
        >>> # hook.register(trainer), after the SyncWeights was registered
    """

    def __init__(
        self,
        sync: SyncWeights,
        when: Trigger | None = None,
        *,
        action: Action = "raise",
        timeout_s: float = 60.0,
        prefix: str = "verify_sync",
    ) -> None:
        if action not in get_args(Action):
            raise ConfigError(
                f"no action {action!r}",
                f"VerifySync(action={action!r})",
                f"choose one of: {', '.join(get_args(Action))}",
            )
        if when is not None and not isinstance(when, Trigger):
            raise ConfigError(
                f"'when' is a trigger, got {type(when).__name__}",
                f"VerifySync(when={when!r})",
                "for example when=Every(100, 'batches')",
            )
        self.sync = sync
        self.when = Every(10, "batches") if when is None else when
        self.action = action
        self.timeout_s = timeout_s
        self.prefix = prefix
        self.checks = 0
        self.deviations: list[Deviation] = []
        self._check: Check | None = None
        self._found: Found | None = None
        self._open = False
        self._version = 0
        self._asked_at = 0.0
        self._batches_since = 0
        self._last = Counters()

    def register(self, trainer: compat.Trainer, name: str = "verify_sync") -> None:
        """Watch this trainer's workers; register after the SyncWeights.

        Args:
            trainer: the trainer.
            name: under which the hook is kept in checkpoints.
        """
        self.sync.require_trainer(trainer, "VerifySync.register")
        self._check = self.sync.check()
        trainer.register_op("post_steps", self)
        trainer.register_op("post_steps_log", self._report)
        trainer.register_module(name, self)

    def __call__(self) -> None:
        """Hear the answers that have come in, and ask when it is due."""
        if self._check is None:
            raise ConfigError("this hook has no trainer yet", "VerifySync", "call hook.register(trainer)")
        if self._open:
            self._hear(self._check)
        now = self.sync.counters()
        if not self._open and self.when.due(self._last, now):
            self._last, self._version = now, self.sync.version
            self._open, self._asked_at, self._batches_since = True, time.monotonic(), 0
            self._check.ask()

    def _hear(self, check: Check) -> None:
        self._batches_since += 1
        self._found = found = check.hear()
        late = time.monotonic() - self._asked_at > self.timeout_s
        given_up = found.waiting and late and self._batches_since >= _BATCHES_TO_ANSWER
        if not (found.done or given_up):
            return
        self._open = False
        self.checks += 1
        wrong = [*found.deviations, *(self._silent(worker) for worker in found.waiting)]
        self.deviations += wrong
        if wrong:
            self._tell(wrong)

    def _silent(self, worker: str) -> Deviation:
        return Deviation(
            f"no rollout with version {self._version} or a later one has ended for {self.timeout_s:g} s "
            f"and {self._batches_since} batches",
            worker,
        )

    def _tell(self, wrong: list[Deviation]) -> None:
        error = PublishError(
            "; ".join(dict.fromkeys(deviation.what for deviation in wrong)),
            "; ".join(deviation.where for deviation in wrong),
            "look for what writes to the worker's weights or keeps it from adopting; restart the worker",
        )
        if self.action == "raise":
            raise error
        _log.error("%s", error)

    def _report(self, batch: object = None) -> dict[str, Any]:
        told: dict[str, Any] = {"checks": self.checks, "deviations": len(self.deviations)}
        if self._found is not None:
            told |= {"answered": self._found.answered, "whole": self._found.whole}
        return {f"{self.prefix}/{name}": value for name, value in told.items()}

    def state_dict(self) -> dict[str, Any]:
        """Phase and count, for the trainer's checkpoint; a check under way is begun anew."""
        return {"checks": self.checks} | {f"last_{k}": v for k, v in self._last.to_dict().items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on in phase.

        Args:
            state_dict: what :meth:`state_dict` returned.
        """
        self.checks = int(state_dict["checks"])
        self._last = Counters.from_dict({k.removeprefix("last_"): v for k, v in state_dict.items()})
        self._open = False
