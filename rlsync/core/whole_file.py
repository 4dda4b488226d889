"""Replace a file so that no reader ever sees a half one; write and read a record; digest a file.

And what the machine refuses, in words: why, and what a user can do about it.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any, TypeVar

from rlsync.core.errors import ConfigError, causes, first_line

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

#: What a user can do about errors of the machine, by their numbers.
CURES = {
    errno.ENOSPC: "free some space there; a container has little of /dev/shm (docker run --shm-size=1g)",
    errno.EDQUOT: "your quota there is used up: remove files of yours, or name another disk, run_dir=FOLDER",
    errno.EFBIG: "allow larger files (ulimit -f unlimited), or name a disk that takes them, run_dir=FOLDER",
    errno.EIO: "the disk or its server failed: see the kernel's log (dmesg), or name another, run_dir=FOLDER",
    errno.ESTALE: "its server has lost the folder: mount it again, or name another disk, run_dir=FOLDER",
    errno.ENAMETOOLONG: "give a shorter name",
    errno.EMFILE: "allow more open files (ulimit -n 1024)",
    errno.ENFILE: "end other programs: all programs of this machine together have too many files open",
    errno.EAGAIN: "allow more processes and threads (ulimit -u), or give fewer workers",
    errno.EMLINK: "name another disk, run_dir=FOLDER: a file there has as many names as it can",
    **dict.fromkeys(
        (errno.EROFS, errno.EACCES), "name a folder that you may write to, with run_dir=FOLDER"
    ),
    **dict.fromkeys(
        (errno.ENOSYS, errno.EXDEV),
        "that file system cannot do this: name a folder on another one, with run_dir=FOLDER",
    ),
    **dict.fromkeys(
        (errno.EEXIST, errno.ENOTDIR, errno.EISDIR),
        "there is a file where a folder has to be, or the other way round: move it away",
    ),
}
_NO_INODES = "remove files there: it has room for bytes, and none for one more file (df -i)"
_FEW_INODES = 1000
_MUCH_ROOM_BYTES = 16 * 2**20
_NO_THREAD = "can't start new thread"  #: what Python says, as a RuntimeError


def machines(error: BaseException | None) -> OSError | None:
    """What the machine refused, among the causes of an error; None if nothing that a user can cure."""
    for each in causes(error):  # libraries wrap it, and torch tells of a full disk in words alone
        if isinstance(each, OSError) and each.errno in (errno.ENOENT, *CURES):
            return each
        for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
            if isinstance(each, RuntimeError) and os.strerror(number) in str(each):
                return OSError(number, os.strerror(number), first_line(each))
        if isinstance(each, RuntimeError) and _NO_THREAD in str(each):
            return OSError(errno.EAGAIN, _NO_THREAD)
    return None


def cure_of(refusal: OSError, folder: Path) -> str | None:
    """What a user can do about what the machine refused in a folder; None if that is not known."""
    if refusal.errno == errno.ENOSPC:
        try:
            facts = os.statvfs(folder)
        except OSError:
            return CURES[errno.ENOSPC]
        # What could not be written was removed, so there are a few again.
        if (
            facts.f_files
            and facts.f_favail < _FEW_INODES
            and facts.f_bavail * facts.f_frsize > _MUCH_ROOM_BYTES
        ):
            return _NO_INODES
    return CURES.get(refusal.errno or 0)


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


def require_place(folder: Path, where: str, cure: str) -> None:
    """The same for a folder that may have to be made, with those above it."""
    require_writable(_place(folder), where, cure)


def _place(folder: Path) -> Path:
    """The folder, or the first one above it that exists."""
    return next(each for each in (folder / "it").absolute().parents if each.exists())


def require_checkpoints(folder: Path, where: str) -> list[str]:
    """Try in a folder what a checkpoint needs; the folder may have to be made.

    ConfigError if its file system cannot sync a file, or put it in the place of another. Returns what is only
    of use, and is lacking there.
    """
    lacks = []

    def tried(act: Callable[[], object], name: str) -> None:
        try:
            act()
        except OSError as error:
            if error.errno not in (*CANNOT, errno.EBADF):
                raise
            lacks.append(name)

    try:
        with TemporaryDirectory(dir=_place(folder), prefix=".rlsync-") as scratch:
            inner, file, new = (Path(scratch, name) for name in ("inner", "file", "new"))
            inner.mkdir()
            file.touch()
            with new.open("wb") as opened:
                opened.write(bytes(1024))
                opened.flush()
                os.fsync(opened.fileno())
            new.replace(file)
            tried(lambda: os.link(file, inner / "file"), "link files")
            tried(lambda: inner.rename(new), "rename folders")
            descriptor = os.open(scratch, os.O_RDONLY)
            tried(lambda: os.fsync(descriptor), "sync folders")
            os.close(descriptor)
    except OSError as error:
        cure = cure_of(error, folder) or "name a folder on another disk, with run_dir=FOLDER"
        raise ConfigError(
            f"checkpoints cannot be written there: {error.strerror}", where, cure
        ) from error
    return lacks


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


def link_or_copy(file: str | Path, beside: str | Path) -> None:
    """Give a file a second name; where the file system has no links, copy it."""
    try:
        os.link(file, beside)
    except OSError:
        shutil.copy2(file, beside)


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


def json_of(value: Any, indent: int | None = 2) -> str:
    """Plain data as JSON; null for what JSON has no number for: infinities, and what is not a number."""
    return json.dumps(_in_json(value), indent=indent, allow_nan=False)


def _in_json(value: Any) -> Any:
    match value:
        case float():
            if math.isfinite(value):
                return value
            return None
        case dict():
            return {key: _in_json(each) for key, each in value.items()}
        case list() | tuple():
            return [_in_json(each) for each in value]
        case _:
            return value


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
