"""What workers say and where they are while they make their environments, which is foreign code."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from rlsync.core.errors import BoardClosed
from rlsync.transport.shared_file import FileAddress, SharedFile

#: The worker notes its stack when this share of its time is over, before the learner gives up.
_NOTED_AT = 0.8

_STACK = "rlsync: still making the environments, most recent call last:"
_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+), in (?P<name>.+)$', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class StartLog:
    """The place where one worker leaves what it prints while it starts; small and picklable."""

    worker: int
    address: FileAddress  #: of the learner's file
    name: str  #: of that file; when the learner has closed it, its address may lead to another one
    #: of ``time.monotonic()``, when the learner waits no longer; infinity if it always waits
    until_s: float

    @contextmanager
    def making(self) -> Iterator[None]:
        """Inside, what this process prints is kept, and where it hangs is noted, for the learner to show."""
        try:
            file = SharedFile.open(self.address)
            if self.name not in file.name:
                raise BoardClosed("the learner waits no longer")
            outputs = os.dup(1), os.dup(2)
        except (BoardClosed, OSError):  # or this process has no output
            yield
            return

        # What is printed goes into the file, and a thread watches where this one is.
        file.resize(0)
        _point_output_at((file.fd, file.fd))
        over = threading.Event()
        noting = threading.Thread(
            target=self._note_stack,
            args=(file, threading.get_ident(), over),
            name="rlsync-start",
            daemon=True,
        )
        noting.start()
        try:
            yield
        finally:
            over.set()
            noting.join()
            # before it is shown: this process shows it
            _point_output_at(outputs)
            for fd in outputs:
                os.close(fd)
            show(self.worker, _text(file).partition(_STACK)[0])
            file.resize(0)
            file.close()

    def _note_stack(self, file: SharedFile, maker: int, over: threading.Event) -> None:
        """Write where a thread is, if it is still there shortly before the learner gives up."""
        left_s = self.until_s - time.monotonic()
        wait_s = None
        if left_s < float("inf"):
            wait_s = max(0.05, _NOTED_AT * left_s)
        if not over.wait(wait_s):
            stack = "".join(traceback.format_stack(sys._current_frames()[maker]))
            file.write(f"{_STACK}\n{stack}".encode(), file.size_bytes())


class StartLogs:
    """The learner's end: one log for each worker that starts; without ``timeout_s`` it waits for ever."""

    def __init__(self, workers: int, timeout_s: float | None) -> None:
        if timeout_s is None:
            until_s = float("inf")
        else:
            until_s = time.monotonic() + timeout_s
        self._files: list[SharedFile] = []
        self.each: list[StartLog] = []
        for worker in range(workers):
            name = f"rlsync-start-{worker}-{os.urandom(8).hex()}"
            file = SharedFile.create(name)
            self._files.append(file)
            self.each.append(StartLog(worker, file.address, name, until_s))

    def doing(self, worker: int) -> str:
        """What a worker that is not ready does, in words; shows what it has printed."""
        text = _text(self._files[worker])
        show(worker, text)
        frames = list(_FRAME.finditer(text.partition(_STACK)[2]))
        if not frames:
            return "it has not begun to make its environments, or has made them"
        place = frames[-1]
        return f"it is making its environments, in {place['name']} ({place['file']}, line {place['line']})"

    def show(self, worker: int) -> None:
        """Show what a worker has printed whose process has ended while it made its environments."""
        show(worker, _text(self._files[worker]))

    def close(self) -> None:
        """Forget the logs. Workers that start later print as they please."""
        for file in self._files:
            file.close()


def show(worker: int, text: str) -> None:
    """Print what a worker has printed on stderr, each line with its number."""
    lines = [f"worker {worker}: {line}\n" for line in text.splitlines() if line.strip()]
    if lines:
        sys.stderr.flush()
        with suppress(OSError):  # nobody reads it any more
            os.write(2, "".join(lines).encode())


def _text(file: SharedFile) -> str:
    if file.fd < 0:
        return ""
    return file.read(file.size_bytes(), 0).decode(errors="replace")


def _point_output_at(fds: tuple[int, int]) -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, ValueError, OSError):  # there is none, or it is closed
            stream.flush()
    for number, fd in enumerate(fds, start=1):
        os.dup2(fd, number)
