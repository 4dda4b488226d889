"""One anonymous shared file: mappings and byte-range locks on a single descriptor, and a mark to know it by.

The file is a memfd. Each process opens it for itself through the owner's ``/proc`` entry, so each has its own
open file description. The locks (F_OFD_SETLK) belong to that description, and the kernel drops them when the
process dies, however it dies. Only Linux has such locks. The older POSIX locks belong to the process, and
closing any descriptor of the file drops all of them, so they cannot take their place.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import secrets
import struct
import sys
import weakref
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from rlsync.core.errors import BoardClosed, ConfigError

PAGE_BYTES = mmap.PAGESIZE
_MAP_POPULATE = 0x8000
_PUNCH_HOLE = 0x1 | 0x2  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
_FLOCK = "hhqqi4x"


@dataclass(frozen=True, slots=True)
class FileAddress:
    """Where another process finds the file; small and picklable."""

    pid: int  #: the owner's
    path: str  #: the file, among the owner's descriptors
    host: str = ""  #: where this path means this file; empty if the address does not say


class SharedFile:
    """A shared file with one descriptor, which this object closes, however many mappings."""

    def __init__(self, fd: int, address: FileAddress) -> None:
        self.fd = fd
        self.address = address
        _close_in_forked_children()
        _open_files.add(self)

    @classmethod
    def create(cls, name: str) -> SharedFile:
        """A new, empty file; ``name`` is what tools show beside the descriptor, and need not differ."""
        _require_locks()
        pid = os.getpid()
        fd = os.memfd_create(name)
        # Others open this path instead of inheriting the descriptor: the address is small, and works under
        # fork, spawn and a fork server, and for workers that join late.
        return cls(fd, FileAddress(pid, f"/proc/{pid}/fd/{fd}", this_host()))

    @classmethod
    def open(cls, address: FileAddress) -> SharedFile:
        """Open another process's file, with locks of one's own; BoardClosed: the owner is gone."""
        _require_locks()
        if address.host not in ("", this_host()):
            raise BoardClosed(
                f"the board of process {address.pid} is memory of another host or container",
                f"process {os.getpid()}, opening {address.path} of {address.host}; this is {this_host()}",
                "start the workers on the learner's host, in its container; on Ray, RayBoardScheme keeps a "
                "board on each node",
            )
        try:
            return cls(os.open(address.path, os.O_RDWR), address)
        except OSError as cause:
            what = f"the board of process {address.pid} is gone"
            cure = "the learner must live, and run as the same user, while workers attach"
            raise BoardClosed(what, f"opening {address.path}: {cause.strerror}", cure) from cause

    def resize(self, size_bytes: int) -> None:
        """Make the file this long; untouched pages cost nothing."""
        os.ftruncate(self.fd, size_bytes)

    def size_bytes(self) -> int:
        return os.fstat(self.fd).st_size

    def discard(self, offset: int, size_bytes: int) -> None:
        """Give the memory of a range back; it reads as zeros afterwards."""
        _libc().fallocate(self.fd, _PUNCH_HOLE, offset, size_bytes)

    def write(self, data: bytes, offset: int) -> None:
        os.pwrite(self.fd, data, offset)

    def read(self, size_bytes: int, offset: int) -> bytes:
        return os.pread(self.fd, size_bytes, offset)

    def map(self, size_bytes: int, offset: int, *, writable: bool, populate: bool = False) -> torch.Tensor:
        """Map a page-aligned range as a flat ``uint8`` tensor, until no tensor uses the memory any more. A
        write to a read-only mapping ends the process at once (SIGSEGV).
        """
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        flags = mmap.MAP_SHARED | (_MAP_POPULATE if populate else 0)
        # By mmap(2) itself: before Python 3.13 its mmap keeps a duplicate of the descriptor for each mapping.
        # And through another open file: a mapping keeps its open file alive after close() and in forked
        # children, and with it all locks.
        fd = os.open(f"/proc/self/fd/{self.fd}", os.O_RDWR if writable else os.O_RDONLY)
        try:
            address = _libc().mmap(None, size_bytes, protection, flags, fd, offset)
        finally:
            os.close(fd)
        if address == ctypes.c_void_p(-1).value:
            code = ctypes.get_errno()
            raise OSError(code, f"cannot map {size_bytes} bytes: {os.strerror(code)}")
        memory = (ctypes.c_uint8 * size_bytes).from_address(address)
        weakref.finalize(memory, _libc().munmap, address, size_bytes).atexit = False
        return torch.frombuffer(memory, dtype=torch.uint8)

    def words(self, size_bytes: int, offset: int) -> memoryview:
        """Map a page-aligned range for reading and writing as 64-bit words."""
        memory = self.map(size_bytes, offset, writable=True)
        return memoryview(cast("Any", memory.numpy())).cast("B").cast("Q")

    def try_lock(self, at: int, *, exclusive: bool) -> bool:
        """Lock one byte without waiting; returns whether this open file holds the lock now."""
        try:
            fcntl.fcntl(self.fd, fcntl.F_OFD_SETLK, _flock(fcntl.F_WRLCK if exclusive else fcntl.F_RDLCK, at))
        except OSError as refusal:
            if refusal.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise
        return True

    def unlock(self, at: int) -> None:
        """Drop this process's lock on one byte."""
        fcntl.fcntl(self.fd, fcntl.F_OFD_SETLK, _flock(fcntl.F_UNLCK, at))

    def is_locked(self, at: int) -> bool:
        """Whether another open file holds a lock on one byte."""
        answer = fcntl.fcntl(self.fd, fcntl.F_OFD_GETLK, _flock(fcntl.F_WRLCK, at))
        kind: int = struct.unpack(_FLOCK, answer)[0]
        return kind != fcntl.F_UNLCK

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Close the descriptor; mappings live on while tensors use them."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Mark(NamedTuple):
    """The first words of a shared file: they tell it from any other that comes to stand at its address."""

    magic: int  #: what it is
    format: int  #: how its bytes are laid out
    number: int  #: which one it is

    @classmethod
    def write(cls, words: memoryview, magic: int, format_: int) -> Mark:
        """Mark a new file; never changed afterwards."""
        mark = cls(magic, format_, secrets.randbits(64))
        for i, word in enumerate(mark):
            words[i] = word
        return mark

    def open(self, address: FileAddress, control_bytes: int, what: str) -> tuple[SharedFile, memoryview]:
        """Open the file with this mark and map its control words; BoardClosed: its owner is gone."""
        file = SharedFile.open(address)
        if file.size_bytes() >= control_bytes:  # reading past the end would be SIGBUS
            words = file.words(control_bytes, 0)
            if tuple(words[: len(self)]) == self:
                return file, words
        file.close()
        raise BoardClosed(
            f"the {what} of process {address.pid} is gone",
            f"another file is at {address.path}",
            "the learner must live while workers attach",
        )


def whole_pages(size_bytes: int) -> int:
    """``size_bytes`` rounded up to whole pages, at least one."""
    return max(1, -(-size_bytes // PAGE_BYTES)) * PAGE_BYTES


@cache
def this_host() -> str:
    """What two processes have in common that see each other's ``/proc``: the running kernel and the pids."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"boot {boot}, {Path('/proc/self/ns/pid').readlink()}"
    except OSError:  # hidden from this process: opening the file tells
        return ""


def _require_locks() -> None:
    if "F_OFD_SETLK" not in vars(fcntl):
        what = "this platform has no open-file-description locks"
        cure = "run on Linux 3.15 or later, for example in a container; rlsync doctor tests the locks"
        raise ConfigError(what, f"shared memory of a board or a ring, on {sys.platform}", cure)


def _flock(kind: int, at: int) -> bytes:
    return struct.pack(_FLOCK, kind, os.SEEK_SET, at, 1, 0)


_open_files: weakref.WeakSet[SharedFile] = weakref.WeakSet()


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    size, number, offset = ctypes.c_size_t, ctypes.c_int, ctypes.c_longlong
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, size, number, number, number, offset]
    libc.munmap.argtypes = [ctypes.c_void_p, size]
    libc.fallocate.argtypes = [number, number, offset, offset]
    return libc


@cache
def _close_in_forked_children() -> None:
    # A forked child shares the parent's open file description. If it kept the descriptor, the parent's locks
    # would outlive the parent.
    os.register_at_fork(after_in_child=_close_inherited)


def _close_inherited() -> None:
    for file in list(_open_files):
        file.close()
    _open_files.clear()
