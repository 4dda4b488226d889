"""Processes seen through /proc (so, Linux): children, descriptors, stopping, waiting."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import forkserver
from pathlib import Path

_HELPERS = (
    b"multiprocessing.resource_tracker",
    b"multiprocessing.forkserver",
    b"torch_shm_manager",
)


def child_pids(pid: int | None = None) -> set[int]:
    """Living children of a process (this one by default), without Python's and torch's helpers.

    What Python's fork server started for the process counts as its child.
    """
    found = set()
    parent = pid or os.getpid()
    for child, state in _children(parent):
        if state != "Z" and _is_helper(child, parent):
            found |= {started for started, state in _children(child) if state != "Z"}
        elif state != "Z":
            found.add(child)
    return found


def descendant_pids(pid: int | None = None) -> set[int]:
    """Children, their children, and so on."""
    found = child_pids(pid)
    return found.union(*(descendant_pids(child) for child in found))


def session_pids(session: int) -> set[int]:
    """Living processes of a session, whoever their parents are."""
    pids = {int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdigit()}
    return {pid for pid in pids if _session(pid) == session and is_alive(pid)}


def is_alive(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    return _stat(pid)[1] not in ("", "Z")


def what_is(pid: int) -> str:
    """A process as a failed test names it: number, state, parent and command line."""
    parent, state = _stat(pid)
    try:
        command = _command(pid).replace(b"\0", b" ").decode(errors="replace").strip()
    except (FileNotFoundError, ProcessLookupError):
        command = "gone"
    return f"{pid} ({state or 'gone'}, child of {parent}): {command[:200]}"


def open_fds(pid: int | None = None) -> list[str]:
    """What each open descriptor of a process points to, sorted."""
    folder = Path(f"/proc/{pid or os.getpid()}/fd")
    return sorted(target for target in map(_target, folder.iterdir()) if target)


def shared_mappings(pid: int | None = None) -> list[str]:
    """Names of the shared memory (/dev/shm, memfds) a process has mapped, one per mapping."""
    lines = Path(f"/proc/{pid or os.getpid()}/maps").read_text().splitlines()
    names = (line.split(maxsplit=5)[5] for line in lines if line.count("/"))
    return sorted(name for name in names if name.startswith(("/dev/shm/", "/memfd:")))


def wait_until(predicate: Callable[[], bool], timeout_s: float, poll_s: float = 0.01) -> bool:
    """Whether the predicate came true in time."""
    deadline = time.monotonic() + timeout_s
    while not predicate():
        if time.monotonic() >= deadline:
            return False
        time.sleep(poll_s)
    return True


def kill(pid: int, timeout_s: float = 30.0) -> None:
    """SIGKILL one process and wait until it is dead."""
    os.kill(pid, signal.SIGKILL)
    assert wait_until(lambda: not is_alive(pid), timeout_s), f"process {pid} outlived SIGKILL"


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """SIGSTOP a process inside the block: alive, holding all it holds, answering nothing."""
    os.kill(pid, signal.SIGSTOP)
    assert wait_until(lambda: _stat(pid)[1] == "T", 30.0), f"process {pid} did not stop"
    try:
        yield
    finally:
        with suppress(ProcessLookupError):  # it was ended meanwhile
            os.kill(pid, signal.SIGCONT)


def _children(parent: int) -> list[tuple[int, str]]:
    try:
        lists = [(task / "children").read_text() for task in Path(f"/proc/{parent}/task").iterdir()]
    except (FileNotFoundError, ProcessLookupError):
        if Path(f"/proc/{parent}").exists():  # a thread ended meanwhile
            return _children(parent)
        return []
    pids = [int(pid) for children in lists for pid in children.split()]
    return [(pid, _stat(pid)[1]) for pid in pids]


def _stat(pid: int) -> tuple[int, str]:
    """Parent and state letter of a process; (0, "") if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0, ""
    return int(fields[1]), fields[0]


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return 0


def _is_helper(pid: int, parent: int) -> bool:
    if pid == getattr(forkserver._forkserver, "_forkserver_pid", None):
        return True  # it has the command line of the tests
    try:
        command = _command(pid)
        # What a fork server starts, and what that forks, has the server's command line, too.
        return any(name in command for name in _HELPERS) and command != _command(parent)
    except (FileNotFoundError, ProcessLookupError):
        return True


def _command(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def _target(descriptor: Path) -> str:
    try:
        return str(descriptor.readlink())
    except FileNotFoundError:  # the descriptor that lists the folder
        return ""
