"""Processes wake each other: who waits sleeps in the kernel, and costs nothing until it is rung for.

A process that looks every millisecond for what it waits for takes one to two percent of a core, however idle it
is; two hundred of them take more cores than most machines have.
"""

from __future__ import annotations

import ctypes
import math
import platform
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache, partial

#: How long a process waits before it looks without having been rung for: whoever should have rung may be dead.
LOOK_AGAIN_S = 0.2
EVERYBODY = 2**31 - 1

_WAIT = 0
_WAKE = 1
# It compares half a word, the one that lies at the word's address where the low bytes come first.
_HALF = 2**32 - 1
# The number of futex(2), for which the C library has no function.
_CALLS = {"x86_64": 202, "aarch64": 98, "riscv64": 98}


class Bell:
    """A word of shared memory by which a process that has done something wakes those that wait for it.

    Who waits reads the bell, looks for what it waits for, and if that is not there waits until the bell has
    changed since it was read. Who rings has done it before. So nothing is missed between the look and the wait.

    It is a hint, and no more: whoever should ring may die before, and whoever was woken may die after. So nobody
    waits longer than :data:`LOOK_AGAIN_S` before the next look. Linux waits by futex(2); elsewhere the word is
    read again and again.

    Example:
        >>> words = memoryview(bytearray(8)).cast("Q")
        >>> bell = Bell(words, 0)
        >>> heard = bell.read()
        >>> bell.wait(heard, 0.001)
        False
        >>> bell.ring()
        >>> bell.wait(heard, 60.0)
        True
    """

    def __init__(self, words: memoryview, at: int) -> None:
        self._words = words
        self._at = at
        self._word = ctypes.c_uint64.from_buffer(words, at * words.itemsize)
        self._address = ctypes.addressof(self._word)
        self._futex = _futex()

    def read(self) -> int:
        """What it shows now, to be given to :meth:`wait`."""
        return int(self._words[self._at])

    def ring(self, waiters: int = EVERYBODY) -> None:
        """Wake this many of those that wait, the longest waiting first; elsewhere than on Linux all."""
        # The time, and not a count: two processes that count at once might leave what somebody has read.
        self._words[self._at] = time.monotonic_ns()
        if self._futex is not None:
            self._futex(self._address, _WAKE, waiters, None)

    def wait(self, heard: int, timeout_s: float = math.inf) -> bool:
        """Wait until it shows something else than ``heard``, or the next look is due; whether it does."""
        timeout_s = min(timeout_s, LOOK_AGAIN_S)
        if self._futex is not None:
            if self.read() == heard and timeout_s > 0:
                left = _Timespec(*divmod(int(timeout_s * 1e9), 10**9))
                # A signal ends the wait early, too: Python's handlers run, and whoever waits looks once more.
                self._futex(self._address, _WAIT, heard & _HALF, ctypes.addressof(left))
            return self.read() != heard
        deadline = time.monotonic() + timeout_s
        for pause_s in pauses():
            left_s = deadline - time.monotonic()
            if self.read() != heard or left_s <= 0:
                break
            time.sleep(min(pause_s, left_s))
        return self.read() != heard


def pauses() -> Iterator[float]:
    """Seconds to pause between two looks at the other side's locks, longer each time."""
    pause_s = 50e-6
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, 1e-3)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


@cache
def _futex() -> Callable[[int, int, int, int | None], object] | None:
    """Call futex(2) with an address, an operation, a value and a timeout's address; None: there is none here."""
    number = _CALLS.get(platform.machine())
    is_long = ctypes.sizeof(ctypes.c_long) == 8
    if sys.platform != "linux" or sys.byteorder != "little" or number is None or not is_long:
        return None
    syscall = ctypes.CDLL(None).syscall
    long = ctypes.c_long
    syscall.argtypes = [long, ctypes.c_void_p, long, long, ctypes.c_void_p]
    syscall.restype = long

    return partial(syscall, number)
