"""Ctrl-C and SIGTERM: the first one ends the run after the current iteration, the second one at once."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from types import TracebackType

from rlsync import Stop

#: The signals that end a run in good order.
SIGNALS = (signal.SIGINT, signal.SIGTERM)

_WHY = "interrupted"

#: In the pipe of signal numbers: there come no more.
_END = 0


def status_after(number: int) -> int:
    """The exit status of a program that a signal has ended.

    Example:
        >>> status_after(signal.SIGTERM)
        143
    """
    return 128 + number


class Interrupts:
    """Inside this context, SIGINT and SIGTERM call the attached stop. A second one kills all.

    A separate thread watches for the signals. So it works even while the main thread waits for a worker in
    a call that Python cannot interrupt.

    Example:
        >>> with Interrupts() as interrupts:  # doctest: +SKIP
        ...     with interrupts.held():
        ...         trainer = build(config)  # its workers never see Ctrl-C
        ...     with Stop(trainer) as stop:
        ...         interrupts.attach(stop)
        ...         trainer.train()
    """

    def __init__(self) -> None:
        self.count = 0
        self.signal: signal.Signals | None = None  #: the first one
        self._stop: Stop | None = None
        self._before: dict[signal.Signals, object] = {}
        self._fd_before = -1
        self._read_fd, self._write_fd = -1, -1
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Interrupts:
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._write_fd, False)
        self._thread = threading.Thread(target=self._watch, name="rlsync-ctrl-c", daemon=True)
        self._thread.start()
        self._fd_before = signal.set_wakeup_fd(self._write_fd)
        self._before = {number: signal.signal(number, lambda number, frame: None) for number in SIGNALS}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)  # type: ignore[arg-type]
        signal.set_wakeup_fd(self._fd_before)
        os.write(self._write_fd, bytes([_END]))  # not the pipe's end: a forked process may hold it open
        if self._thread is not None:
            self._thread.join()
        os.close(self._write_fd)
        os.close(self._read_fd)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Processes started inside never receive these signals, because they inherit what this thread blocks.

        A terminal sends Ctrl-C to all processes of a run, and so does a job scheduler with SIGTERM. Workers
        that die of it would take the last iteration with them. Ignoring the signals would protect workers,
        too, but one that comes during that time would be lost for this process. The watching thread does not
        block them, so it receives it.
        """
        resource_tracker.ensure_running()  # start it first: its start unblocks both
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    def exit_status(self) -> int:
        """0, or that of the first signal."""
        return 0 if self.signal is None else status_after(self.signal)

    def attach(self, stop: Stop) -> None:
        """After this call, the first signal asks for this stop, at the end of the current iteration."""
        self._stop = stop
        if self.count:
            stop(_WHY)

    def _watch(self) -> None:
        """Read signals from the pipe. Python's C handler writes the number of every signal to it."""
        while numbers := os.read(self._read_fd, 64):
            for number in numbers:
                if number == _END:
                    return
                if number in SIGNALS:
                    self._on_signal(signal.Signals(number))

    def _on_signal(self, number: signal.Signals) -> None:
        self.count += 1
        if self.count > 1:
            kill_everything(status_after(number))
        self.signal = number
        again = "Ctrl-C again" if number == signal.SIGINT else f"{number.name} again"
        os.write(2, f"\nstopping after this iteration; {again} to kill\n".encode())
        if self._stop is not None:
            self._stop(_WHY)


def kill_everything(status: int) -> None:
    """Kill all processes that this process started, and end it with this exit status."""
    children = multiprocessing.active_children()
    for child in children:
        child.kill()
    for child in children:
        child.join(timeout=1.0)
    os._exit(status)
