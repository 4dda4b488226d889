"""One shared file: mappings and locks on single bytes, and a mark to know it by.

There are two kinds of it. :func:`kind` alone chooses; who opens a file takes the kind that its address shows.

A memfd (Linux) is anonymous. Each process opens it for itself through the owner's ``/proc`` entry, so
each has its own open file description. The locks (F_OFD_SETLK) belong to that description, and the kernel
drops them when the process dies, however it dies. The older POSIX locks belong to the process, and closing
any descriptor of the file drops all of them, so they cannot take their place.

:class:`FolderFile` (macOS, and where ``RLSYNC_SHARED_FILE=folder``) is a file in a private folder, beside an
empty file for each locked byte: flock(2) belongs to an open file, too, and ends with its last holder.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import re
import secrets
import shutil
import socket
import struct
import sys
import tempfile
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from rlsync.core.errors import BoardClosed, ConfigError, RlsyncError
from rlsync.core.whole_file import reserve
from rlsync.tensors.device import mapped, unmapped

PAGE_BYTES = mmap.PAGESIZE
_PUNCH_HOLE = 0x1 | 0x2  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
_FLOCK = "hhqqi4x"


#: Which kind of shared file this process makes: ``memfd`` or ``folder``; by the platform if it is not set.
KIND_VARIABLE = "RLSYNC_SHARED_FILE"


@dataclass(frozen=True, slots=True)
class FileAddress:
    """Where another process finds the file; small and picklable."""

    pid: int  #: the owner's
    path: str  #: the file, among the owner's descriptors or in a private folder
    host: str = ""  #: where this path means this file; empty if the address does not say

    @property
    def kind(self) -> type[SharedFile] | None:
        """The kind of file that lies at such a path; None if none does."""
        for each in (SharedFile, FolderFile):
            if each.may_lie_at(Path(self.path)):
                return each
        return None


class SharedFile:
    """A shared file with one descriptor, which this object closes, however many mappings; here, a memfd."""

    KIND = "memfd"  #: what :data:`KIND_VARIABLE` calls it

    def __init__(self, fd: int, address: FileAddress) -> None:
        self.fd = fd
        self.address = address
        _close_in_forked_children()
        _open_files.add(self)

    @classmethod
    def create(cls, name: str) -> SharedFile:
        """A new, empty file; ``name`` is what tools show beside it, and need not differ."""
        return kind()._make(name)

    @classmethod
    def _make(cls, name: str) -> SharedFile:
        pid = os.getpid()
        fd = os.memfd_create(name)
        # Others open this path instead of inheriting the descriptor: the address is small, and works under
        # fork, spawn and a fork server, and for workers that join late.
        return cls(fd, FileAddress(pid, f"/proc/{pid}/fd/{fd}", cls.host()))

    @classmethod
    def open(cls, address: FileAddress) -> SharedFile:
        """Open another process's file, with locks of one's own; BoardClosed: the owner is gone."""
        its = address.kind or SharedFile
        if address.host not in ("", its.host()):
            raise BoardClosed(
                f"the board of process {address.pid} is memory of another host or container",
                f"process {os.getpid()}, opening {address.path} of {address.host}; this is {its.host()}",
                "start the workers on the learner's host, in its container; on Ray, RayBoardScheme keeps a "
                "board on each node",
            )
        try:
            return its(its._find(Path(address.path)), address)
        except OSError as cause:
            problem = f"the board of process {address.pid} is gone"
            cure = "the learner must live, and run as the same user, while workers attach"
            raise BoardClosed(problem, f"opening {address.path}: {cause.strerror}", cure) from cause

    @staticmethod
    def may_lie_at(path: Path) -> bool:
        """Whether a file of this kind may have this path."""
        return re.fullmatch(r"/proc/\d+/fd/\d+", str(path)) is not None

    @staticmethod
    def _find(path: Path) -> int:
        """A descriptor of another process's file; OSError if it is gone."""
        return os.open(path, os.O_RDWR)

    @staticmethod
    @cache
    def host() -> str:
        """What two processes have in common for which one path means one file.

        The running kernel and the pids, if they see the same ``/proc``. Empty if it is hidden.
        """
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            return f"boot {boot}, {Path('/proc/self/ns/pid').readlink()}"
        except OSError:  # opening the file tells
            return ""

    @property
    def name(self) -> str:
        """What the file is called, as its descriptor shows it now."""
        return str(Path(f"/proc/self/fd/{self.fd}").readlink())

    def resize(self, size_bytes: int) -> None:
        """Make the file this long; untouched pages cost nothing. RlsyncError: files may not be so long."""
        try:
            os.ftruncate(self.fd, size_bytes)
        except OSError as error:
            raise self._no_room(size_bytes, error) from error

    def allocate(self, at: int, size_bytes: int) -> None:
        """Make the file so long that it has this range, which will be mapped and written to.

        Keep room for it on a disk: without, a write ends the process (SIGBUS). RlsyncError: there is none.
        """
        self.resize(max(self.size_bytes(), at + size_bytes))

    def _no_room(self, size_bytes: int, error: OSError) -> RlsyncError:
        problem = f"no room for {size_bytes:,} bytes of shared memory: {error.strerror}"
        cure = "free some space there, or name another place for temporary files (TMPDIR)"
        if error.errno == errno.EFBIG:
            cure = (
                "allow larger files (ulimit -f unlimited); a board's file is long, and mostly empty"
            )
        return RlsyncError(problem, self.address.path, cure)

    def size_bytes(self) -> int:
        return os.fstat(self.fd).st_size

    def discard(self, offset: int, size_bytes: int) -> None:
        """Give the memory of a range back, where the platform can; it reads as zeros afterwards."""
        fallocate = getattr(_libc(), "fallocate", None)
        if fallocate is None or fallocate(self.fd, _PUNCH_HOLE, offset, size_bytes):
            self.write(bytes(size_bytes), offset)

    def write(self, data: bytes, offset: int) -> None:
        os.pwrite(self.fd, data, offset)

    def read(self, size_bytes: int, offset: int) -> bytes:
        return os.pread(self.fd, size_bytes, offset)

    def map(
        self, size_bytes: int, offset: int, *, writable: bool, populate: bool = False
    ) -> torch.Tensor:
        """Map a page-aligned range as a flat ``uint8`` tensor, until no tensor uses the memory any more.

        A write to a read-only mapping ends the process at once (SIGSEGV).
        """
        protection = mmap.PROT_READ
        access = os.O_RDONLY
        if writable:
            protection |= mmap.PROT_WRITE
            access = os.O_RDWR
        flags = mmap.MAP_SHARED
        if populate:
            flags |= getattr(mmap, "MAP_POPULATE", 0)
        # By mmap(2) itself: before Python 3.13 its mmap keeps a duplicate of the descriptor for each mapping.
        # And through another open file: a mapping keeps its open file alive after close() and in forked
        # children, and with it all locks.
        fd = self._open_again(access)
        try:
            address = _libc().mmap(None, size_bytes, protection, flags, fd, offset)
        finally:
            os.close(fd)
        if address == ctypes.c_void_p(-1).value:
            code = ctypes.get_errno()
            raise OSError(code, f"cannot map {size_bytes} bytes: {os.strerror(code)}")
        memory = (ctypes.c_uint8 * size_bytes).from_address(address)
        mapped(address)
        weakref.finalize(memory, _unmap, address, size_bytes).atexit = False
        return torch.frombuffer(memory, dtype=torch.uint8)

    def _open_again(self, flags: int) -> int:
        """A descriptor for a mapping, which must not keep a lock alive."""
        return os.open(f"/proc/self/fd/{self.fd}", flags)

    def words(self, size_bytes: int, offset: int) -> memoryview:
        """Map a page-aligned range for reading and writing as 64-bit words."""
        memory = self.map(size_bytes, offset, writable=True)
        return memoryview(cast("Any", memory.numpy())).cast("B").cast("Q")

    def try_lock(self, at: int, *, exclusive: bool) -> bool:
        """Lock one byte without waiting; returns whether this open file holds the lock now."""
        if exclusive:
            lock = _flock(fcntl.F_WRLCK, at)
        else:
            lock = _flock(fcntl.F_RDLCK, at)
        try:
            fcntl.fcntl(self.fd, fcntl.F_OFD_SETLK, lock)
        except OSError as refusal:
            if refusal.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise
        return True

    def unlock(self, at: int) -> None:
        fcntl.fcntl(self.fd, fcntl.F_OFD_SETLK, _flock(fcntl.F_UNLCK, at))

    def is_locked(self, at: int, *, exclusively: bool = True) -> bool:
        """Whether another open file holds one byte exclusively, or in any way if not ``exclusively``."""
        if exclusively:
            wanted = _flock(fcntl.F_RDLCK, at)
        else:
            wanted = _flock(fcntl.F_WRLCK, at)
        # what keeps this file from the wanted lock, or F_UNLCK
        blocker = fcntl.fcntl(self.fd, fcntl.F_OFD_GETLK, wanted)
        lock_type: int = struct.unpack(_FLOCK, blocker)[0]
        return lock_type != fcntl.F_UNLCK

    def claim(self, at: int) -> bool:
        """Lock one byte exclusively; returns False if another open file holds it exclusively."""
        while not self.try_lock(at, exclusive=True):
            if self.is_locked(at):
                return False
            time.sleep(0)  # somebody looked at it just then
        return True

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Close the descriptor; mappings live on while tensors use them."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class FolderFile(SharedFile):
    """A file in a folder that only its user may enter; a lock is flock(2) on a file for that byte beside it.

    A look takes the lock for a moment: meanwhile a lock that is tried is refused, although nobody holds it.
    That is as good as held for a moment, for whoever is refused a slot takes another or comes again.
    """

    KIND = "folder"

    def __init__(self, fd: int, address: FileAddress) -> None:
        self._folder = Path(address.path).parent
        self._held: dict[int, int] = {}
        self._remove: Callable[[], object] = int  # does nothing
        super().__init__(fd, address)

    @classmethod
    def _make(cls, name: str) -> FolderFile:
        base = _private_folders()
        base.mkdir(mode=0o700, exist_ok=True)
        if base.is_symlink() or base.stat().st_uid != os.getuid() or base.stat().st_mode & 0o077:
            cure = "remove it, or name another place for temporary files (TMPDIR)"
            raise ConfigError(
                "the folder of shared files is not this user's alone", str(base), cure
            )
        _remove_orphans(base)
        new = Path(tempfile.mkdtemp(prefix=_NEW, dir=base))
        fd = os.open(new / name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        alive = _lock_file(new / _OWNER, exclusive=True)
        assert alive is not None
        # only now: what has no owner is removed
        folder = new.rename(base / new.name.removeprefix(_NEW))
        file = cls(fd, FileAddress(os.getpid(), str(folder / name), cls.host()))
        file._held[_OWNED] = alive
        file._remove = weakref.finalize(file, _remove_own, folder, os.getpid())
        return file

    @staticmethod
    def may_lie_at(path: Path) -> bool:
        return path.parent.parent.name == _private_folders().name and ".." not in path.parts

    @staticmethod
    def _find(path: Path) -> int:
        if (dead := _lock_file(path.parent / _OWNER, exclusive=False)) is not None:
            os.close(dead)
            raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
        return os.open(path, os.O_RDWR)

    @staticmethod
    @cache
    def host() -> str:
        return socket.gethostname()

    @property
    def name(self) -> str:
        return self.address.path

    def allocate(self, at: int, size_bytes: int) -> None:
        super().allocate(at, size_bytes)
        try:
            reserve(self.fd, size_bytes, at)
        except OSError as error:
            raise self._no_room(size_bytes, error) from error

    def _open_again(self, flags: int) -> int:
        return os.dup(self.fd)  # locks are on other files

    def try_lock(self, at: int, *, exclusive: bool) -> bool:
        if at not in self._held:
            fd = self._lock(at, exclusive=exclusive)
            if fd is not None:
                self._held[at] = fd
            return fd is not None
        return True

    def unlock(self, at: int) -> None:
        if at in self._held:
            os.close(self._held.pop(at))

    def is_locked(self, at: int, *, exclusively: bool = True) -> bool:
        if exclusively and at in self._held:
            return False  # by another one
        fd = self._lock(at, exclusive=not exclusively)
        if fd is not None:
            os.close(fd)
        return fd is None

    def _lock(self, at: int, *, exclusive: bool) -> int | None:
        """A descriptor that holds a lock; any one if the owner has left, for then nobody locks any more."""
        try:
            return _lock_file(self._folder / str(at), exclusive=exclusive)
        except FileNotFoundError:
            return os.dup(self.fd)

    def close(self) -> None:
        """The owner removes the folder. What others have mapped stays theirs."""
        self._remove()
        super().close()
        for at in list(self._held):
            self.unlock(at)


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

    def open(
        self, address: FileAddress, control_bytes: int, what: str
    ) -> tuple[SharedFile, memoryview]:
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


def kind() -> type[SharedFile]:
    """The kind of shared file that this process makes; ConfigError if there is no such kind here."""
    kinds: dict[str, type[SharedFile]] = {FolderFile.KIND: FolderFile}
    if "F_OFD_SETLK" in vars(fcntl) and hasattr(os, "memfd_create"):
        kinds[SharedFile.KIND] = SharedFile
    wanted = os.environ.get(KIND_VARIABLE, [*kinds][-1])
    if wanted not in kinds:
        cure = f"leave it unset, or set it to one of: {', '.join(sorted(kinds))}"
        raise ConfigError(f"no shared file is a {wanted!r} on {sys.platform}", KIND_VARIABLE, cure)
    return kinds[wanted]


_OWNED = -1  #: the byte whose lock says that the owner of a folder lives
_OWNER = str(_OWNED)
_NEW = "new-"


def _private_folders() -> Path:
    return Path(tempfile.gettempdir()) / f"rlsync-{os.getuid()}"


def _remove_own(folder: Path, owner: int) -> None:
    if os.getpid() == owner:  # and no child that it has forked
        shutil.rmtree(folder, ignore_errors=True)


def _remove_orphans(base: Path) -> None:
    """Remove the folders of owners that were killed."""
    for folder in base.iterdir():
        if folder.name.startswith(_NEW):
            continue  # its owner has not locked it yet
        with suppress(FileNotFoundError):  # another process removes it, too
            alive = _lock_file(folder / _OWNER, exclusive=True)
            if alive is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(alive)


def _lock_file(path: Path, *, exclusive: bool) -> int | None:
    """A new descriptor that holds a lock on a file, which is made if there is none; None if it is held."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    operation = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
    try:
        fcntl.flock(fd, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd


def _flock(kind: int, at: int) -> bytes:
    return struct.pack(_FLOCK, kind, os.SEEK_SET, at, 1, 0)


_open_files: weakref.WeakSet[SharedFile] = weakref.WeakSet()


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    size = ctypes.c_size_t
    number = ctypes.c_int
    offset = ctypes.c_longlong
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, size, number, number, number, offset]
    libc.munmap.argtypes = [ctypes.c_void_p, size]
    if hasattr(libc, "fallocate"):  # not macOS
        libc.fallocate.argtypes = [number, number, offset, offset]
    return libc


def _unmap(address: int, size_bytes: int) -> None:
    unmapped(address, size_bytes)
    _libc().munmap(address, size_bytes)


@cache
def _close_in_forked_children() -> None:
    # A forked child shares the parent's open file description. If it kept the descriptor, the parent's locks
    # would outlive the parent.
    os.register_at_fork(after_in_child=_close_inherited)


def _close_inherited() -> None:
    for file in list(_open_files):
        file.close()
    _open_files.clear()
