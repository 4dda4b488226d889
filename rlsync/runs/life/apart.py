"""A user's code in a process of its own, in steps with deadlines: it cannot hang this process."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess

from rlsync import RlsyncError
from rlsync.runs.life.training import prepare_process
from rlsync.seams import families, first_line, processes, verdicts

TIMEOUT_S = 60.0  #: default of ``--timeout-s``
_START_TIMEOUT_S = 300.0  #: for the process to import torch and TorchRL, on a busy machine too
_SHUTDOWN_TIMEOUT_S = 15.0  #: for the process to end after its result


@dataclass(frozen=True, slots=True)
class Stage:
    """What the process does next, how long it may take, and what to do if it takes longer."""

    name: str
    limit_s: float
    cure: str = verdicts.HANGS


@dataclass(frozen=True, slots=True)
class Failed:
    why: str
    cure: str


#: What the user's code runs in says its stages and then its result; what it does after that has no deadline.
Say = Callable[[object], None]
Work = Callable[..., None]


def run_apart(work: Work, *arguments: object) -> object:
    """Call ``work(*arguments, say)``, a function of a module, in a process of its own.

    Returns what it says last, after a :class:`Stage` before each step. All processes of its session are
    killed in the end. What it prints goes to stderr; an RlsyncError that it raises is raised here.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_in_child, args=(work, arguments, theirs), name="rlsync")
    families.start_as("spawn", process)
    theirs.close()
    try:
        outcome = _hear(ours, process, Stage("starting its process", _START_TIMEOUT_S))
        if not isinstance(outcome, Failed):
            wait([process.sentinel], _SHUTDOWN_TIMEOUT_S)
    finally:
        families.end_group(process)  # in every case: all processes of its session
        process.join()
        ours.close()
    if isinstance(outcome, RlsyncError):
        raise outcome
    return outcome


def _hear(pipe: Connection, process: SpawnProcess, stage: Stage) -> object:
    try:
        while pipe.poll(stage.limit_s):
            message = pipe.recv()
            if not isinstance(message, Stage):
                return message
            stage = message
    except EOFError:
        process.join(_SHUTDOWN_TIMEOUT_S)
        how = "without a word"
        if process.exitcode is not None:
            how = processes.ending(process.exitcode)
        return Failed(f"{stage.name}: its process ended, {how}", "look for its own error above")
    return Failed(f"{stage.name} took more than {stage.limit_s:g} s", stage.cure)


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
