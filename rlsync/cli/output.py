"""The end of a program whose output nobody reads any more, as in ``rlsync status RUN | head -1``."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rlsync.core.errors import RlsyncError


class Unread(RlsyncError):
    """Nobody reads the standard output any more."""


@contextmanager
def read() -> Iterator[None]:
    """Inside, what is printed has a reader until the end.

    Raises:
        Unread: it has none any more. What is printed from then on is dropped: Python would complain about it
            once more at its exit.
    """
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError as error:
        if _has_reader():  # it was another pipe
            raise
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        what, cure = "nobody reads the output any more", "write it to a file, and read that"
        raise Unread(what, "standard output", cure) from error


def _has_reader() -> bool:
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return not any(event & select.POLLERR for _, event in poll.poll(0))
