"""Replace a file so that no reader ever sees a half one; write and read a record; digest a file.

And what the machine refuses, in words: why, and what a user can do about it.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryFile
from typing import TypeVar

from rlsync.core.errors import ConfigError

T = TypeVar("T")

#: What a file system answers that cannot do what is asked of it, for any file.
CANNOT = frozenset(
    (
        errno.EINVAL,
        errno.ENOSYS,
        errno.EOPNOTSUPP,
        errno.ENOTSUP,
        errno.EXDEV,
        errno.EPERM,
        errno.EACCES,
    )
)

_PIECE = 2**20


def write_whole(file: Path, write: Callable[[Path], object], *, durable: bool = False) -> None:
    """Let ``write`` write a file beside its place, then move it there in one step.

    If it raises or is killed, the file of before stays. A ``durable`` one is on the disk when this returns.
    """
    beside = file.with_name(f".{os.getpid()}.{file.name}")  # the suffix may say how it is written
    try:
        write(beside)
        if durable:
            flush(beside)
        beside.replace(file)
        if durable:
            flush(file.parent)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def check_folder(file: Path, where: str | None = None) -> None:
    """ConfigError if ``file`` could not be written: because of its folder, or because it is one."""
    if file.is_dir():
        raise ConfigError(f"{file} is a folder", where or str(file), "name a file")
    require_writable(file.parent, where or str(file), "name a file in another folder")


def require_writable(folder: Path, where: str, cure: str) -> None:
    """ConfigError with the machine's own reason if it does not let us write a file in ``folder``."""
    try:
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        if folder.exists():
            raise ConfigError(
                f"cannot write into {folder}: {error.strerror}", where, cure
            ) from error
        raise ConfigError(f"there is no folder {folder}", where, cure) from error


def flush(path: Path) -> None:
    """Have the disk keep a file, or a folder's entries, where the file system can do that for folders."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (*CANNOT, errno.EBADF) or not stat.S_ISDIR(
            os.fstat(descriptor).st_mode
        ):
            raise
    finally:
        os.close(descriptor)


def reserve(descriptor: int, size_bytes: int, at: int = 0) -> None:
    """Have the disk keep room for a range of an open file: OSError if there is none.

    To write to a map of a file without room ends the process (SIGBUS).
    """
    if not size_bytes:
        return
    allocate = vars(os).get("posix_fallocate")  # macOS has none
    try:
        if allocate is not None:
            allocate(descriptor, at, size_bytes)
            return
    except OSError as error:
        if error.errno not in CANNOT:
            raise
    for begin in range(at, at + size_bytes, _PIECE):
        length = min(_PIECE, at + size_bytes - begin)
        os.pwrite(descriptor, os.pread(descriptor, length, begin).ljust(length, b"\0"), begin)


def record_in(file: Path, kind: type[T], what: str, cure: str = "remove the file") -> T | None:
    """The dataclass that a file holds as JSON; None without a file, a ConfigError if it cannot be read."""
    try:
        return kind(**json.loads(file.read_text()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise ConfigError(f"cannot read {what}: {error}", str(file), cure) from error


def digest_of(file: Path) -> str:
    """The BLAKE2b digest of a file's bytes, 40 hexadecimal digits."""
    digest = hashlib.blake2b(digest_size=20)
    with file.open("rb") as opened:
        while piece := opened.read(2**20):
            digest.update(piece)
    return digest.hexdigest()
