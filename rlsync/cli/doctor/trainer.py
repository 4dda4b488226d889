"""Examine a user's trainer in a separate process, so that it cannot hang or outlive the doctor."""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess

from rlsync.cli.doctor.arrivals import findings_of
from rlsync.cli.doctor.finding import Finding
from rlsync.cli.explain import checked_trainer, from_file
from rlsync.cli.train import prepare_process
from rlsync.core.errors import ConfigError, RlsyncError, first_line
from rlsync.sync.processes import ending
from rlsync.torchrl_plugin.examine.examine import Examination, examine

#: An examination has four steps: two questions to the workers, a publish and a rollout. Each has a deadline.
_STEPS = 4
_SHUTDOWN_TIMEOUT_S = 15.0
_BUILT = "built"
_WHERE = "trainer"


def trainer_findings(target: str, timeout_s: float) -> list[Finding]:
    """Build the trainer that ``file.py:function`` names, examine it, and end all its processes.

    Args:
        target: ``path/to/file.py:function``; the function returns a trainer.
        timeout_s: how many seconds building may take, and each step of the examination.

    Raises:
        ConfigError: the target is not a function, or the function does not return a trainer.
        RlsyncError: rlsync refused something while the trainer was built.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_in_child, args=(target, timeout_s, theirs), name="rlsync doctor")
    process.start()
    theirs.close()
    try:
        said = _hear(ours, process, timeout_s)
        wait([process.sentinel], 0.0 if isinstance(said, Finding) else _SHUTDOWN_TIMEOUT_S)
    finally:
        _end(process)
        ours.close()
    match said:
        case RlsyncError():
            raise said
        case Finding():
            return [said]
        case Examination():
            return findings_of(said)
    raise TypeError(said)


def _hear(pipe: Connection, process: SpawnProcess, timeout_s: float) -> object:
    """The child's result, or a finding if it gives none in time."""
    stage, limit_s = "building it", timeout_s
    try:
        while pipe.poll(limit_s):
            said = pipe.recv()
            if said != _BUILT:
                return said
            stage, limit_s = "examining it", (_STEPS + 1) * timeout_s
    except EOFError:
        process.join(_SHUTDOWN_TIMEOUT_S)
        how = "without a word" if process.exitcode is None else ending(process.exitcode)
        return Finding("fail", _WHERE, f"{stage}: its process ended, {how}", "look for its own error above")
    cure = "find out where it hangs (py-spy dump), or give a longer --timeout-s"
    return Finding("fail", _WHERE, f"{stage} took more than {limit_s:g} s", cure)


def _end(process: SpawnProcess) -> None:
    """Kill all processes of its session, in every case."""
    try:
        os.killpg(process.pid or os.getpid(), signal.SIGKILL)
    except ProcessLookupError:  # all have ended, or it has no session yet
        process.kill()
    process.join()


def _in_child(target: str, timeout_s: float, pipe: Connection) -> None:
    """Runs in the child: build and examine. The parent kills its session in the end."""
    os.setsid()
    os.dup2(2, 1)  # output of the build goes to stderr, not into the report
    prepare_process()
    try:
        trainer = checked_trainer(_function(target)())
        pipe.send(_BUILT)
        pipe.send(examine(trainer, timeout_s))
    except RlsyncError as error:
        pipe.send(error)
        raise
    except Exception as error:
        traceback.print_exc()
        said = first_line(error)
        cure = "see the traceback above"
        pipe.send(Finding("fail", _WHERE, f"{type(error).__name__}: {said}", cure))
        raise SystemExit(1) from error
    trainer.shutdown()


def _function(target: str) -> Callable[[], object]:
    function = from_file([target])
    if function is None:
        raise ConfigError(
            f"{target!r} names no function", "rlsync doctor --trainer", "give path/to/file.py:function"
        )
    return function
