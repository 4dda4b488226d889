"""Processes that read and write boards on command, and tensors that tell their version."""

from __future__ import annotations

import multiprocessing
import os
import resource
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from rlsync.testing.acting import Acts, bits, filled, low_high, plain_layout
from rlsync.transport.board import BoardHandle, BoardReader
from tests.tools.counted_board import CountedBoard

# Nothing from tests.tools.parts: it loads all of TorchRL in each of the many processes started here.

ANSWER_TIMEOUT_S = 120.0
LEAVES_BEHIND_S = 60.0  # how long a child that must not matter lives at most


def open_fds() -> list[str]:
    """What each open descriptor of this process points to, sorted."""
    found = []
    for fd in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the descriptor of the listing itself
            found.append(str(fd.readlink()))
    return sorted(found)


def shared_mappings() -> list[str]:
    """Names of what this process has mapped from memory files and /dev/shm, sorted."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    names = [line.split(maxsplit=5)[5] for line in lines if "/" in line]
    return sorted(name for name in names if name.startswith(("/dev/shm/", "/memfd:")))


class Worker:
    """The commands that a process obeys; each answers with something small."""

    def __init__(self) -> None:
        self.acts = Acts("alias")
        self.reader: BoardReader | None = None
        self.board: CountedBoard | None = None
        self.children: list[subprocess.Popen[bytes]] = []

    # reader

    def attach(self, handle: BoardHandle, mode: str, number: int | None = None) -> int:
        self.acts = Acts(mode)
        self.reader = BoardReader(handle, self.acts, number)
        return self.reader.reader

    def adopt(self) -> int:
        return self.reader.adopt()

    def values(self) -> tuple[float, float]:
        return low_high(self.acts.tensors)

    def bits(self) -> list[bytes]:
        return [bits(tensor) for tensor in self.acts.tensors]

    def detach(self) -> None:
        self.reader.close()
        self.reader, self.acts = None, Acts("alias")

    def write_into_a_view(self) -> None:
        self.acts.tensors[0].fill_(-1.0)

    def watch_closely(self, adoptions: int) -> dict[str, int]:
        """The canary: adopt and look, as fast as possible, and count what is wrong, for so many adoptions."""
        seen = {"adoptions": 0, "looks": 0, "torn": 0, "wrong": 0, "fell": 0, "last": 0}
        until = time.monotonic() + ANSWER_TIMEOUT_S / 2
        while seen["adoptions"] < adoptions and time.monotonic() < until:
            version = self.reader.adopt()
            if not version:
                continue
            seen["fell"] += version < seen["last"]
            seen["adoptions"] += version != seen["last"]
            seen["last"] = version
            for _ in range(2):  # what acts stays as it is until the next adoption
                low, high = low_high(self.acts.tensors)
                seen["looks"] += 1
                seen["torn"] += low != high
                seen["wrong"] += (low, high) != (version, version)
        return seen

    def leave_note(self, note: bytes) -> None:
        self.reader.leave_note(note)

    # writer

    def open_board(self, tensors: int, size: int) -> BoardHandle:
        self.board = CountedBoard()
        self.board.lay_out(plain_layout(tensors, size))
        return self.board.handle

    def publish(self, number: float) -> int | None:
        return self.board.publish(filled(self.board.layout, number))

    def publish_until_killed(self) -> None:
        version = 0
        tensors = filled(self.board.layout, 0.0)
        while True:
            version += 1
            for tensor in tensors:
                tensor.fill_(version)
            self.board.publish(tensors)

    # any process

    def fds(self) -> list[str]:
        return open_fds()

    def mappings(self) -> list[str]:
        return shared_mappings()

    def fork_a_child(self) -> int:
        child = os.fork()
        if child == 0:
            time.sleep(LEAVES_BEHIND_S)
            os._exit(0)
        return child

    def run_a_program(self) -> int:
        self.children.append(subprocess.Popen(["sleep", "60"], close_fds=False))
        return self.children[-1].pid


def serve(connection: Any) -> None:
    """Obey until told to leave."""
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    worker = Worker()
    while (message := connection.recv()) is not None:
        command, args = message
        try:
            answer = ("ok", getattr(worker, command)(*args))
        except Exception as error:
            answer = ("raised", error)
        connection.send(answer)


class Remote:
    """A process of its own that obeys the commands of :class:`Worker`."""

    def __init__(self, start_method: str = "forkserver") -> None:
        self.ended = False
        context = multiprocessing.get_context(start_method)
        if start_method == "forkserver":
            context.set_forkserver_preload(["torch", "torchrl", "rlsync.transport.board.writer"])
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        pid = self.process.pid
        assert pid is not None
        return pid

    def tell(self, command: str, *args: object) -> None:
        """Send a command; its answer is collected later."""
        self.connection.send((command, args))

    def answer(self, timeout_s: float = ANSWER_TIMEOUT_S) -> Any:
        """The answer to the oldest command not answered yet."""
        if not self.connection.poll(timeout_s):
            raise TimeoutError(f"process {self.pid} did not answer within {timeout_s:g} s")
        outcome, value = self.connection.recv()
        if outcome == "raised":
            raise value
        return value

    def ask(self, command: str, *args: object) -> Any:
        """Send a command and wait for its answer."""
        self.tell(command, *args)
        return self.answer()

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL; returns when the process is gone."""
        self.process.kill()
        self.process.join(10)

    def end(self) -> None:
        """End it whatever it does."""
        if self.ended:
            return
        self.ended = True
        if self.process.is_alive():
            self.process.kill()
        self.process.join(10)
        self.connection.close()
        self.process.close()
