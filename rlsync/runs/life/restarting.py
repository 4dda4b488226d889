"""A small parent of a run: when something kills the run, it starts it again from its checkpoint."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection

from rlsync.runs.actors.supervision import Restarts
from rlsync.runs.config.composing import AUTO
from rlsync.runs.life.ending import SIGNALS
from rlsync.runs.life.host import Lifeline
from rlsync.seams import processes, shared_file

_PAUSES = Restarts(first_pause_s=1.0, longest_pause_s=60.0)
_LIFELINE = "RLSYNC_LIFELINE"  #: the variable that tells a run where the parent's pipe is


def train_again_if_killed(words: Sequence[str], restarts: int) -> int:
    """Run ``rlsync train`` with these words, at most so many times again. Returns the last exit status.

    A run that ends by itself is not started again, with whatever status: an error that Python has raised in it
    is the config's, the environment's or a program's, and would come again. What it could not raise, because
    something else ended it, is a signal: the kernel's memory killer, or a crash in native code.
    """
    alone = [*words, "restarts=0"]
    again = [*(word for word in alone if not word.startswith("resume=")), f"resume={AUTO}"]
    status = _ended(alone)
    for already in range(restarts):
        if status >= 0:
            break
        pause_s = _PAUSES.pause_s(already)
        end = processes.ending(status)
        _tell(
            f"the run was {end}: it goes on in {pause_s:g} s, restart {already + 1} of {restarts}"
        )
        time.sleep(pause_s)
        status = _ended(again)
    if status < 0:
        end = processes.ending(status)
        _tell(f"the run was {end}, and is not started again: resume={AUTO} goes on with it")
        return 128 - status
    return status


def lifeline() -> Connection | None:
    """In a run with such a parent: what says that it is to end, or that the parent has died."""
    path = os.environ.pop(_LIFELINE, None)
    if path is None:
        return None
    return Lifeline(path, shared_file.SharedFile.host()).held()


def _ended(words: Sequence[str]) -> int:
    """How a run ended: its exit status, or less than 0, the signal that killed it."""
    reading, writing = os.pipe()
    command = [sys.executable, "-m", "rlsync", "train", *words]
    environment = os.environ | {_LIFELINE: f"/proc/{os.getpid()}/fd/{reading}"}
    try:
        with subprocess.Popen(command, env=environment) as run, _handing_on(run, writing):
            return run.wait()
    finally:
        os.close(reading)
        os.close(writing)


@contextmanager
def _handing_on(run: subprocess.Popen[bytes], pipe: int) -> Iterator[None]:
    """Inside, a signal that ends a run in good order asks it to end, and a second one kills it.

    By the pipe: a terminal, and job schedulers, send signals to parent and child, and it counts its own.
    """
    asked = False

    def hand_on(number: int, frame: object) -> None:
        nonlocal asked
        if asked and number != signal.SIGHUP:
            run.kill()
        asked = True
        os.write(pipe, b"end")

    before = {}
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, hand_on)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _tell(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
