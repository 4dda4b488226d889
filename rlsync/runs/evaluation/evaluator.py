"""The Trainer hook that runs an evaluating process, logs its results, and ends a run by them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from multiprocessing import Pipe

from tensordict import TensorDictBase
from torchrl.collectors import BaseCollector
from torchrl.trainers import Trainer, TrainerHookBase

from rlsync import AdoptionTimeout, PublishError, WorkerLost
from rlsync.runs.actors.envs.specs import GymnasiumEnvs
from rlsync.runs.actors.player import without_memory
from rlsync.runs.actors.rollout_collector import RolloutCollector
from rlsync.runs.actors.supervision import Pauses, Restarts
from rlsync.runs.evaluation.process import (
    DONE,
    PLAYS,
    WRITTEN,
    Asked,
    Evaluated,
    EvaluationJob,
    Words,
    read_evaluations,
    run_evaluator,
)
from rlsync.seams import (
    EVALUATOR,
    BoardEndpoint,
    BoardHandle,
    BoardWatch,
    endpoint_of,
    families,
    ledger,
    processes,
    trainers,
)

_log = logging.getLogger(__name__)

_LEAVE_WITHIN_S = 5.0

#: when a wait at the end of a run says what it waits for
_TELL_AFTER_S = 2.0
_TELL_EVERY_S = 30.0

_LOOK_EVERY_S = 1.0  #: whether the process gives signs of life

_LEAVE_OUT = "train without evaluations (recipe.evaluation.every_frames=0)"


class Evaluator(TrainerHookBase):
    """Starts a process that evaluates one version at a time; logs ``eval/version`` and ``eval/return``.

    It is asked for the newest version when ``every_frames`` frames have been collected since it was asked
    last, there is a version with more optimizer steps, and it is free. With ``in_order`` the learner waits for
    it instead: before it asks again, before it writes a checkpoint, and at the end. So the versions that are
    evaluated, and what a ``target`` ends, are the same each time that the run is made. ``numbers`` is the ledger
    of the versions on the board.

    A process that was killed is started again, as ``restarts`` allows, and asked again. With a ``target`` the
    run ends by what it finds, so it also ends by an error if the process does: WorkerLost if it dies,
    AdoptionTimeout if it gives no sign of life for ``silent_timeout_s`` seconds. Without one the run goes on,
    and :attr:`failure` says it. The constructor waits until the process has made its first step, and raises
    the same errors.
    """

    def __init__(
        self,
        job: EvaluationJob,
        numbers: ledger.Ledger,
        start_method: str = "forkserver",
        *,
        every_frames: int = 1,
        in_order: bool = False,
        restarts: Restarts = Restarts(),  # noqa: B008 - it is frozen
        start_timeout_s: float = 300.0,
        silent_timeout_s: float | None = 300.0,
    ) -> None:
        self._job = replace(job, player=without_memory(job.player))
        self._numbers = numbers
        self._start_method = start_method
        self._every_frames = every_frames
        self._in_order = in_order
        self._pauses = Pauses[int](restarts)
        self._file = job.file
        self._read_bytes = self._logged = 0
        self._evaluations: list[Evaluated] = []
        #: Called, with the reason, when a version's mean greedy return reaches the target, if any.
        self.stop: Callable[[str], object] = lambda why: None
        self.target: float | None = None
        #: Why there are no evaluations any more, though the run goes on, or went on; empty: there are.
        self.failure = ""
        self.evaluations()  # an unreadable file is refused before anything runs
        if isinstance(job.env, GymnasiumEnvs):
            self._env = job.env.id
        else:
            self._env = str(job.env)
        self._silence = processes.Silence(silent_timeout_s)
        self._board = BoardWatch(*job.board.open())
        self._look_at = 0.0
        self._over = False
        self._trainer: Trainer | None = None
        self._frames = 0  # collected when the newest version was published
        self._asked: Asked | None = None  # for what, last
        self._ends = False
        self._told_slow = False
        self._start()
        self._await_start(start_timeout_s)

    def register(self, trainer: Trainer, name: str = "evaluator") -> None:
        """Register after what publishes."""
        self._trainer = trainer
        trainer.register_op("setup", self._note_frames)
        # Not at the end of an iteration: a run that goes on from its checkpoint asks for the same, then.
        trainer.register_op("pre_steps_log", self._ask_if_due)
        trainer.register_op("post_steps_log", self)
        trainer.register_op("shutdown", self._end)

    def __call__(self, batch: TensorDictBase | None = None) -> dict[str, float] | None:
        trainer = self._its_trainer
        self._note_frames()
        if self._in_order:
            is_last = trainer.collected_frames >= trainer.total_frames
            if not (is_last or self._is_due or trainers.saves_now(trainer)):
                self._look_at_process(trainer)
                return None
            self._await_result(trainer)
            if is_last:
                self.ask()
                self._await_result(trainer)
        logged = self._look_at_results()
        self._look_at_process(trainer)
        return logged

    @property
    def _its_trainer(self) -> Trainer:
        assert self._trainer is not None, "it was registered"
        return self._trainer

    def _note_frames(self) -> None:
        self._frames = self._its_trainer.collected_frames

    def _ask_if_due(self, batch: TensorDictBase | None = None) -> None:
        if self._is_due:
            self.ask()

    @property
    def _last(self) -> Asked | Evaluated | None:
        """The version that the process was asked for last, by this learner or by the one before it."""
        if self._asked is None and (evaluated := self.evaluations()):
            return evaluated[-1]
        return self._asked

    @property
    def _is_due(self) -> bool:
        return self._last is None or self._frames - self._last.frames >= self._every_frames

    @property
    def _is_free(self) -> bool:
        """Whether it has evaluated all that it was asked for."""
        if self._asked is None:
            return True
        evaluated = self.evaluations()
        return bool(evaluated) and evaluated[-1].version >= self._asked.version

    def ask(self) -> None:
        """Ask for the newest version, unless it has the weights of the last one, or the process is busy."""
        if self._over or not self._is_free:
            return
        version = self._board.newest
        known = self._numbers.known(version)
        steps = -1
        if known is not None and known.optim_steps is not None:
            steps = known.optim_steps
        last = self._last
        if last is not None and (last.version == version or 0 <= steps == last.optim_steps):
            return
        self._board.let_stay(version)
        self._asked = Asked(version, self._frames, steps)
        self._send(self._asked)

    def _send(self, words: Asked | None) -> None:
        with suppress(OSError):  # it has ended, and is asked again if another one takes its place
            self._pipe.send(words)

    def evaluations(self) -> list[Evaluated]:
        """Oldest first."""
        size = 0
        if self._file.exists():
            size = self._file.stat().st_size
        if size != self._read_bytes:  # else nothing was written since
            self._evaluations = read_evaluations(self._file)
            self._read_bytes = size
        return list(self._evaluations)

    def close(self) -> None:
        """End the process. A second call does nothing."""
        if self._process.is_alive():
            self._process.terminate()
            self._process.join(_LEAVE_WITHIN_S)
        families.end_group(self._process)
        self._process.join()

    def _start(self) -> None:
        """Start the process, and ask it for what another one has left."""
        self._heard: list[Words] = []
        self._pipe, theirs = Pipe()
        self._process = families.start_process(
            self._start_method, run_evaluator, (self._job, theirs), "rlsync evaluator"
        )
        theirs.close()
        if not self._is_free:
            self._send(self._asked)
        if self._ends:
            self._send(None)

    def _await_start(self, within_s: float) -> None:
        doing = "starting the evaluator"
        until = time.monotonic() + within_s
        try:
            while PLAYS not in self._hear(processes.LOOK_EVERY_S):
                # Asked once more after the exit is known: its last words may have arrived in between.
                if self._process.exitcode is not None and PLAYS not in self._hear():
                    raise self._lost(doing)
                if time.monotonic() >= until:
                    if processes.has_ended(self._process, dying=self._last_words() is not None):
                        raise self._lost(doing)
                    pid = self._process.pid
                    where = f"{doing} in {self._env}"
                    problem = f"the evaluator (pid {pid}) has not made its first step after {within_s:g} s"
                    cure = f"look where it hangs (py-spy dump --pid {pid}), give a longer start_timeout_s, or "
                    raise AdoptionTimeout(problem, where, cure + _LEAVE_OUT)
        except BaseException:
            self.close()
            raise

    def _hear(self, within_s: float = 0.0) -> list[Words]:
        """All that the process has told so far. Waits so long for something new."""
        try:
            while self._pipe.poll(within_s):
                words = self._pipe.recv()
                if words not in self._heard:
                    self._heard.append(words)
                within_s = 0.0
        except (EOFError, OSError):  # it ends
            self._process.join(within_s)
        return self._heard

    def _look_at_results(self) -> dict[str, float] | None:
        evaluations = self.evaluations()
        new = evaluations[self._logged :]
        self._logged = len(evaluations)
        if not new:
            return None
        for result in new:
            if self.target is not None and result.return_mean >= self.target:
                reached = f"greedy return {result.return_mean:.0f} of version {result.version}"
                self.stop(f"{reached} reached {self.target:g}")
        return {"eval/version": new[-1].version, "eval/return": new[-1].return_mean}

    def _look_at_process(self, trainer: Trainer) -> None:
        """Look whether the process has ended, or gives no sign of life.

        Raise an error where the run's end depends on it, else note it.
        """
        if self._over:
            return
        error: PublishError | None = None
        if self._process.exitcode is None and time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + min(_LOOK_EVERY_S, self._silence.timeout_s / 4)
            error = self._silent()
        # Asked after its silence: one that dies gives no sign of life either.
        if self._process.exitcode is not None:
            error = self._lost("evaluating")
        if error is None or DONE in self._hear() or self._starts_again():
            return
        self._over = True
        families.end_group(self._process)
        if self.target is not None and not trainers.asked_to_stop(trainer):
            error.where += f"; it judges recipe.target_return={self.target:g}"
            raise error
        evaluated = self.evaluations()
        if evaluated:
            after = f"after version {evaluated[-1].version}"
        else:
            after = "at all"
        self.failure = f"no evaluation {after}: {error.what}"
        _log.error("%s\n  where  %s\n  cure   %s", self.failure, error.where, error.cure)

    def _silent(self) -> AdoptionTimeout | None:
        status = self._board.status_of(EVALUATOR)
        if status is None or not self._silence.look({EVALUATOR: status.heartbeat_age_s}):
            return None
        if processes.has_ended(
            self._process, dying=not status.alive or self._last_words() is not None
        ):
            return None
        problem = f"the evaluator (pid {status.pid}, {status.state}) has not made a step "
        problem += f"for {self._silence.timeout_s:g} s, with version {status.adopted_version}"
        if (words := self._last_words()) is not None:
            problem += f", nor ended since it failed: {words.what}"
        cure = (
            f"find out what stopped it, or where it hangs (py-spy dump --pid {status.pid}); if a step takes "
            f"that long, give a longer collector.silent_timeout_s; or {_LEAVE_OUT}"
        )
        return AdoptionTimeout(problem, f"evaluating in {self._env}", cure)

    def _lost(self, doing: str) -> WorkerLost:
        """The error of a process that has ended: how, and why in its own words."""
        code = self._process.exitcode
        assert code is not None, "it has ended"
        problem = f"the evaluator (pid {self._process.pid}) {processes.ending(code)}"
        where = f"{doing} in {self._env}"
        cure = f"look who ended it (out of memory?), or {_LEAVE_OUT}"
        if (last := self._last_words()) is not None:
            problem = f"{problem}: {last.what}"
            if last.where:
                where = f"{where}; {last.where}"
            cure = last.cure or f"look at its traceback above, or {_LEAVE_OUT}"
        return WorkerLost(problem, where, cure)

    def _last_words(self) -> Words | None:
        """Why the process ends, if it has told."""
        for words in self._hear():
            if words not in (PLAYS, WRITTEN, DONE):
                return words
        return None

    def _starts_again(self) -> bool:
        """Whether another process takes the place of one that was killed, or has done so."""
        code = self._process.exitcode
        if code is None or code >= 0:  # an error of its own would come again
            return False
        if EVALUATOR not in self._pauses.due:
            families.end_group(self._process)
            pause_s = self._pauses.note_end(EVALUATOR)
            if pause_s is None:
                return False
            ended = f"the evaluator (pid {self._process.pid}) was {processes.ending(code)}"
            _log.warning("%s; another one takes its place in %g s", ended, pause_s)
        if time.monotonic() >= self._pauses.due[EVALUATOR]:
            del self._pauses.due[EVALUATOR]
            self._start()
        return True

    def _await_result(self, trainer: Trainer) -> None:
        """Wait until it has evaluated what it was asked for, or cannot any more."""
        asked = self._asked
        if asked is None:
            return
        waited = self._await(
            trainer, lambda: self._is_free, f"version {asked.version} is evaluated"
        )
        if waited >= _TELL_AFTER_S and not self._told_slow and asked.frames < trainer.total_frames:
            self._told_slow = True
            _log.warning(
                "training waited %.0f s for the evaluation of version %d: one takes longer than the frames "
                "between two (this is told once)\n  where  recipe.evaluation\n  cure   give a larger "
                "every_frames, or fewer episodes; with collector.lag=null versions are skipped instead",
                *(waited, asked.version),
            )

    def _end(self) -> None:
        """End the process; where all frames were collected, after it has evaluated the last version."""
        trainer = self._its_trainer
        try:
            if trainer.collected_frames >= trainer.total_frames and not self._over:
                self._await_result(trainer)
                self.ask()
                self._ends = True
                self._send(None)
                self._await(trainer, lambda: DONE in self._hear(), "the last version is evaluated")
                if not trainers.asked_to_stop(trainer):
                    self._look_at_results()
        finally:
            self.close()

    def _await(self, trainer: Trainer, is_done: Callable[[], bool], until: str) -> float:
        """Wait for the process, but not while the run is asked to stop. Returns the seconds."""
        began = time.monotonic()
        tell_at = began + _TELL_EVERY_S
        if trainer.collected_frames >= trainer.total_frames:
            tell_at = began + _TELL_AFTER_S  # nothing else goes on
        while not (self._over or trainers.asked_to_stop(trainer) or is_done()):
            if self._process.exitcode is None:
                self._hear(processes.LOOK_EVERY_S)
            else:  # its end of the pipe is closed
                time.sleep(processes.LOOK_EVERY_S)
            self._look_at_process(trainer)
            if time.monotonic() < tell_at:
                continue
            tell_at = time.monotonic() + _TELL_EVERY_S
            if (status := self._board.status_of(EVALUATOR)) is not None:
                plays = f"the evaluator (pid {status.pid}, {status.state}) plays version {status.adopted_version}"
                waited = f"{time.monotonic() - began:.0f} s so far; Ctrl-C leaves it out"
                _log.warning("waiting until %s: %s, %s", until, plays, waited)
        return time.monotonic() - began


def board_of(collector: BaseCollector) -> BoardHandle | None:
    """A board of this machine with every version that a collector's workers get; None if there is none."""
    if isinstance(collector, RolloutCollector):
        return collector.board_here()
    endpoint = endpoint_of(collector)
    if isinstance(endpoint, BoardEndpoint):
        handle = endpoint.publisher.transport.handle
        if isinstance(handle, BoardHandle):
            return handle
    return None


def evaluations_ended(trainer: Trainer) -> str | None:
    """Why a trainer's evaluator has ended before the run; None: it has not, or there is none."""
    for hook in trainers.operations(trainer):
        if isinstance(hook, Evaluator) and hook.failure:
            return hook.failure
    return None
