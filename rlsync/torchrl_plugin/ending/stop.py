"""Stop: ends a training from any thread, within a deadline, with nothing left behind."""

from __future__ import annotations

import logging
import os
import threading
from multiprocessing.process import BaseProcess

from torchrl.collectors import BaseCollector
from torchrl.trainers import Trainer

from rlsync.core.errors import AdoptionTimeout, BoardClosed, RlsyncError, WorkerLost
from rlsync.core.user_input import check_timeouts
from rlsync.sync.processes import StopsWaiting
from rlsync.torchrl_plugin.collectors.board import BoardEndpoint
from rlsync.torchrl_plugin.collectors.choose import endpoint_of
from rlsync.torchrl_plugin.compat import collectors, trainers
from rlsync.torchrl_plugin.compat.distributed import Remote
from rlsync.torchrl_plugin.compat.endings import FramesMadeHere, LocalCollector
from rlsync.torchrl_plugin.ending.last_checkpoint import (
    ANSWER_WITHIN_S,
    CollectorState,
    LastCheckpoint,
    save_before_the_end,
)
from rlsync.torchrl_plugin.hooks.misuse import require

_log = logging.getLogger(__name__)

#: how long the processes may take to leave at the end, seconds; then they are killed
LEAVE_WITHIN_S = 5.0


class Stop:
    """Ends a training from any thread, within a deadline, and leaves no worker behind.

    Use it around ``trainer.train()``, and call it from wherever the end is decided: another thread, a signal
    handler, a hook. The first call asks the trainer to stop after the batch that it works on; further calls,
    also from other threads, do nothing. If the training has not ended ``within_s`` seconds later, because
    workers are stopped, hang in an environment, or are dead, the worker processes are killed. So the learner
    waits no longer.

    What the learner waited for is lost then. Every batch that it has taken is in the replay buffer and in the
    counters, and a checkpoint of them is written where the trainer has a place for one
    (``save_trainer_file`` and ``checkpoint``). The state of the environments' transforms is left out if the
    workers do not answer.

    When the block ends, by this or by anything else, the workers are gone. An error of a lost worker that
    comes after a stop was asked for ends the block without an exception; :attr:`lost` has it. Every other
    exception passes through.

    A learner that works on a batch for longer than ``within_s`` finishes it: it is not interrupted. Register
    :class:`WatchWorkers` as well, so that workers are named if they fail before a stop. To resume, make the
    Stop before ``trainer.load_from_file``: it loads checkpoints that lack the state of workers.

    A thread cannot be killed. If an environment hangs in the learner's own thread (``Collector``), the
    training does not end. At the deadline the checkpoint is written nevertheless, and :attr:`hangs`, which is
    logged too, has the stack: end the program then, with ``os._exit`` or a signal. If it hangs in another
    thread (``AsyncBatchedCollector`` with threads, ``Collector.start``), the block ends as described, but
    Python waits for that thread when the program exits.

    Args:
        trainer: whose workers run.
        within_s: seconds from the first call until workers that hold the learner up are killed; ``None``
            waits for them as long as the trainer does.

    Raises:
        ConfigError: ``within_s`` is not above zero.

    Example:
        >>> with Stop(trainer, within_s=30.0) as stop:  # doctest: +SKIP
        ...     threading.Timer(3600.0, stop, ["an hour is over"]).start()
        ...     trainer.train()
        >>> Stop(None, within_s=0.0)
        Traceback (most recent call last):
        ...
        rlsync.core.errors.ConfigError: a timeout is a number of seconds above zero, got 0.0
          where  Stop(within_s=0.0)
          cure   for example 300.0; None waits for ever
    """

    def __init__(self, trainer: Trainer, within_s: float | None = 30.0) -> None:
        check_timeouts("Stop", within_s=within_s)
        require(Trainer, trainer, self)
        self.within_s = within_s
        self.why = ""  #: what the first call said
        self.lost: BaseException | None = None  #: the error of the workers that held the learner up
        self.saved: LastCheckpoint | None = None  #: the checkpoint that was written because of it
        self.hangs = ""  #: where the learner's own thread was at the deadline, if it made frames
        self._trainer = trainer
        self._state = CollectorState.of(trainer)
        self._lock = threading.RLock()  # a signal handler may interrupt a call
        self._asked = threading.Event()
        self._ended = threading.Event()
        self._deadline: threading.Thread | None = None
        self._made_here: FramesMadeHere | None = None
        self._learner = 0
        self._training = trainers.BeforeWorkersEnd(trainer, self._save_if_covered)

    @property
    def asked(self) -> bool:
        """Whether a stop was asked for."""
        return self._asked.is_set()

    def __call__(self, why: str = "stopped") -> None:
        """Ask the training to end. Returns at once; only the first call counts.

        Args:
            why: the reason, which the trainer keeps.
        """
        with self._lock:
            if self.asked or self._ended.is_set():
                return
            self._asked.set()
            self.why = why
            if self._state is not None:
                self._state.answer_within_s = ANSWER_WITHIN_S  # stopped workers do not hold it up
            self._trainer.request_stop(why)
            if self.within_s is not None:
                self._deadline = threading.Thread(
                    target=self._watch, name="rlsync-stop", daemon=True
                )
                self._deadline.start()

    def covers(self, error: BaseException) -> bool:
        """Whether the block ends without an exception although this error was raised in it.

        Args:
            error: it is covered if a stop was asked for before, and it says that workers are lost.
        """
        died = isinstance(error, RuntimeError) and collectors.says_a_worker_died(error)
        lost = (WorkerLost, AdoptionTimeout, BoardClosed, ConnectionError, EOFError)
        return self.asked and (died or isinstance(error, lost))

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait until the block around the training has ended, from another thread.

        Args:
            timeout_s: how long, seconds; ``None``: as long as it takes.

        Returns:
            Whether it has ended: then the workers are gone, and the checkpoint is written.
        """
        return self._ended.wait(timeout_s)

    def __enter__(self) -> Stop:
        self._training.__enter__()
        self._learner = threading.get_ident()
        collector = self._trainer.collector
        if isinstance(collector, LocalCollector):
            self._made_here = FramesMadeHere(collector, LEAVE_WITHIN_S, lambda: self.asked)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        ends_well = error is not None and self.covers(error)
        try:
            self._training.__exit__(kind, error, trace)
        finally:
            try:
                if ends_well:
                    trainers.ShutdownStage.of(self._trainer)()
            finally:
                collector = self._trainer.collector  # whatever state its workers are in
                if isinstance(collector, Remote):
                    quiet = {}
                else:
                    quiet = {"raise_on_error": False}
                collector.shutdown(timeout=LEAVE_WITHIN_S, **quiet)
                self._ended.set()
        if self._deadline is not None:
            self._deadline.join()
        return ends_well

    def _save_if_covered(self, error: BaseException) -> None:
        if self.covers(error):
            self.lost = error
            self.saved = save_before_the_end(self._trainer)

    def _watch(self) -> None:
        if self._ended.wait(self.within_s):
            return
        when = f"{self.within_s:g} s after a stop was asked for"
        if self._made_here is None:
            _end_waits(self._trainer.collector, when)
        elif not self._made_here.fail(_no_frames("what made them was killed", when)):
            self._made_here.while_waiting(self._learner, lambda: self._save_and_tell(when))

    def _save_and_tell(self, when: str) -> None:
        """The learner's thread hangs in an environment, or its batch takes long; the trainer rests."""
        assert self._made_here is not None, "it waits there"
        self.hangs = self._made_here.stacks(self._learner)
        self.saved = save_before_the_end(self._trainer)
        problem = "an environment of the learner's own process has not come back"
        cure = f"a thread cannot be ended: end the program (kill -9 {os.getpid()}), then resume the run"
        error = WorkerLost(problem, f"{when}; checkpoint: {self.saved}", cure)
        _log.error("%s\n%s", error, self.hangs)


def _end_waits(collector: BaseCollector, when: str) -> None:
    """Kill the workers that the learner may wait for, so that its wait ends with an error."""
    error = _no_frames("the workers were killed", when)
    if isinstance(collector, StopsWaiting):
        collector.stop_waiting(error)
    elif isinstance(collector, collectors.MultiCollector):
        collectors.fail_free_run(collector, error)
    for process in _processes(collector):
        try:
            _log.warning("worker process %s is killed, %s", process.pid, when)
            process.kill()
        except ValueError:  # closed already: the training has ended meanwhile
            continue


def _no_frames(so: str, when: str) -> WorkerLost:
    return WorkerLost(f"no frames came, so {so}", when, "resume the run")


def _processes(collector: BaseCollector) -> list[BaseProcess]:
    try:
        endpoint = endpoint_of(collector)
    except RlsyncError:
        return []
    if isinstance(endpoint, BoardEndpoint):
        return list(endpoint.publisher.collector.procs)
    if isinstance(collector, collectors.MultiCollector):
        return list(collector.procs)
    return []
