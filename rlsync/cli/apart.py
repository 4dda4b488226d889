"""Run a user's code in a process of its own: it can neither hang this process nor outlive it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess

from rlsync.cli.train import prepare_process
from rlsync.core.errors import RlsyncError, first_line
from rlsync.sync.processes import ending

#: Default of ``--timeout-s``.
TIMEOUT_S = 60.0

#: How long the process may take to import torch and TorchRL, on a busy machine too.
_START_TIMEOUT_S = 300.0

#: How long the process may take to end after its result.
_SHUTDOWN_TIMEOUT_S = 15.0


@dataclass(frozen=True, slots=True)
class Stage:
    """What the process does next.

    Args:
        name: in words.
        limit_s: how many seconds it may take.
        cure: what to do if it takes longer.
    """

    name: str
    limit_s: float
    cure: str = "find out where it hangs (py-spy dump), or give a longer --timeout-s"


@dataclass(frozen=True, slots=True)
class Failed:
    """There is no result.

    Args:
        why: the reason, in words.
        cure: what to do about it.
    """

    why: str
    cure: str


#: What the user's code runs in says its stages and then its result; what it does after that has no deadline.
Say = Callable[[object], None]
Work = Callable[..., None]


def run_apart(work: Work, *arguments: object) -> object:
    """Call ``work(*arguments, say)`` in a process of its own, and return what it says.

    The process has a session of its own, whose processes are all killed in the end. What it prints goes to
    stderr.

    Args:
        work: a function of a module. It says a :class:`Stage` before each step, then the result, and then
            cleans up.
        arguments: what it is given; like the result, they are pickled.

    Returns:
        The result, or :class:`Failed`.

    Raises:
        RlsyncError: ``work`` raised it.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_in_child, args=(work, arguments, theirs), name="rlsync")
    process.start()
    theirs.close()
    try:
        said = _hear(ours, process, Stage("starting its process", _START_TIMEOUT_S))
        wait([process.sentinel], 0.0 if isinstance(said, Failed) else _SHUTDOWN_TIMEOUT_S)
    finally:
        _end(process)
        ours.close()
    if isinstance(said, RlsyncError):
        raise said
    return said


def _hear(pipe: Connection, process: SpawnProcess, stage: Stage) -> object:
    """The result of the child, or why there is none."""
    try:
        while pipe.poll(stage.limit_s):
            said = pipe.recv()
            if not isinstance(said, Stage):
                return said
            stage = said
    except EOFError:
        process.join(_SHUTDOWN_TIMEOUT_S)
        how = "without a word" if process.exitcode is None else ending(process.exitcode)
        return Failed(f"{stage.name}: its process ended, {how}", "look for its own error above")
    return Failed(f"{stage.name} took more than {stage.limit_s:g} s", stage.cure)


def _end(process: SpawnProcess) -> None:
    """Kill all processes of its session, in every case."""
    try:
        os.killpg(process.pid or os.getpid(), signal.SIGKILL)
    except ProcessLookupError:  # all have ended, or it has no session yet
        process.kill()
    process.join()


def _in_child(work: Work, arguments: tuple[object, ...], pipe: Connection) -> None:
    os.setsid()
    os.dup2(2, 1)
    prepare_process()
    try:
        work(*arguments, pipe.send)
    except RlsyncError as error:
        pipe.send(error)
        raise SystemExit(1) from None
    except Exception as error:
        traceback.print_exc()
        pipe.send(Failed(f"{type(error).__name__}: {first_line(error)}", "see the traceback above"))
        raise SystemExit(1) from error
