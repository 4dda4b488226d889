"""Memory that a process has freed, and whether it still holds it."""

from __future__ import annotations

import ctypes
import gc
from contextlib import suppress

#: Of mallopt(3).
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3

#: The largest that glibc takes.
_LARGEST_MMAP_THRESHOLD = 32 << 20


def keep_freed_memory() -> None:
    """Let this process keep what it frees for what it allocates next, from now on.

    A learner allocates and frees the same activations in every step. The C library gives large ones back to
    the host and asks for them anew, a page fault for each 4 KiB: 4 to 6 % of a step of the shallow network.
    The process stays as large as it ever was; :func:`return_freed_memory` still works.

    Example:
        >>> keep_freed_memory()
    """
    with suppress(AttributeError):  # a C library other than glibc
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def return_freed_memory() -> None:
    """Give memory that nobody uses any more back to the host, now.

    Tensors in reference cycles go with the next garbage collection only; and the C library keeps what
    was freed on its heap, where tensors of up to 32 MiB come to lie once a few of them were freed.
    Takes some ten milliseconds: for rare occasions.

    Example:
        >>> return_freed_memory()
    """
    gc.collect()
    with suppress(AttributeError):  # a C library other than glibc
        ctypes.CDLL(None).malloc_trim(0)
