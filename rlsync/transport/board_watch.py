"""Who reads a board, how far behind, and whether alive."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from rlsync.core.errors import AdoptionTimeout, BoardClosed, WorkerLost
from rlsync.transport import board_format as fmt
from rlsync.transport.board_format import ReaderStatus
from rlsync.transport.shared_file import SharedFile

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 50e-6, 1e-3


class BoardWatch:
    """Reads the reader lines of a board; asks the kernel, not the workers, who is alive.

    Any process of the same user may watch a board from outside: ``BoardWatch(*handle.open())``.
    """

    def __init__(self, file: SharedFile, words: memoryview) -> None:
        self._file = file
        self._words = words

    @property
    def version(self) -> int:
        """The newest published version."""
        return fmt.unpack_head(self._words[fmt.HEAD])[0]

    @property
    def slot_count(self) -> int:
        """Slots that were ever in use."""
        return self._words[fmt.SLOT_COUNT]

    def status(self) -> list[ReaderStatus]:
        """One entry for each reader that attached and did not leave by itself."""
        lines = ((r, self._words[fmt.reader_line(r)]) for r in range(fmt.MAX_READERS))
        return [self._read(reader, pid) for reader, pid in lines if pid]

    def wait(self, version: int, timeout_s: float, readers: Iterable[int] | None) -> None:
        """See :meth:`rlsync.transport.board.WeightBoard.wait`."""
        expected = None if readers is None else sorted(set(readers))
        deadline = time.monotonic() + timeout_s
        pause_s = _FIRST_PAUSE_S
        while missing := self._missing(version, expected):
            dead = [status for status in missing if status.state == "dead"]
            if dead:
                raise worker_lost(
                    {status: status.state for status in dead}, f"waiting for version {version} to be adopted"
                )
            if time.monotonic() >= deadline:
                raise AdoptionTimeout(
                    f"version {version} was not adopted within {timeout_s:g} s",
                    "; ".join(map(str, missing)),
                    "wait for at least one rollout, or look at why the worker does not move",
                )
            time.sleep(pause_s)
            pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)

    def _missing(self, version: int, expected: list[int] | None) -> list[ReaderStatus]:
        known = {status.reader: status for status in self.status()}
        absent = ReaderStatus(-1, 0, False, "never attached", 0, self.version, 0.0)
        wanted = sorted(known) if expected is None else expected
        asked = [known.get(reader) or replace(absent, reader=reader) for reader in wanted]
        return [status for status in asked if status.adopted_version < version]

    def _read(self, reader: int, pid: int) -> ReaderStatus:
        line = fmt.reader_line(reader)
        adopted = self._words[line + fmt.READER_ADOPTED]
        silent_ns = time.monotonic_ns() - self._words[line + fmt.READER_HEARTBEAT_NS]
        state = self._state(reader, pid)
        lag = max(0, self.version - adopted)
        age_s = max(0, silent_ns) / 1e9
        return ReaderStatus(reader, pid, state != "dead", state, adopted, lag, age_s)

    def _state(self, reader: int, pid: int) -> str:
        if self._file.fd < 0:
            raise BoardClosed("this board was closed", f"looking for worker {reader}", "look before that")
        if not self._file.is_locked(fmt.READER_LOCK + reader):
            return "dead"
        try:
            letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return "running"  # no /proc here: the lock alone says that it lives
        return {"T": "stopped", "t": "stopped", "Z": "dead", "X": "dead"}.get(letter, "running")


def worker_lost(dead: Mapping[ReaderStatus, str], where: str) -> WorkerLost:
    """What is raised for dead workers.

    Args:
        dead: what the board knows of each, and how it ended, in words.
        where: what they were needed for.

    Example:
        >>> status = ReaderStatus(1, 4242, False, "dead", 7, 2, 0.4)
        >>> print(worker_lost({status: "killed by SIGKILL"}, "waiting for frames").what)
        worker 1 (pid 4242, killed by SIGKILL, acted with version 7, 2 behind, last seen 0.4 s ago)
    """
    told = (
        f"worker {status.reader} (pid {status.pid}, {how}, acted with version {status.adopted_version}, "
        f"{status.lag_versions} behind, last seen {status.heartbeat_age_s:.1f} s ago)"
        for status, how in dead.items()
    )
    return WorkerLost(
        "; ".join(told),
        where,
        "look for the worker's own error above, or in the kernel's log if memory was short; "
        "restart the run or the worker",
    )
