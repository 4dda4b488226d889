"""What this machine has and what it refuses: cores, memory, packages, folders; cures in words."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from rlsync.core.errors import ConfigError, causes, first_line
from rlsync.core.whole_file import CANNOT, require_writable

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


def require_place(folder: Path, where: str, cure: str) -> None:
    """As :func:`require_writable`, for a folder that may have to be made, with those above it."""
    require_writable(existing_folder(folder), where, cure)


def existing_folder(folder: Path) -> Path:
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
        with TemporaryDirectory(dir=existing_folder(folder), prefix=".rlsync-") as scratch:
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


def link_or_copy(file: str | Path, beside: str | Path) -> None:
    """Give a file a second name; where the file system has no links, copy it."""
    try:
        os.link(file, beside)
    except OSError:
        shutil.copy2(file, beside)


#: Parameter numbers of mallopt(3).
_M_TRIM_THRESHOLD = -1


_M_MMAP_THRESHOLD = -3


_LARGEST_MMAP_THRESHOLD = 32 << 20  #: the largest value that glibc accepts


_CONTAINERS_MEMORY = Path("/sys/fs/cgroup/memory.max")
_CONTAINERS_MEMORY_NOW = Path("/sys/fs/cgroup/memory.stat")
_CONTAINERS_TASKS = Path("/sys/fs/cgroup/pids.max")
_TASKS_NOW = Path("/sys/fs/cgroup/pids.current")


def affine_cores() -> int:
    """The cores that this process may use by its affinity, where the platform has one."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_bytes() -> int | None:
    """The memory that this process may use: the machine's, or less in a container; None: not known."""
    sizes = []
    with suppress(AttributeError, ValueError, OSError):  # a platform without these names
        sizes.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    with suppress(ValueError, OSError):  # "max", or another kind of machine
        sizes.append(int(_CONTAINERS_MEMORY.read_text()))
    return min(sizes, default=None)


def free_memory_bytes() -> int | None:
    """The memory that processes here may still take without swapping; None: not known."""
    sizes = []
    with suppress(KeyError, ValueError, OSError):  # another kind of machine
        sizes.append(1024 * _numbers_in(Path("/proc/meminfo"))["MemAvailable:"])
    with suppress(KeyError, ValueError, OSError):  # "max", or another kind of machine
        now = _numbers_in(_CONTAINERS_MEMORY_NOW)
        used = now["anon"] + now["shmem"] + now["kernel"]  # files are dropped when memory is wanted
        sizes.append(int(_CONTAINERS_MEMORY.read_text()) - used)
    return min(sizes, default=None)


def lacking(wanted_bytes: int, share: float) -> str:
    """That the host lacks so much memory, in words; empty if it is no more than a share of what is free."""
    free_bytes = free_memory_bytes()
    if free_bytes is None or wanted_bytes <= share * free_bytes:
        return ""
    return f"it wants {wanted_bytes / 1e9:.1f} GB of memory for a while, and {free_bytes / 1e9:.1f} GB are free"


def _numbers_in(file: Path) -> dict[str, int]:
    """By its first word, the number in each line of a file of the kernel."""
    numbers = {}
    for line in file.read_text().splitlines():
        name, number, *_ = line.split()
        numbers[name] = int(number)
    return numbers


def tasks_left() -> int | None:
    """How many more processes and threads may be started here; None: nothing limits them that is known."""
    left = []
    with suppress(ValueError, OSError):  # "max", or another kind of machine
        left.append(int(_CONTAINERS_TASKS.read_text()) - int(_TASKS_NOW.read_text()))
    limit, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if limit >= 0 and os.geteuid() != 0:  # root has no such limit
        left.append(limit - _tasks_of_this_user())
    return min(left, default=None)


def _tasks_of_this_user() -> int:
    tasks = 0
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            if process.stat().st_uid == os.getuid():
                tasks += len(list(process.joinpath("task").iterdir()))
    return tasks


def keep_freed_memory() -> None:
    """Keep freed memory for the next step, whose page faults would take 4 to 6 % of it."""
    with suppress(AttributeError):  # a C library other than glibc
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def has_package(name: str) -> bool:
    """Whether a package is installed; a mere folder of its name, which Python can import, is none."""
    spec = find_spec(name)
    return spec is not None and spec.origin is not None
