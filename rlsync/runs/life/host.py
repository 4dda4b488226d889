"""Who runs ``rlsync train``: a shell, a program, or the launcher of a sweep.

A launcher may start processes for the jobs.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection

from rlsync import ConfigError, RlsyncError
from rlsync.runs.life.ending import Interrupts
from rlsync.runs.life.job import Job
from rlsync.runs.life.output import EXIT_FAILED
from rlsync.seams import families, shared_file


def require_host(job: Job, *, in_threads: bool = True) -> None:
    """ConfigError where this run could not start its workers, or not be ended by a signal although it must."""
    if not in_threads and threading.current_thread() is not threading.main_thread():
        cure = "call it in the main thread, or in a process of its own: "
        cure += "subprocess.run([sys.executable, '-m', 'rlsync', 'train', ...])"
        problem = "in a thread Python delivers no signals, so nothing could stop these runs"
        raise ConfigError(problem, f"thread {threading.current_thread().name!r}", cure)
    evaluates = job.config.recipe.evaluations().every_frames > 0
    if job.agents or evaluates or not job.config.in_process:
        families.require_children()


class JobFailed(RlsyncError):
    """A job of a sweep failed, and has said why. SystemExit would make launchers kill the others."""

    def __init__(
        self, what: str, where: str = "", cure: str = "", status: int = EXIT_FAILED
    ) -> None:
        super().__init__(what, where, cure)
        self.status = status  #: the exit status that the job would have had alone


@dataclass(frozen=True, slots=True)
class Lifeline:
    """A pipe that a process keeps open while its runs may go on: that of a sweep, or one that starts a run again.

    Runs in other processes see when it is closed, also if that process was killed, and end with a checkpoint.
    """

    path: str  # for reading, among the descriptors of that process
    host: str  # where this path means this pipe; see SharedFile.host

    def held(self) -> Connection | None:
        """A job's end, which can be read from when the sweep ends; None on another machine."""
        if self.host != shared_file.SharedFile.host():
            return None
        try:
            return Connection(os.open(self.path, os.O_RDONLY | os.O_NONBLOCK), writable=False)
        except OSError:  # the process of the sweep is gone
            reading, writing = os.pipe()
            os.close(writing)
            return Connection(reading, writable=False)

    def is_cut(self) -> bool:
        """Whether the runs that hold it are to end; False on another machine."""
        connection = self.held()
        return connection is not None and connection.poll()


@contextmanager
def sweep_apart() -> Iterator[Lifeline]:
    """Around a sweep whose launcher starts processes: signals end its jobs in good order.

    Then they end this process, by SystemExit. A launcher would kill the jobs at a KeyboardInterrupt here, or
    when Ctrl-C ends one of its idle processes. So its processes hold signals back, until a run listens to
    them.
    """
    reading, writing = os.pipe()
    open_ends = [writing]

    def end(why: str) -> None:
        with suppress(IndexError):
            os.close(open_ends.pop())

    try:
        with Interrupts.caught() as interrupts, interrupts.held():
            interrupts.attach(end)
            try:
                yield Lifeline(f"/proc/{os.getpid()}/fd/{reading}", shared_file.SharedFile.host())
            except JobFailed as error:
                if interrupts.signal is None:
                    raise
                print(error, file=sys.stderr)
        if interrupts.signal is not None:
            sys.exit(interrupts.exit_status())
    finally:
        end("")
        os.close(reading)
