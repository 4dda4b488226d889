"""Freed memory: keep it for the process, or return it to the host."""

from __future__ import annotations

import ctypes
import gc
from contextlib import suppress

#: Parameter numbers of mallopt(3).
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3

#: The largest value that glibc accepts.
_LARGEST_MMAP_THRESHOLD = 32 << 20


def keep_freed_memory() -> None:
    """From this call on, let the process keep freed memory for its next allocations.

    A learner allocates and frees the same activations in every step. By default the C library returns large
    ones to the host and requests them again, with a page fault for each 4 KiB. That takes 4 to 6 % of a step
    of the shallow network. The process then shrinks only if :func:`return_freed_memory` is called.

    Example:
        >>> keep_freed_memory()
    """
    with suppress(AttributeError):  # a C library other than glibc
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def return_freed_memory() -> None:
    """Return unused memory to the host now.

    Two things keep unused memory. Tensors in reference cycles wait for the next garbage collection. And the C
    library keeps freed memory on its heap, where it also puts tensors of up to 32 MiB after a few of them
    were freed. This takes some ten milliseconds, so call it rarely.

    Example:
        >>> return_freed_memory()
    """
    gc.collect()
    with suppress(AttributeError):  # a C library other than glibc
        ctypes.CDLL(None).malloc_trim(0)
