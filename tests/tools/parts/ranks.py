"""A learner of several processes, its ranks, on gloo over loopback: each obeys one command at a time."""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from tests.tools.programs import ENDS_WITHIN_S


class Rank:
    """A process of a learner, seen from the test.

    A command is a function of a test module. It gets the rank's own dictionary, in which it keeps what later
    commands need, and returns something small.
    """

    def __init__(
        self, number: int, world: int, store: Path, before: Callable[[dict[str, Any]], None]
    ) -> None:
        self.number = number
        context = multiprocessing.get_context("forkserver")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, number, world, str(store), before))
        self.process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def tell(self, command: Callable[..., Any], *args: object) -> Rank:
        """Give a command; :meth:`answer` waits for its end."""
        self.connection.send((command, args))
        return self

    def answer(self, timeout_s: float = ENDS_WITHIN_S) -> Any:
        """What the oldest command has returned; raises what it has raised."""
        outcome, value = self.outcome(timeout_s)
        if outcome == "raised":
            raise value
        return value

    def outcome(self, timeout_s: float = ENDS_WITHIN_S) -> tuple[str, Any]:
        """Whether the oldest command has "returned" or "raised", and what."""
        if not self.connection.poll(timeout_s):
            raise TimeoutError(f"rank {self.number} did not answer within {timeout_s:g} s")
        return self.connection.recv()

    def do(self, command: Callable[..., Any], *args: object) -> Any:
        return self.tell(command, *args).answer()


class Ranks(list[Rank]):
    """All ranks of a learner."""

    def all(self, command: Callable[..., Any], *args: object) -> list[Any]:
        """Let all ranks obey the same command at the same time; their answers, in order."""
        for rank in self:
            rank.tell(command, *args)
        return self.answers()

    def publish(self, publish: Callable[..., Any], call: Callable[..., Any], *args: object) -> list[Any]:
        """Rank 0 publishes while the others take part; their answers, in order."""
        for rank in self:
            rank.tell(call if rank.number else publish, *args)
        return self.answers()

    def answers(self) -> list[Any]:
        """The answers of all; raises the first error, when all have answered."""
        found = [rank.outcome() for rank in self]
        for outcome, value in found:
            if outcome == "raised":
                raise value
        return [value for _, value in found]


@contextmanager
def learner(
    world: int, folder: Path, first: Callable[[dict[str, Any]], None] | None = None
) -> Iterator[Ranks]:
    """A learner of some ranks, which are dead when the block ends.

    Rank 0 does `first` before it joins the others, because what it forks must not inherit threads of gloo.
    """
    store = folder / "store"
    ranks = Ranks(Rank(n, world, store, _nothing if n or first is None else first) for n in range(world))
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.process.kill()
            rank.process.join(30)
            rank.connection.close()


def _nothing(own: dict[str, Any]) -> None:
    """Before it joins the others, a rank does this."""


def _serve(
    connection: Connection, number: int, world: int, store: str, before: Callable[[dict[str, Any]], None]
) -> None:
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    multiprocessing.set_start_method("fork", force=True)
    own: dict[str, Any] = {}
    before(own)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=number, world_size=world)
    while True:
        try:
            command, args = connection.recv()
        except EOFError:
            return
        try:
            answer = ("returned", command(own, *args))
        except Exception as error:
            error.add_note(traceback.format_exc())
            answer = ("raised", error)
        connection.send(answer)
