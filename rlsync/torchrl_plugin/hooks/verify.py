"""VerifySync: checks that the workers act with the published weights."""

from __future__ import annotations

import logging
import time
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from torchrl.trainers import Trainer

from rlsync.core.errors import ConfigError, PublishError
from rlsync.core.trigger import Counters, Every, Trigger
from rlsync.core.user_input import check_choice, check_timeouts
from rlsync.sync.sample import Judgement
from rlsync.sync.verification import Deviation, Found, Verification
from rlsync.torchrl_plugin.compat.trainers import let_it_be_absent
from rlsync.torchrl_plugin.hooks.logs import Logs
from rlsync.torchrl_plugin.hooks.misuse import no_trainer, refuse_arguments
from rlsync.torchrl_plugin.hooks.sync_weights import SyncWeights

Action = Literal["raise", "log"]

_BATCHES_TO_ANSWER = 2
_LONG_LOOK_S = 0.002
_SHARE_OF_LOOKS = 0.05  #: of the time that long looks may take, while workers have not answered yet
_SHARE = 0.005  #: of the time, which comparisons of outputs may take by default

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Check:
    """A question that not every worker has answered yet."""

    version: int  #: the lowest one that counts
    asked_at: float  #: or published, if that was later
    batches: int = 0  #: since then
    rests_until: float = 0.0  #: answers are not looked for before


class VerifySync(Logs):
    """Compare the weights that each worker acts with against the published ones, while training goes on.

    When the trigger is due, the hook asks the workers. A worker answers at the end of its first rollout with
    the newest version or a later one. For each destination it computes digests of the live tensors:

    - of the parameters after that rollout, so that every overwrite since the adoption shows;
    - of the buffers and the extra state before that rollout, if the worker adopted them for it. They are
      compared as they arrived, because forward() may change them.

    Excluded leaves are not compared. An in-process collector is examined when the next version is published,
    and again after the rollout with that version; leaves that share memory with the learner are not
    compared. Nothing waits for the answers. An answer costs a worker one pass over its weights. A check costs
    the learner one pass for each version that is published until all answers have arrived.

    The hook names each worker that acts with other weights. It also names each worker that has not answered
    after ``timeout_s`` seconds and two more batches: such a worker is stopped, or never adopts. It does not
    name dead workers; see :meth:`SyncWeights.wait` and ``board.status()`` for those.

    Once in each iteration of the trainer it logs, under ``prefix``:

    - ``checks`` and ``deviations``: totals since the beginning;
    - ``answered``: the workers that have answered the current check;
    - ``whole``: those of them whose answers covered buffers and extra state.

    Args:
        sync: the hook that publishes, bound to the same trainer.
        when: the trigger, asked after each batch; by default every ten batches. A check that still waits
            for answers delays the next one.
        action: ``"raise"`` raises a PublishError; ``"log"`` writes an error to Python's logging and goes on.
        timeout_s: how many seconds a worker may take to answer; longer than its longest rollout.
        prefix: the beginning of the logged names.
        behaviour: when a check also compares what the policies compute: a trigger, or by default, the share
            of the time that such checks may take, 0.5 %. The time of each is measured, in the learner and in
            the slowest worker, and the next one waits as long as the share demands. None never compares.
            A check waits for the next publish, at which the learner copies its weights. A worker makes one
            more call of its policy, without exploration, on an input of its rollout. The learner calls the
            source on the same input, in the worker's modes, with those weights, and with those of the version
            before. Outputs that differ from the first are a deviation. Where the others agree as well, the
            comparison had no power. ``outputs_held`` and ``outputs_without_power`` are logged, and
            :attr:`behaviour_held` has the newest version for which it held, and
            :attr:`behaviour_held_time_s` when that was seen.

    Raises:
        ConfigError: an argument is wrong. At :meth:`register`: the workers of the collector cannot be asked,
            another VerifySync asks them already, or ``sync`` is bound to another trainer.
        PublishError: in the trainer's loop, with ``action="raise"``. Names worker, pid, destination and
            version.

    Example:
        >>> from rlsync import Every, SyncWeights
        >>> sync = SyncWeights({"policy": "loss_module.actor_network"})
        >>> hook = VerifySync(sync, when=Every(100, "batches"))
        >>> # after the SyncWeights: hook.register(trainer)
    """

    def __init__(
        self,
        sync: SyncWeights,
        when: Trigger | None = None,
        *,
        action: Action = "raise",
        timeout_s: float = 60.0,
        prefix: str = "verify_sync",
        behaviour: Trigger | float | None = _SHARE,
    ) -> None:
        check_choice("action", action, get_args(Action), f"VerifySync(action={action!r})")
        check_timeouts("VerifySync", may_be_none=False, timeout_s=timeout_s)
        if when is None:
            when = Every(10, "batches")
        if not isinstance(when, Trigger):
            problem = f"'when' is a trigger, got {type(when).__name__}"
            cure = "for example when=Every(100, 'batches')"
            raise ConfigError(problem, f"VerifySync(when={when!r})", cure)
        share = isinstance(behaviour, float) and 0.0 < behaviour < 1.0
        if behaviour is not None and not share and not isinstance(behaviour, Trigger):
            problem = f"'behaviour' is a trigger or a share of the time below 1, got {behaviour!r}"
            cure = f"for example behaviour=Every(60, 'seconds'), or behaviour={_SHARE}"
            raise ConfigError(problem, "VerifySync(behaviour=...)", cure)
        super().__init__(sync, prefix)
        self.when = when
        self.action = action
        self.timeout_s = timeout_s

        # of comparisons of outputs
        self.behaviour = behaviour
        #: the newest version whose outputs were compared, and held
        self.behaviour_held: int | None = None
        #: when that was seen, in seconds since the epoch
        self.behaviour_held_time_s: float | None = None
        self._compared: tuple[Judgement, ...] = ()
        self._rests_until = 0.0  #: no comparison begins before, if the time decides

        # of all checks, and of the one that is under way
        self.checks = 0
        self.deviations: list[Deviation] = []
        self._verification: Verification | None = None
        self._found: Found | None = None
        self._open: _Check | None = None
        self._last = Counters()
        self._last_compared = Counters()

    @property
    def uncompared(self) -> tuple[str, ...]:
        """What the last comparison of outputs could not compare, and why."""
        reasons: dict[str, None] = {}
        for judgement in self._compared:
            reasons |= dict.fromkeys(judgement.uncompared)
        return tuple(reasons)

    @property
    def untold(self) -> tuple[str, ...]:
        """What the last comparison of outputs could not compare, or compared without power, and why."""
        reasons: dict[str, None] = {}
        for judgement in self._compared:
            reasons |= dict.fromkeys(judgement.untold)
        return tuple(reasons)

    def register(self, trainer: Trainer, name: str = "verify_sync") -> None:
        self._require(trainer)
        self._verification = self.sync.bound.endpoint.verification()
        self._enrol(trainer, name)
        let_it_be_absent(trainer, self)
        trainer.register_op("post_steps", self)
        if isinstance(self.behaviour, float):
            self._verification.watch()

    def __call__(self, *arguments: object) -> None:
        """Read the answers that have arrived, and ask again if the trigger is due."""
        if self._verification is None:
            raise no_trainer(self)
        refuse_arguments(self, arguments)
        if self._open is not None:
            self._hear(self._verification, self._open)
        now = self.sync.counters()
        if self._open is None and self._wants_to_compare(now):
            self._verification.watch()
        compares = self._verification.watched
        if self._open is None and (compares or self.when.due(self._last, now)):
            self._last = now
            judge = None
            if compares:
                self._last_compared = now
                judge = self.sync.bound.judge
            version = self._verification.ask(judge)
            self._open = _Check(version, time.monotonic())

    def _wants_to_compare(self, now: Counters) -> bool:
        match self.behaviour:
            case None:
                return False
            case Trigger():
                return self.behaviour.due(self._last_compared, now)
        return time.monotonic() >= self._rests_until

    def _hear(self, verification: Verification, check: _Check) -> None:
        check.batches += 1
        if self.sync.version < check.version:
            check.asked_at = time.monotonic()
            check.batches = 0
        now_s = time.monotonic()
        late = now_s - check.asked_at > self.timeout_s
        if now_s < check.rests_until and not late:
            return
        began_s = time.thread_time()
        answers = verification.hear()
        heard_s = time.thread_time() - began_s
        if heard_s > _LONG_LOOK_S:  # of many workers
            check.rests_until = now_s + heard_s / _SHARE_OF_LOOKS
        self._found = answers
        given_up = answers.waiting and late and check.batches >= _BATCHES_TO_ANSWER
        if not (answers.done or given_up):
            return

        # The check is over. Do its outputs agree, and when may the next ones be compared?
        self._open = None
        self.checks += 1
        if answers.behaviour:
            self._compared = answers.behaviour
            if isinstance(self.behaviour, float):
                self._rests_until = time.monotonic() + answers.comparing_s / self.behaviour
            if all(judgement.held and not judgement.wrong for judgement in answers.behaviour):
                self.behaviour_held = check.version
                self.behaviour_held_time_s = time.time()

        # A worker that has not answered deviates as one does that acts with other weights.
        silent = (
            f"no rollout with version {check.version} or a later one has ended for {self.timeout_s:g} s "
            f"and {check.batches} batches"
        )
        deviations = list(answers.deviations)
        for worker in answers.waiting:
            deviations.append(Deviation(silent, worker))
        self.deviations += deviations
        if deviations:
            self._report_deviations(deviations)

    def _report_deviations(self, deviations: list[Deviation]) -> None:
        problems: dict[str, None] = {}
        places: list[str] = []
        cures: dict[str, None] = {}
        for deviation in deviations:
            problems[deviation.what] = None
            places.append(deviation.where)
            cures[deviation.cure] = None
        error = PublishError("; ".join(problems), "; ".join(places), "; ".join(cures))
        if self.action == "raise":
            raise error
        _log.error("%s", error)

    def _metrics(self) -> dict[str, float]:
        metrics: dict[str, float] = {"checks": self.checks, "deviations": len(self.deviations)}
        if self._found is not None:
            metrics |= {"answered": self._found.answered, "whole": self._found.whole}
        if self._compared:
            metrics["outputs_held"] = 0
            metrics["outputs_without_power"] = 0
            for judgement in self._compared:
                metrics["outputs_held"] += judgement.held
                metrics["outputs_without_power"] += len(judgement.powerless)
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Phase and count, for the trainer's checkpoint. A resumed run starts an unfinished check again."""
        return {"checks": self.checks} | {f"last_{k}": v for k, v in asdict(self._last).items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the count and the trigger's phase of a checkpoint.

        Args:
            state_dict: what :meth:`state_dict` returned; empty if the checkpoint was written without this
                hook.
        """
        if not state_dict:
            return
        self.checks = int(state_dict["checks"])
        last = {name.removeprefix("last_"): value for name, value in state_dict.items()}
        self._last = Counters.from_dict(last)
        self._last_compared = self._last
        self._open = None
