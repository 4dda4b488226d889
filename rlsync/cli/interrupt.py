"""Ctrl-C: the first one ends the run after the current iteration, the second one ends it at once."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from types import TracebackType

from torchrl.trainers import Trainer

EXIT_INTERRUPTED = 128 + signal.SIGINT


class Interrupts:
    """Inside this context, SIGINT asks the attached trainer to stop. A second SIGINT kills every process.

    A separate thread watches for the signal. So it works even while the main thread waits for a worker in
    a call that Python cannot interrupt.

    Example:
        >>> with Interrupts() as interrupts:  # doctest: +SKIP
        ...     with interrupts.held():
        ...         trainer = build(config)  # its workers never see Ctrl-C
        ...     interrupts.attach(trainer)
        ...     trainer.train()
    """

    def __init__(self) -> None:
        self.count = 0
        self._trainer: Trainer | None = None
        self._before: object = None
        self._fd_before = -1
        self._read_fd, self._write_fd = -1, -1
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Interrupts:
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._write_fd, False)
        self._thread = threading.Thread(target=self._watch, name="rlsync-ctrl-c", daemon=True)
        self._thread.start()
        self._fd_before = signal.set_wakeup_fd(self._write_fd)
        self._before = signal.signal(signal.SIGINT, lambda number, frame: None)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        signal.signal(signal.SIGINT, self._before)  # type: ignore[arg-type]
        signal.set_wakeup_fd(self._fd_before)
        os.close(self._write_fd)  # ends the thread
        if self._thread is not None:
            self._thread.join()
        os.close(self._read_fd)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Processes started inside never receive SIGINT, because they inherit this thread's blocked signals.

        Ignoring SIGINT would protect them too, but a Ctrl-C during that time would be lost for this process.
        The watching thread does not block SIGINT, so it receives this Ctrl-C.
        """
        resource_tracker.ensure_running()  # start it first: its start unblocks SIGINT
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

    def attach(self, trainer: Trainer) -> None:
        """After this call, the first SIGINT stops this trainer at the end of its current iteration."""
        self._trainer = trainer
        if self.count:
            trainer.request_stop("interrupted")

    def _watch(self) -> None:
        """Read signals from the pipe. Python's C handler writes the number of every signal to it."""
        while numbers := os.read(self._read_fd, 64):
            for _ in range(numbers.count(signal.SIGINT)):
                self._on_interrupt()

    def _on_interrupt(self) -> None:
        self.count += 1
        if self.count > 1:
            kill_everything()
        os.write(2, b"\nstopping after this iteration; Ctrl-C again to kill\n")
        if self._trainer is not None:
            self._trainer.request_stop("interrupted")


def kill_everything() -> None:
    """Kill all processes that this process started, and end it."""
    children = multiprocessing.active_children()
    for child in children:
        child.kill()
    for child in children:
        child.join(timeout=1.0)
    os._exit(EXIT_INTERRUPTED)
