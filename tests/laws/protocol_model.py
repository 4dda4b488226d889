"""The board's protocol as a model small enough to explore to the last state.

One writer publishes a few versions; readers adopt them and act. Whoever lives may die at any step. A
version's data is written and read in two halves. Locks are what the kernel gives: exclusive against
shared, gone with their holder. ``head`` is read as the hint that it is: a reader may see any value that
head ever had, only never an older one than it saw before (what every CPU grants for one word).

The switches take one part of the protocol away each, to show what it is for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

EMPTY, WRITING, READY = "empty", "writing", "ready"
NONE = -1


class Slot(NamedTuple):
    state: str = EMPTY
    version: int = 0
    first: int = 0
    second: int = 0


class Writer(NamedTuple):
    at: str = "idle"
    slot: int = NONE
    newest: int = NONE  # the slot it remembers as the newest


class Reader(NamedTuple):
    mode: str
    at: str = "idle"
    seen: int = 0  # the newest head it saw
    version: int = 0  # the version it acts with
    lease: int = NONE  # the slot it acts from (alias)
    taken: int = NONE  # the slot it locked to adopt ``seen``
    first: int = 0  # the half it read already


class Board(NamedTuple):
    """A state but for its readers, none of which changes anything here."""

    writer: Writer
    slots: tuple[Slot, ...]
    heads: tuple[int, ...]  # the slot of version 1, 2, ...: head names the last


WriterStep = tuple[str, Board, str]  # what was done, what came of it, what law it broke
ReaderStep = tuple[str, Reader, str]
State = tuple[int, ...]  # the number of the board, then those of the readers

HOLDING = ("locked", "marked", "half", "full", "numbered", "ready")
WRITE_STEPS = (*HOLDING, "unlocked", "noted", "idle")
DEAD_WRITER = Writer("dead")


@dataclass(frozen=True)
class Protocol:
    """What is explored.

    Args:
        slots: K.
        versions: how many are published at most.
        modes: ``"alias"`` or ``"copy"``, one for each reader.
        leases: readers lock what they read.
        equality: readers compare the slot's version with the one that head named.
        spares_newest: the writer never takes the newest slot.
        coherent: a reader that saw a head never sees an older one.
        deaths: whoever lives may die.
        interrupts: an exception may end a publish at any step; the writer unlocks and goes on.
        looks: who looks whether a byte is locked holds it meanwhile (flock): any lock may be refused.
        newest: where the writer looks up which slot is the newest: ``"head"``, or a ``"variable"`` of
            its own that it sets just before head.
    """

    slots: int
    versions: int
    modes: tuple[str, ...]
    leases: bool = True
    equality: bool = True
    spares_newest: bool = True
    coherent: bool = True
    deaths: bool = True
    interrupts: bool = False
    looks: bool = False
    newest: str = "head"

    def start(self) -> tuple[Board, list[Reader]]:
        return Board(Writer(), (Slot(),) * self.slots, ()), [Reader(mode) for mode in self.modes]

    # ------------------------------------------------------------------------------ writer

    def writer_steps(self, state: Board, shared: frozenset[int]) -> Iterator[WriterStep]:
        """What the writer may do; ``shared`` are the slots that readers hold."""
        at, slot, newest = state.writer
        if at == "dead":
            return
        if self.deaths:
            yield "dies", state._replace(writer=DEAD_WRITER), ""
        version = len(state.heads) + 1
        if at == "idle":
            if version <= self.versions:
                yield from self._picks(state, shared)
            return
        if self.interrupts:
            yield "is interrupted", state._replace(writer=Writer("idle", NONE, newest)), ""
        after = WRITE_STEPS[WRITE_STEPS.index(at) + 1]
        newest = slot if at == "unlocked" and self.newest == "variable" else newest
        moved = state._replace(writer=Writer(after, slot if after != "idle" else NONE, newest))
        line = state.slots[slot]
        match at:
            case "locked":
                line, label = line._replace(state=WRITING), f"marks slot {slot} as being written"
            case "marked":
                line, label = line._replace(first=version), f"writes the first half of {version}"
            case "half":
                line, label = line._replace(second=version), f"writes the second half of {version}"
            case "full":
                line, label = line._replace(version=version), f"numbers slot {slot}: {version}"
            case "numbered":
                line, label = line._replace(state=READY), f"marks slot {slot} as ready"
            case "ready":
                label = f"unlocks slot {slot}"
            case "unlocked":
                label = f"notes slot {slot} as the newest"
            case _:
                label = f"points head at version {version} in slot {slot}"
                moved = moved._replace(heads=(*state.heads, slot))
        slots = (*state.slots[:slot], line, *state.slots[slot + 1 :])
        yield label, moved._replace(slots=slots), ""

    def _picks(self, state: Board, shared: frozenset[int]) -> Iterator[WriterStep]:
        of_head = state.heads[-1] if state.heads else NONE
        newest = of_head if self.newest == "head" else state.writer.newest
        spared = newest if self.spares_newest else NONE
        free = [n for n in range(self.slots) if n != spared and n not in shared]
        for slot in free if self.looks else free[:1]:
            locked = state.writer._replace(at="locked", slot=slot)
            yield f"locks slot {slot}", state._replace(writer=locked), ""
        if not free or self.looks:
            yield "finds no slot", state, "coalesced"

    def held(self, reader: Reader) -> frozenset[int]:
        """The slots that the writer cannot lock for this reader."""
        return frozenset({reader.lease, reader.taken}) - {NONE} if self.leases else frozenset()

    # ------------------------------------------------------------------------------ readers

    def reader_steps(self, state: Board, reader: Reader) -> Iterator[ReaderStep]:
        """What this reader may do."""
        if reader.at == "dead":
            return
        if self.deaths:
            yield "dies", Reader(reader.mode, "dead"), ""
        slot = state.heads[reader.seen - 1] if reader.seen else NONE
        match reader.at:
            case "idle":
                yield from self._look(state, reader)
            case "looked":
                exclusive = state.writer.at in HOLDING and state.writer.slot == slot and self.leases
                if exclusive or self.looks:
                    yield f"finds slot {slot} locked", reader._replace(at="idle"), ""
                if not exclusive:
                    taken = reader._replace(at="locked", taken=slot)
                    yield f"locks slot {slot} for version {reader.seen}", taken, ""
            case "locked":
                yield self._check(state, reader)
            case "checked":
                first = state.slots[slot].first
                read = reader._replace(at="copied half", first=first)
                yield f"copies the first half: {first}", read, ""
            case "copied half":
                broken = self._judge(state, reader, reader.seen, slot)
                second = state.slots[slot].second
                read = reader._replace(at="copied", version=reader.seen, first=0)
                yield f"copies the second half: {second}", read, broken
            case "copied":
                free = reader._replace(at="idle", taken=NONE)
                yield f"unlocks slot {slot}", free, ""
            case "pointed":
                free = reader._replace(at="idle", lease=reader.taken, taken=NONE)
                yield f"releases slot {reader.lease}", free, ""
            case "acting":
                broken = self._judge(state, reader, reader.version, reader.lease)
                second = state.slots[reader.lease].second
                yield f"acts: second half {second}", reader._replace(at="idle", first=0), broken

    def _look(self, state: Board, reader: Reader) -> Iterator[ReaderStep]:
        oldest = max(reader.seen, 1) if self.coherent else 1
        for head in range(oldest, len(state.heads) + 1):
            if head != reader.version:
                yield f"sees head at {head}", reader._replace(at="looked", seen=head), ""
        if reader.lease != NONE:
            first = state.slots[reader.lease].first
            acting = reader._replace(at="acting", first=first)
            yield f"acts: first half {first}", acting, ""

    def _check(self, state: Board, reader: Reader) -> ReaderStep:
        line = state.slots[reader.taken]
        fits = line.state == READY and (line.version == reader.seen or not self.equality)
        if not fits:
            back = reader._replace(at="idle", taken=NONE)
            return f"finds slot {reader.taken} is not version {reader.seen}", back, ""
        broken = "regressing" if reader.seen < reader.version else ""
        if reader.mode == "copy":
            return "finds it as head said", reader._replace(at="checked"), broken
        pointed = reader._replace(at="pointed", version=reader.seen)
        return f"points at slot {reader.taken}", pointed, broken

    def _judge(self, state: Board, reader: Reader, claimed: int, slot: int) -> str:
        first, second = reader.first, state.slots[slot].second
        if first != second:
            return "torn"
        if first > len(state.heads):
            return "unpublished"
        return "" if first == claimed else "mislabelled"


def unreadable(state: Board) -> bool:
    """Whether the version that head names is not whole in its slot."""
    newest = len(state.heads)
    return newest > 0 and state.slots[state.heads[-1]] != Slot(READY, newest, newest, newest)


@dataclass
class Exploration:
    """What was found: the number of states, and the shortest way to each kind of violation."""

    states: int = 0
    complete: bool = False
    violations: dict[str, list[str]] = field(default_factory=dict)

    def story(self, kind: str) -> str:
        """The shortest counterexample, one step a line."""
        steps = self.violations.get(kind, [])
        return "\n".join([f"{kind}:", *(f"  {i:2}  {step}" for i, step in enumerate(steps, 1))])


class _Known:
    """The steps of a protocol, worked out once for all states that share a board or a reader, by number."""

    def __init__(self, protocol: Protocol) -> None:
        self._protocol = protocol
        self._numbers: dict[Board | Reader, int] = {}
        self._named: list[Any] = []  # by number
        self._held: dict[State, frozenset[int]] = {}  # by the readers' numbers
        self._steps: dict[tuple[int, int | frozenset[int]], list[tuple[str, int, str]]] = {}

    def start(self) -> State:
        board, readers = self._protocol.start()
        return (self._number(board), *sorted(map(self._number, readers)))

    def steps(self, state: State) -> Iterator[tuple[str, State, str]]:
        board, *readers = state
        for label, moved, broken in self._of(board, self._held_by(state[1:])):
            yield label, (moved, *readers), broken
        for i, reader in enumerate(readers):
            if i and reader == readers[i - 1]:
                continue  # readers are interchangeable
            for label, new, broken in self._of(board, reader):
                moved_readers = readers.copy()
                moved_readers[i] = new
                moved_readers.sort()
                yield label, (board, *moved_readers), broken

    def is_unreadable(self, state: State) -> bool:
        return unreadable(self._named[state[0]])

    def _held_by(self, readers: State) -> frozenset[int]:
        if readers not in self._held:
            held = (self._protocol.held(self._named[reader]) for reader in readers)
            self._held[readers] = frozenset[int]().union(*held)
        return self._held[readers]

    def _of(self, board: int, by: int | frozenset[int]) -> list[tuple[str, int, str]]:
        """The steps of a reader, or of the writer while those slots are held."""
        steps = self._steps.get((board, by))
        if steps is None:
            at = self._named[board]
            if isinstance(by, int):
                who, found = (
                    f"{self._named[by].mode} reader",
                    self._protocol.reader_steps(at, self._named[by]),
                )
            else:
                who, found = "writer", self._protocol.writer_steps(at, by)
            steps = [(f"{who} {label}", self._number(new), broken) for label, new, broken in found]
            self._steps[board, by] = steps
        return steps

    def _number(self, named: Board | Reader) -> int:
        if named not in self._numbers:
            self._numbers[named] = len(self._named)
            self._named.append(named)
        return self._numbers[named]


def explore(protocol: Protocol, until: str = "", most: int = 2_000_000) -> Exploration:
    """Visit every reachable state, nearest first; stop early at the first violation of kind ``until``."""
    known = _Known(protocol)
    start = known.start()
    came: dict[State, tuple[State, str] | None] = {start: None}
    found = Exploration()
    queue = deque([start])
    while queue:
        state = queue.popleft()
        for label, moved, broken in known.steps(state):
            kinds = [broken] if broken else []
            if moved not in came:
                came[moved] = (state, label)
                queue.append(moved)
                if known.is_unreadable(moved):
                    kinds.append("unreadable")
            for kind in kinds:
                if kind not in found.violations:
                    found.violations[kind] = [*_way(came, state), label]
        found.states = len(came)
        if until in found.violations or found.states > most:
            return found
    found.complete = True
    return found


def _way(came: dict[State, tuple[State, str] | None], state: State) -> list[str]:
    steps: list[str] = []
    while (link := came[state]) is not None:
        state, label = link
        steps.append(label)
    return steps[::-1]
