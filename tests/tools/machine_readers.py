"""Reader processes that the board machine commands, and the tensors that it publishes."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from rlsync.tensors.layout import Layout
from rlsync.transport.board import BoardHandle, BoardReader
from rlsync.transport.contract import Note
from tests.tensors.test_layout import random_bits
from tests.tools.board_workers import Acts, Remote, bits
from tests.tools.processes import wait_until

ANSWER_TIMEOUT_S = 60.0

Image = tuple[bytes, list[bytes]]  # the layout, and the bytes of every leaf
Adoption = tuple[int, list[tuple[int, Image]]]


def version_tensors(layout: Layout, version: int) -> list[torch.Tensor]:
    """The tensors of a publish: random bits, the same ones whenever this version is meant."""
    generator = torch.Generator().manual_seed(version)
    return [random_bits(entry.leaf, generator) for entry in layout.owned]


def image_of(layout: Layout, tensors: Sequence[torch.Tensor]) -> Image:
    """What a reader shows when it acts with ``tensors``: the layout, and every leaf of it."""
    return layout.to_json(), [bits(tensor) for tensor in layout.spread(tensors)]


@dataclass(frozen=True, slots=True)
class Report:
    """What a reader sees, without adopting anything."""

    version: int
    newest: int
    asked: int
    closed_by_learner: bool
    learner_died: bool
    acts: Image | None


class MachineReader:
    """The commands that a reader process obeys."""

    def __init__(self) -> None:
        self.acts = Acts("copy")
        self.reader: BoardReader | None = None
        self.applied: list[tuple[int, Image]] = []
        self.stops_before_the_lease = self.stops_inside = self.fails = False

    def attach(self, handle: BoardHandle, mode: str, number: int | None) -> int:
        self.acts = Acts(mode)
        reader = BoardReader(handle, self._apply, number)
        locks = reader._file.try_lock

        def stops_and_locks(at: int, *, exclusive: bool) -> bool:
            if self.stops_before_the_lease:
                self.stops_before_the_lease = False
                os.kill(os.getpid(), signal.SIGSTOP)
            return locks(at, exclusive=exclusive)

        reader._file.try_lock = stops_and_locks  # type: ignore[method-assign]
        self.reader = reader
        return reader.reader

    def adopt(self) -> Adoption:
        """The version that acts now, and all that were applied on the way, as they were read."""
        self.applied = []
        return self._attached.adopt(), self.applied

    def adopt_and_stop_inside(self) -> Adoption:
        self.stops_inside = True
        return self.adopt()

    def adopt_and_stop_before_the_lease(self) -> Adoption:
        """When head is read, and the slot that it names is not leased yet."""
        self.stops_before_the_lease = True
        return self.adopt()

    def adopt_and_fail(self) -> Adoption:
        self.fails = True
        try:
            return self.adopt()
        finally:
            self.fails = False

    def report(self) -> Report:
        reader, layout = self._attached, self.acts.layout
        acts = None
        if layout is not None:
            acts = layout.to_json(), [bits(tensor) for tensor in self.acts.tensors]
        return Report(
            reader.version,
            reader.newest,
            reader.asked,
            reader.closed_by_learner,
            reader.learner_died,
            acts,
        )

    def forget(self) -> None:
        self._attached.forget()

    def leave_note(self, note: bytes, kind: Note) -> None:
        self._attached.leave_note(note, kind)

    def detach(self) -> None:
        self._attached.close()
        self.reader, self.acts = None, Acts("copy")

    @property
    def _attached(self) -> BoardReader:
        assert self.reader is not None
        return self.reader

    def _apply(self, version: int, layout: Layout, views: Sequence[torch.Tensor]) -> bool:
        if self.fails:
            raise OSError("not now")
        flat = [bits(view) for view in views]
        if self.stops_inside:
            self.stops_inside = False
            os.kill(os.getpid(), signal.SIGSTOP)
            # The second half is read when the learner has published on and on.
            flat = [
                first[: len(first) // 2] + bits(view)[len(first) // 2 :]
                for first, view in zip(flat, views, strict=True)
            ]
        self.applied.append((version, (layout.to_json(), flat)))
        return self.acts(version, layout, views)


def serve(connection: Any) -> None:
    """Obey until killed."""
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    worker = MachineReader()
    while True:
        command, args = connection.recv()
        try:
            answer = ("ok", getattr(worker, command)(*args))
        except Exception as error:
            answer = ("raised", error)
        connection.send(answer)


class ReaderProcess(Remote):
    """A forked process that obeys the commands of :class:`MachineReader`."""

    def __init__(self) -> None:
        self.ended = False
        context = multiprocessing.get_context("fork")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def answer(self, timeout_s: float = ANSWER_TIMEOUT_S) -> Any:
        return super().answer(timeout_s)

    def wait_until_stopped(self) -> None:
        flags = os.WSTOPPED | os.WNOHANG | os.WNOWAIT
        stopped = wait_until(lambda: os.waitid(os.P_PID, self.pid, flags) is not None, ANSWER_TIMEOUT_S, 1e-4)
        assert stopped, f"process {self.pid} did not stop"

    def wait_until_continued(self) -> None:
        """SIGCONT takes effect at once; the kernel's letter in /proc may lag by the blink of an eye."""

        def runs() -> bool:
            with open(f"/proc/{self.pid}/stat") as stat:  # noqa: PTH123
                return stat.read().rpartition(")")[2].split()[0] != "T"

        assert wait_until(runs, ANSWER_TIMEOUT_S, 1e-4), f"process {self.pid} did not go on"


class Pool:
    """Processes that read no board now; forked as they are needed, ended together."""

    def __init__(self) -> None:
        self._idle: list[ReaderProcess] = []
        self._all: list[ReaderProcess] = []

    def take(self) -> ReaderProcess:
        if not self._idle:
            self._all = [each for each in self._all if not each.ended]
            self._all.append(ReaderProcess())
            return self._all[-1]
        return self._idle.pop()

    def give_back(self, process: ReaderProcess) -> None:
        self._idle.append(process)

    def end(self) -> None:
        self._idle = []
        for process in self._all:
            with suppress(ValueError):  # closed already
                process.end()
