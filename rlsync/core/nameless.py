"""A user id without a name, as in a container that was started with ``--user 12345``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from rlsync.core.errors import ConfigError


@contextmanager
def told_of_a_user_without_a_name() -> Iterator[None]:
    """Raise ConfigError in place of what the import of torch 2.8 to 2.12 raises in the block.

    Its compiler names a folder by :func:`getpass.getuser`. Until torch 2.13 is the lowest version.
    """
    try:
        yield
    except (KeyError, OSError) as error:
        if not any(words in str(error) for words in _GETUSER):
            raise
        problem = f"user id {os.getuid()} has no name, and torch before 2.13 needs one when it is imported"
        where = "getpass.getuser(), which looks at LOGNAME, USER and /etc/passwd"
        raise ConfigError(
            problem, where, "set USER to any name, as by docker run --env USER=me"
        ) from error


#: What it raises, before Python 3.13 and from then on.
_GETUSER = ("uid not found", "No username set in the environment")
