"""Whether the weights that act are those that were published: what is asked, answered and compared.

A question is about the newest published version. A worker answers at the end of the first rollout that it
makes with that version or a later one: the digest of its buffers and extra state as they were before the
rollout, if it adopted them for it, and the digest of its parameters as they are after it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

from torch import Tensor

from rlsync.tensors.digest import digest
from rlsync.tensors.layout import Kind, Layout
from rlsync.tensors.leaves import Leaves
from rlsync.torchrl_plugin.sender import BoardSender
from rlsync.transport.board_format import Note


@dataclass(frozen=True, slots=True)
class Answer:
    """What one worker says; digests by destination.

    Args:
        asked: the number of the question.
        version: what it acted with.
        kept: of its parameters, after the rollout.
        arrived: of its buffers and extra state, before the rollout; empty when it did not adopt for it.

    Example:
        >>> answer = Answer(1, 7, {"policy": 3}, {"policy": 0})
        >>> Answer.from_json(answer.to_json()) == answer
        True
    """

    asked: int
    version: int
    kept: dict[str, int]
    arrived: dict[str, int]

    def to_json(self) -> bytes:
        """As a note on a board."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Answer:
        """The inverse of :meth:`to_json`."""
        return cls(**json.loads(data))


@dataclass(frozen=True, slots=True)
class Deviation:
    """A worker that does not act with what was published.

    Args:
        what: what is wrong, with the version.
        where: the worker, its pid and the destination.
    """

    what: str
    where: str


@dataclass(frozen=True, slots=True)
class Found:
    """What a question has brought to light so far.

    Args:
        done: whether there is nothing left to wait for.
        answered: workers that have answered.
        whole: those among them whose answers covered buffers and extra state.
        waiting: living workers that have not answered yet, in words.
        deviations: what is wrong.
    """

    done: bool
    answered: int = 0
    whole: int = 0
    waiting: tuple[str, ...] = ()
    deviations: tuple[Deviation, ...] = ()


class Check(Protocol):
    """Compares the weights that act with those that were published."""

    def ask(self) -> None:
        """Ask every worker; what it was asked before is forgotten."""

    def hear(self) -> Found:
        """The answers so far."""


@dataclass(frozen=True, slots=True)
class Prints:
    """Digests of a destination.

    Args:
        parameters: of its parameters.
        others: of its buffers and extra state.
    """

    parameters: int
    others: int

    @classmethod
    def of(cls, leaves: Iterable[tuple[Kind, Tensor]]) -> Prints:
        """Of leaves, in order."""
        sorted_out: tuple[list[Tensor], list[Tensor]] = [], []
        for kind, tensor in leaves:
            sorted_out[kind != "parameter"].append(tensor)
        return cls(*map(digest, sorted_out))


def _deviations(published: Mapping[str, Prints], answer: Answer, who: str) -> list[Deviation]:
    """Compare one worker's answer with what was published under the version that it is about."""
    found = []
    for destination, prints in published.items():
        wrong = ["parameters"] if answer.kept.get(destination) != prints.parameters else []
        if answer.arrived and answer.arrived.get(destination) != prints.others:
            wrong.append("buffers or extra state")
        if wrong:
            what = (
                f"the {' and the '.join(wrong)} that act are not those published as version {answer.version}"
            )
            found.append(Deviation(what, f"destination {destination!r} of {who}"))
    return found


class BoardCheck:
    """Asks the workers of a board.

    While answers are out every version that is published is digested, so that a worker may answer with
    any of them; at other times a publish costs what it did.
    """

    def __init__(self, sender: BoardSender) -> None:
        self._sender = sender
        self._question = 0
        self._published: dict[int, dict[str, Prints]] = {}

    def ask(self) -> None:
        self._sender.join()
        self._published = {}
        self._sender.after_publish = self._remember
        self._remember(self._sender.board.newest)
        self._question = self._sender.board.ask()

    def hear(self) -> Found:
        answered = whole = 0
        waiting: list[str] = []
        wrong: list[Deviation] = []
        known = {status.reader: status for status in self._sender.board.status()}
        for worker in range(self._sender.collector.num_workers):
            status, answer = known.get(worker), self._answer(worker)
            if answer is None:
                if status is None or status.alive:  # who died is for SyncWeights.wait to say
                    waiting.append(str(status or f"worker {worker}, which never attached"))
                continue
            answered += 1
            whole += bool(answer.arrived)
            who = f"worker {worker} (pid {status.pid if status else 'unknown'})"
            wrong += _deviations(self._published[answer.version], answer, who)
        if not waiting:
            self._sender.after_publish = None
        return Found(not waiting, answered, whole, tuple(waiting), tuple(wrong))

    def _answer(self, worker: int) -> Answer | None:
        note = self._sender.board.note(worker, Note.ANSWER)
        said = None if note is None else Answer.from_json(note)
        if said is None or said.asked != self._question or said.version not in self._published:
            return None
        return said

    def _remember(self, version: int) -> None:
        board = self._sender.board
        if board.layout is None or not version:
            return
        kinds = {(d, s.name): s.kind for d in self._sender.destinations for s in self._sender.specs(d) or ()}
        leaves: dict[str, list[tuple[Kind, Tensor]]] = {}
        tensors = board.layout.spread(board.newest_views())
        for entry, tensor in zip(board.layout.entries, tensors, strict=True):
            leaf = entry.leaf
            if not leaf.once:  # a worker keeps its own of those
                kind = kinds.get((entry.destination, leaf.name), leaf.kind)
                leaves.setdefault(entry.destination, []).append((kind, tensor))
        self._published[version] = {d: Prints.of(of_d) for d, of_d in leaves.items()}


class LocalCheck:
    """Looks at the modules of an in-process collector: at the next version, and the rollout with it.

    What is aliased is the learner's own memory, and nothing to compare.

    Args:
        read: the live leaves at a destination.
    """

    def __init__(self, read: Callable[[str], Leaves]) -> None:
        self._read = read
        self._asked = False
        self._expected: tuple[int, dict[str, list[str]], dict[str, Prints], dict[str, int]] | None = None
        self._found: Found | None = None

    def ask(self) -> None:
        self._asked, self._expected, self._found = True, None, None

    def hear(self) -> Found:
        return self._found or Found(False)

    def adopted(self, version: int, layout: Layout, arrived: Sequence[Tensor]) -> None:
        """A version was written; called by whoever wrote it, between rollouts."""
        if not self._asked:
            return
        names: dict[str, list[str]] = {}
        sent: dict[str, list[tuple[Kind, Tensor]]] = {}
        live = {d: {leaf.name: leaf for leaf in self._read(d).leaves} for d in layout.destinations}
        for entry, tensor in zip(layout.entries, arrived, strict=True):
            leaf = live[entry.destination][entry.leaf.name]
            names.setdefault(entry.destination, []).append(leaf.name)
            sent.setdefault(entry.destination, []).append((leaf.kind, tensor.to(leaf.read().dtype)))
        published = {d: Prints.of(of_d) for d, of_d in sent.items()}
        stand = self._stand(names)
        self._expected = version, names, published, {d: prints.others for d, prints in stand.items()}

    def acted(self, version: int) -> None:
        """A rollout with ``version`` has ended; called in its thread."""
        if not self._asked or self._expected is None or self._expected[0] != version:
            return
        _, names, published, arrived = self._expected
        kept = {d: prints.parameters for d, prints in self._stand(names).items()}
        who = f"the collector of this process (pid {os.getpid()})"
        wrong = _deviations(published, Answer(0, version, kept, arrived), who)
        self._asked, self._found = False, Found(True, 1, 1, (), tuple(wrong))

    def _stand(self, names: Mapping[str, Sequence[str]]) -> dict[str, Prints]:
        live = {d: {leaf.name: leaf for leaf in self._read(d).leaves} for d in names}
        return {d: Prints.of((live[d][n].kind, live[d][n].read()) for n in names[d]) for d in names}
