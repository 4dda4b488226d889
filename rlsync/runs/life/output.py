"""What a command says to whoever reads it: an exit status, and what the machine refuses as an error."""

from __future__ import annotations

import errno
import os
import select
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import disk_usage

from rlsync import ConfigError, RlsyncError, SyncMapError
from rlsync.seams import machine

EXIT_FAILED = 1


EXIT_USAGE = 2


EXIT_INTERRUPTED = 130  # what shells say of a program that Ctrl-C ended


EXIT_UNREAD = 141  # and of one that SIGPIPE ended


def exit_status(error: RlsyncError) -> int:
    """2 for what the user wrote, 141 for output without a reader, 1 for what went wrong."""
    if isinstance(error, Unread):
        return EXIT_UNREAD
    if isinstance(error, ConfigError | SyncMapError):
        return EXIT_USAGE
    return EXIT_FAILED


class Unread(RlsyncError):
    """Nobody reads the standard output any more."""


class Refused(RlsyncError):
    """The machine refuses what is asked of it."""


def refused(error: BaseException | None, run: Path) -> Refused | None:
    """The same error of a ``run`` in three lines; None if it is not the machine's, but a program's."""
    refusal = machine.machines(error)
    if refusal is None:
        return None
    if refusal.errno == errno.ENOENT and not run.is_dir():
        problem = "the folder of the run is gone"
        return Refused(problem, str(run), "leave it there until the run has ended")
    files = [name for name in (refusal.filename, refusal.filename2) if name is not None]
    folder = run
    if files and isinstance(files[0], str):
        folder = Path(files[0]).parent
    cure = machine.cure_of(refusal, folder)
    if cure is None:
        return None
    full = []
    for place in (str(run), tempfile.gettempdir(), "/dev/shm"):
        if Path(place).is_dir() and disk_usage(place).free < 1 << 20:
            full.append(place)
    where = " -> ".join(map(str, files)) or ", ".join(full) or str(run)
    return Refused(str(refusal.strerror), where, cure)


@contextmanager
def output_read(run: Path = Path()) -> Iterator[None]:
    """Inside, output has a reader to the end, and what the machine refuses a ``run`` is told as an error."""
    try:
        yield
        sys.stdout.flush()
    except RlsyncError:
        raise
    except (Exception, SystemExit) as error:
        by_rich = isinstance(error, SystemExit) and isinstance(error.__context__, BrokenPipeError)
        if by_rich or (isinstance(error, OSError) and 1 in drop_unread()):
            problem = "nobody reads the output any more"
            cure = "write it to a file, and read that"
            raise Unread(problem, "standard output", cure) from error
        if isinstance(error, SystemExit):
            raise
        refusal = refused(error, run)
        if refusal is None:
            raise
        raise refusal from error


def drop_unread() -> list[int]:
    """Drop what is printed from here on where nobody reads it, and return which of descriptors 1 and 2."""
    poll = select.poll()
    for number in (1, 2):
        poll.register(number, 0)
    unread = [number for number, event in poll.poll(0) if event & select.POLLERR]
    for number in unread:  # Python would complain about it once more at its exit
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, number)
        os.close(nowhere)
    return unread
