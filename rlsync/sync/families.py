"""A worker process and what it starts: one process group, which ends with the worker, however that ends.

The learner ends the group of a worker that was killed. A worker that leaves, or whose learner was killed,
ends its own.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import select
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.context import ForkServerProcess
from multiprocessing.popen_forkserver import Popen
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import Any

import psutil

from rlsync.core.errors import ConfigError, WorkerLost
from rlsync.transport.board.format import process_state

#: What multiprocessing says of a process whose fork server is gone, whether the process lives or not.
UNKNOWN = 255

#: After all other exit functions of multiprocessing: a worker's environments may have processes to close.
_LAST = -100

#: The process that leads a group because of :func:`lead_group`; a process that it has forked does not.
_leader = 0


class _Popen(Popen):
    """Of a process that may outlive its fork server. Only the server can tell how it ended, not whether."""

    def __init__(self, process: BaseProcess) -> None:
        super().__init__(process)
        # known by its start, too: its number may be given again
        self._process: psutil.Process | None = None
        with suppress(psutil.Error):
            self._process = psutil.Process(self.pid)
        self._outlives = False

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        if self.returncode is None and flag == os.WNOHANG and not _can_be_read(self.sentinel):
            return None  # as multiprocessing finds, in a tenth of its time
        code: int | None = super().poll(flag)
        if code != UNKNOWN or self._outlives or not self._lives():
            return code
        try:
            sentinel = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return code  # it has ended since
        self._outlives = True
        self.returncode = None
        self.sentinel = sentinel
        Finalize(self, os.close, (self.sentinel,))
        return None

    def _lives(self) -> bool:
        # without, it cannot be waited for
        if self._process is None or not hasattr(os, "pidfd_open"):
            return False
        return self._process.is_running() and process_state(self.pid) != "dead"


def _can_be_read(descriptor: int) -> bool:
    if not hasattr(select, "poll"):
        return True  # not known
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))


class _Process(ForkServerProcess):
    @staticmethod
    def _Popen(process: BaseProcess) -> Popen:  # noqa: N802  # multiprocessing's name
        return _Popen(process)


def let_forks_use_cuda() -> None:
    """Let what a fork server imports ask whether there is CUDA, and what is forked from it use CUDA after."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")


def require_children() -> None:
    """ConfigError where Python lets this process start no other."""
    process = multiprocessing.current_process()
    if process.daemon:
        cure = "start this process with daemon=False, or take concurrent.futures.ProcessPoolExecutor: the "
        cure += "processes of a multiprocessing.Pool are daemonic"
        problem = "this process is daemonic, so Python lets it start no processes, and there would be no workers"
        raise ConfigError(problem, f"process {process.name!r}", cure)


def start_as(method: str, process: BaseProcess) -> None:
    """Start a process of this method of :mod:`multiprocessing`, in a host program's own kind of process, too.

    A process takes over the default method of the one that starts it. It knows Python's own methods, and not
    one that a library has added, as joblib's loky does in the processes that it starts.
    """
    default = multiprocessing.get_start_method(allow_none=True)
    if default is None or default in multiprocessing.get_all_start_methods():
        process.start()
        return
    multiprocessing.set_start_method(method, force=True)
    try:
        process.start()
    finally:
        multiprocessing.set_start_method(default, force=True)


def start_process(
    method: str, target: Callable[..., object], args: tuple[Any, ...], name: str
) -> BaseProcess:
    """Start a process that ends with this one; WorkerLost if the fork server dies at it three times."""
    require_children()
    let_forks_use_cuda()
    if method == "forkserver":
        # The server has the variables of its own start, which may be long ago.
        target, args = _in_environment, (dict(os.environ), target, args)
    kind: Any = _Process if method == "forkserver" else get_context(method).Process  # type: ignore[attr-defined]
    for left in (2, 1, 0):
        process: BaseProcess = kind(target=target, args=args, name=name, daemon=True)
        try:
            start_as(method, process)
            break
        except (EOFError, ConnectionError) as error:
            if method != "forkserver":
                raise
            if not left:
                problem = "the fork server was ended while it started a process, three times"
                raise WorkerLost(problem, name, "look what ends it (out of memory?)") from error
            time.sleep(0.05)  # until the kernel has ended the rest of it
    return process


def _in_environment(
    variables: dict[str, str], target: Callable[..., object], args: tuple[Any, ...]
) -> None:
    """Run a process's target with these environment variables, and no others."""
    os.environ.clear()
    os.environ.update(variables)
    target(*args)


def lead_group() -> None:
    """Make this worker process lead a process group, in which all are that it starts from now on."""
    global _leader
    gc.freeze()  # what a learner that forked it left in cycles may hold threads that are not here
    _leader = os.getpid()
    if os.getpgrp() != _leader:
        os.setpgid(0, 0)
    # the terminal stops groups in the background by these
    for number in (signal.SIGTTIN, signal.SIGTTOU):
        signal.signal(number, signal.SIG_IGN)
    # a forked worker would tell the learner of signals that come to the worker
    signal.set_wakeup_fd(-1)
    # A run holds signals back from its workers, not from what they start: programs begin without handlers.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    for each in blocked:
        signal.signal(each, lambda number, frame: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, blocked)
    Finalize(None, _leave_group, exitpriority=_LAST)


def _leave_group() -> None:
    """End what this worker has started and not ended, and live on until it has exited."""
    if _leader == os.getpid():
        with suppress(OSError):
            os.setpgid(0, os.getpgid(os.getppid()))
        with suppress(ProcessLookupError):
            os.killpg(_leader, signal.SIGKILL)


def end_at_once() -> None:
    """End this process and, if it leads a group of its own, what it has started."""
    if _leader == os.getpid():
        os.killpg(_leader, signal.SIGKILL)
    os._exit(1)


def end_group(worker: BaseProcess) -> None:
    """Kill a worker and what it has started, also after its end, but no process that got its number since."""
    pid = worker.pid
    assert pid is not None, "it was started"
    if worker.exitcode not in (None, UNKNOWN) and psutil.pid_exists(pid):
        return  # another process has the number, so nothing is left of the group
    with suppress(OSError):
        if os.getpgid(pid) != pid:  # it leads no group: it has only just begun
            os.kill(pid, signal.SIGKILL)
            return
    with suppress(OSError):
        os.killpg(pid, signal.SIGKILL)
