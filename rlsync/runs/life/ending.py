"""The end of a run, whichever way it comes: Ctrl-C, a signal or an error; a last checkpoint, a note."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path

from torchrl.checkpoint import Checkpoint
from torchrl.trainers import Trainer

from rlsync import NotFinite, RlsyncError, SyncWeights
from rlsync.runs.evaluation.evaluator import evaluations_ended
from rlsync.runs.life.output import EXIT_FAILED, EXIT_INTERRUPTED, drop_unread, exit_status
from rlsync.runs.life.state import Ended, at, begin
from rlsync.runs.recipes.run_files import CHECKPOINT
from rlsync.runs.recipes.trainer import INTERRUPTED
from rlsync.seams import families, last_checkpoint, trainers

_AFTER_SIGKILL_S = 1.0  # how long processes that were killed may take to end, all together

LIFE_OVER = "life_frames collected"  #: how a life ends that another one follows at once


class Ending:
    """Leaves in the run's folder how the run ended; see :class:`Ended`. Made by :meth:`of`."""

    def __init__(self, run_dir: Path, began_s: float) -> None:
        self._run_dir = run_dir
        self._began_s = began_s
        self._how = "failed"
        self._status = EXIT_FAILED
        self._trainer: Trainer | None = None
        self._sync: SyncWeights | None = None

    @classmethod
    @contextmanager
    def of(
        cls, run_dir: Path, interrupts: Interrupts, began_s: float | None = None
    ) -> Iterator[Ending]:
        """Inside, a run goes on in this folder; whatever ends it is written there.

        ``began_s``: when its first life in this process began, on the monotonic clock; None: now.
        """
        begin(run_dir)
        ending = cls(run_dir, time.monotonic() if began_s is None else began_s)
        try:
            with interrupts.raised():
                yield ending
        except BaseException as error:
            ending._written(error)
            raise
        if ending._how != LIFE_OVER:
            ending._written(None)

    def watch(self, trainer: Trainer, sync: SyncWeights) -> None:
        self._trainer = trainer
        self._sync = sync

    def reached(self, how: str, status: int) -> int:
        """Note that the run came to an end without an error, and return ``status``."""
        self._how = how
        self._status = status
        return status

    @contextmanager
    def saving(self, unless: Callable[[BaseException], bool]) -> Iterator[None]:
        """If what is inside raises, the checkpoint is written once more, unless somebody else does so."""
        trainer = self._trainer
        assert trainer is not None

        def save(error: BaseException) -> None:
            # StopIfNotFinite has saved, and its error says so
            if isinstance(error, NotFinite) or unless(error):
                return
            self.tell(last_checkpoint.save_before_the_end(trainer))
            self._written(error)  # Ray may end this process before it has shut down

        with trainers.BeforeWorkersEnd(trainer, save):
            yield

    def tell(self, saved: last_checkpoint.LastCheckpoint) -> None:
        """Say on stderr what became of the last checkpoint."""
        assert self._trainer is not None
        line = f"no checkpoint of the end: {saved.why_not}"
        if saved.path is not None:
            frames = f"{self._trainer.collected_frames:,} frames"
            line = f"checkpoint {saved.path}: resume={self._run_dir} goes on from {frames}"
        print(line, file=sys.stderr, flush=True)

    def _written(self, error: BaseException | None) -> None:
        how = self._how
        status = self._status
        problem = ""
        if isinstance(error, RlsyncError):
            how = "failed"
            status = exit_status(error)
            problem = str(error)
        elif isinstance(error, KeyboardInterrupt):
            how = INTERRUPTED
            status = EXIT_INTERRUPTED
        elif error is not None:
            how = "failed"
            status = EXIT_FAILED
            problem = f"{type(error).__name__}: {error}"
        seconds = time.monotonic() - self._began_s
        ended = Ended(how, at(time.time()), status, error=problem, seconds=seconds)
        if self._trainer is not None:
            ended = replace(
                ended,
                frames=self._trainer.collected_frames,
                evaluations_ended=evaluations_ended(self._trainer),
            )
        if self._sync is not None:
            ended = replace(ended, version=self._sync.version, run_id=self._sync.ledger.run_id)
        checkpoint = self._run_dir / CHECKPOINT
        if Checkpoint.is_checkpoint(checkpoint):
            ended = replace(ended, checkpoint=str(checkpoint))
        ended.write(self._run_dir)


#: The signals that end a run in good order: Ctrl-C, Ctrl-\\, a closed terminal, and what schedulers send.
SIGNALS = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)

_END = 0  #: in the pipe of signal numbers: there come no more


class Interrupts:
    """Calls the attached stop at the first of :data:`SIGNALS`, and kills all at a second one.

    So it is inside :meth:`caught`. SIGHUP never kills: shell, kernel and systemd may all send it. A separate
    thread watches, so it works while the main thread waits for a worker in a call that Python cannot
    interrupt.

    A signal that the host program handles itself asks for the stop, too, and never kills. Its handler is
    called at the end: then the checkpoint is written that it may want to go on from.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None  #: the first one
        self._within_s: float | None = None  # how long the attached stop may take
        self._stop: Callable[[str], object] = str  # which does nothing
        self._came = False  # one of this process's own
        self._is_called = False  # whether a program called this run, and lives on after it
        self.abandoned = False  #: whether a second Ctrl-C came to such a program
        self._raises = False  # whether the next SIGINT is a KeyboardInterrupt
        self._in_run = False  # and whether the main thread is where it may be raised
        self._others: set[int | None] = (
            set()
        )  # the processes that such a program had started before
        self._hosts: set[signal.Signals] = set()  # that the host program handles itself
        self._for_host: dict[signal.Signals, None] = {}  # those of them that came, in order

    @classmethod
    @contextmanager
    def caught(
        cls, parent: Connection | None = None, *, is_called: bool = False
    ) -> Iterator[Interrupts]:
        """Inside, the signals are caught; afterwards they do what they did before.

        If a ``parent`` says anything through its pipe, or dies, that is a first SIGTERM, too. Signals of this
        process's own are counted apart: a terminal and job schedulers send them to parent and child.

        ``is_called``: a program called this run, such as a notebook, which must live on. A second Ctrl-C ends
        the processes of the run alone, and raises KeyboardInterrupt. In a thread no signal is caught: Python
        delivers them to the main thread, whose program decides what they mean.
        """
        it = cls()
        it._is_called = is_called
        if threading.current_thread() is not threading.main_thread():
            it._listen_to(parent)
            yield it
            return
        it._others = {child.pid for child in multiprocessing.active_children()}
        read_fd, write_fd = os.pipe()
        os.set_blocking(write_fd, False)
        fd_before = signal.set_wakeup_fd(write_fd)
        before = {}
        for number in SIGNALS:
            handler = signal.getsignal(number)
            if number == signal.SIGHUP and handler is signal.SIG_IGN:  # by nohup
                continue
            if handler is None:  # set outside of Python, which cannot give it back
                continue
            before[number] = handler
            if is_the_hosts(handler):
                it._hosts.add(number)
        for number in before:
            signal.signal(number, it._handle)
        thread = threading.Thread(
            target=it._watch, args=(read_fd,), name="rlsync-ctrl-c", daemon=True
        )
        thread.start()
        it._listen_to(parent)
        try:
            yield it
        finally:
            # not the pipe's end: a forked process may hold it open
            os.write(write_fd, bytes([_END]))
            thread.join()
            for number, handler in before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(fd_before)
            os.close(write_fd)
            os.close(read_fd)
            for number in it._for_host:
                signal.raise_signal(number)

    @contextmanager
    def raised(self) -> Iterator[None]:
        """Inside, and nowhere else, a second Ctrl-C is a KeyboardInterrupt if a program called this run.

        So it interrupts neither what is written at the end nor what gives the signals back. What the run
        raises because its processes have been ended becomes one, too.
        """
        self._in_run = True
        try:
            yield
        except Exception as error:
            if self.abandoned:
                raise KeyboardInterrupt from error
            raise
        finally:
            self._in_run = False

    @contextmanager
    def held(self) -> Iterator[None]:
        """Processes started inside never receive these signals: they inherit what this thread blocks.

        A job scheduler sends SIGTERM to all of a job. Ignoring them would lose one that comes meanwhile.
        """
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # its start unblocks some
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _handle(self, number: int, frame: object) -> None:
        """Python calls this in the main thread; :meth:`_watch` hears of the signal by itself."""
        if self._raises and self._in_run and number == signal.SIGINT:
            self._raises = False
            raise KeyboardInterrupt

    def how(self) -> str:
        if self.signal == signal.SIGINT:
            return INTERRUPTED
        return "terminated"

    def exit_status(self) -> int:
        """0, or what shells say of a program that the first signal has ended."""
        if self.signal is None:
            return 0
        return 128 + self.signal

    def attach(self, stop: Callable[[str], object], within_s: float | None = None) -> None:
        """From now on the first signal asks for this stop, which takes ``within_s`` seconds at most."""
        self._stop = stop
        self._within_s = within_s
        if self.signal is not None:
            stop(INTERRUPTED)

    def _watch(self, read_fd: int) -> None:
        """Read signals from the pipe.

        Python's C handler writes the number of every signal to it. This thread alone lets those in that a
        sweep holds back in the processes of its jobs.
        """
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        while numbers := os.read(read_fd, 64):
            for number in numbers:
                if number == _END:
                    return
                if number in SIGNALS:
                    self._on_signal(signal.Signals(number))

    def _on_signal(self, number: signal.Signals) -> None:
        first = not self._came
        self._came = True
        if number in self._hosts:
            self._for_host[number] = None
        kills = number != signal.SIGHUP and number not in self._hosts
        if self.signal is not None and (first or not kills):  # the parent came before the first
            return
        if self.signal is not None and self._is_called and number == signal.SIGINT:
            self._abandon()
            return
        if self.signal is not None:
            kill_everything(128 + number)
        self.signal = number
        killing = (number, signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
        first_killing = next(
            each for each in killing if each != signal.SIGHUP and each not in self._hosts
        )
        name = first_killing.name
        if first_killing == signal.SIGINT:
            name = "Ctrl-C"
        limit = ""
        if self._within_s is not None:
            limit = f", or in {self._within_s:g} s"
        drop_unread()  # the terminal may be closed
        again = "kills"
        if self._is_called and first_killing == signal.SIGINT:
            again = "ends it at once"
        line = f"stopping after this iteration{limit}; {name} again {again}, without a checkpoint"
        os.write(2, f"\n{line}\n".encode())
        self._stop(INTERRUPTED)

    def _abandon(self) -> None:
        """End the processes of the run at once, and then the run, by KeyboardInterrupt in the main thread."""
        if self.abandoned:
            return
        self.abandoned = True
        os.write(2, b"\nending the run without a checkpoint\n")
        end_children(besides=self._others)
        self._raises = True  # not before: two threads would end the same processes
        signal.pthread_kill(_main_thread_ident(), signal.SIGINT)

    def _listen_to(self, parent: Connection | None) -> None:
        if parent is not None:
            threading.Thread(target=self._await_end, args=(parent,), daemon=True).start()

    def _await_end(self, parent: Connection) -> None:
        with suppress(OSError):
            parent.poll(None)
        if self.signal is None:
            self.signal = signal.SIGTERM
        self._stop(INTERRUPTED)


def is_the_hosts(handler: object) -> bool:
    """Whether a program has set this handler; Python sets one of its own, for Ctrl-C."""
    return callable(handler) and handler is not signal.default_int_handler


def _main_thread_ident() -> int:
    ident = threading.main_thread().ident
    assert ident is not None, "it runs"
    return ident


def kill_everything(status: int) -> None:
    """Kill all processes that this process started, and end it with this exit status."""
    try:
        end_children()
    finally:
        os._exit(status)


def end_children(besides: Collection[int | None] = ()) -> None:
    """Kill all processes that this process started, with their own, but those with these numbers.

    It waits until they have ended, and leaves it to the thread that started them to hear how: whoever of two
    threads asks second would hear that they are still running.
    """
    running: set[int] = set()
    for child in multiprocessing.active_children():
        if child.pid in besides:
            continue
        with suppress(ValueError):  # the other thread has closed it meanwhile
            running.add(child.sentinel)
            families.end_group(child)
    deadline = time.monotonic() + _AFTER_SIGKILL_S
    while running and (ended := wait(running, max(0.0, deadline - time.monotonic()))):
        running.difference_update(ended)
