"""Ctrl-C: the first ends the run in good order, the second at once."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from types import FrameType, TracebackType

from torchrl.trainers import Trainer

EXIT_INTERRUPTED = 128 + signal.SIGINT


class Interrupts:
    """While entered, SIGINT asks the attached trainer to stop; a second one kills every process.

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

    def __enter__(self) -> Interrupts:
        self._before = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        signal.signal(signal.SIGINT, self._before)  # type: ignore[arg-type]

    @contextmanager
    def held(self) -> Iterator[None]:
        """Processes started inside never receive SIGINT; this one does, at the latest afterwards.

        A blocked signal is inherited by children across exec, like an ignored one, but a Ctrl-C
        that comes meanwhile is not lost to this process.
        """
        resource_tracker.ensure_running()  # it unblocks SIGINT as it starts, so it must run before
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

    def attach(self, trainer: Trainer) -> None:
        """From now on, the first SIGINT stops this trainer after the iteration it is in."""
        self._trainer = trainer

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.count > 1:
            self._kill_everything()
        os.write(2, b"\nstopping after this iteration; Ctrl-C again to kill\n")
        if self._trainer is not None:
            self._trainer.request_stop("interrupted")

    def _kill_everything(self) -> None:
        children = multiprocessing.active_children()
        for child in children:
            child.kill()
        for child in children:
            child.join(timeout=1.0)
        os._exit(EXIT_INTERRUPTED)
