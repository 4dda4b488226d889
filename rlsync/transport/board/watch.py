"""Who reads a board, how far behind, and whether alive."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

from rlsync.core.errors import BoardClosed
from rlsync.core.ledger import NOTHING, Stamp
from rlsync.transport.board import format as fmt
from rlsync.transport.contract import ReaderStatus
from rlsync.transport.shared_file import SharedFile
from rlsync.transport.waiting import await_adoption


class BoardWatch:
    """Reads the reader lines of a board; asks the kernel, not the workers, who is alive.

    Any process of the same user may watch a board from outside: ``BoardWatch(*handle.open())``.
    """

    def __init__(self, file: SharedFile, words: memoryview) -> None:
        self._file = file
        self._words = words

    @property
    def version(self) -> int:
        return fmt.unpack_head(self._words[fmt.HEAD])[0]

    @property
    def newest_stamp(self) -> Stamp:
        return Stamp(self._words[fmt.GENERATION], self.version) if self.version else NOTHING

    @property
    def slot_count(self) -> int:
        """Slots that were ever in use."""
        return self._words[fmt.SLOT_COUNT]

    def status(self) -> list[ReaderStatus]:
        """One entry for each reader that attached and did not leave by itself."""
        lines = ((r, self._words[fmt.reader_line(r)]) for r in range(fmt.MAX_READERS))
        return [self._read(reader, pid) for reader, pid in lines if pid]

    def wait(self, version: int, timeout_s: float, readers: Iterable[int] | None) -> None:
        await_adoption(self.status, version, timeout_s, readers, lambda: self.version)

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
        # Hidden (another PID namespace, hidepid): the lock alone shows that it lives.
        return process_state(pid) or "running"


def process_state(pid: int) -> str | None:
    """``"running"``, ``"stopped"`` or ``"dead"``; None if there is no such process, or it is hidden."""
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return None
    return {"T": "stopped", "t": "stopped", "Z": "dead", "X": "dead"}.get(letter, "running")
