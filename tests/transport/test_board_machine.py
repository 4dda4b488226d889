"""Any sequence of board operations, between real processes, against a model in plain Python.

The model knows of every living reader which version it acts with and which versions it leases; from that
follow the versions, values, states, slots and errors that the board must show after every step.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from rlsync.core.errors import (
    AdoptionTimeout,
    BoardClosed,
    LayoutMismatch,
    PublishError,
    WorkerLost,
)
from rlsync.tensors.layout import Layout
from rlsync.transport.board import BoardReader
from rlsync.transport.contract import Note
from tests.tensors.test_layout import layouts
from tests.tools.counted_board import CountedBoard
from tests.tools.machine_readers import (
    Adoption,
    Image,
    Pool,
    ReaderProcess,
    Report,
    image_of,
    version_tensors,
)

READERS = 4
SOON_S, LATE_S = 0.005, 15.0

which = st.integers(0, READERS - 1)
some_layout = layouts.filter(lambda each: bool(each.owned))
few_slots = st.sampled_from([3, 3, 4])
mostly = st.sampled_from([True, True, False])
modes = st.lists(mostly, min_size=2, max_size=READERS)  # whether each reader takes aliases
doings = st.sampled_from(["publish", "publish", "publish", "break off", "lay out"])
forms = st.sampled_from(["plain", "strided", "conjugate", "parameter"])


@dataclass
class Published:
    """One version: what a reader shows that acts with it, and under which layout it lies in a slot."""

    image: Image
    epoch: int


@dataclass
class Reader:
    """One line of the board as it must be.

    Args:
        line: the version that its line says it adopted; it outlives the process.
        version: the version that it says itself; 0 when it forgot.
        acts: the version whose values it shows; ``None`` when nothing holds them in place.
        leases: the versions whose slots it holds.
        inside: the version in whose adoption it was stopped; 0 when it was not.
    """

    process: ReaderProcess
    pid: int
    alias: bool
    state: str = "running"
    line: int = 0
    version: int = 0
    acts: int | None = 0
    leases: set[int] = field(default_factory=set)
    inside: int = 0

    def adopted(self, version: int) -> None:
        self.line = self.version = self.acts = version
        self.leases = {version} if self.alias else set()
        self.inside = 0


class BoardMachine(RuleBasedStateMachine):
    """The learner is this process; each reader is one of its own.

    Which rules may come next follows from the steps alone, never from how a race between processes ended.
    """

    pool: Pool

    @initialize(layout=some_layout, max_slots=few_slots, modes=modes)
    def open(self, layout: Layout, max_slots: int, modes: list[bool]) -> None:
        self.board = CountedBoard(max_slots)
        self.max_slots = max_slots
        self.readers: dict[int, Reader] = {}
        self.published: dict[int, Published] = {}
        self.notes: dict[tuple[int, Note], bytes] = {}
        self.version = self.newest = self.epoch = self.slots = self.asked = self.asked_from = 0
        self.lay_out(layout)
        for alias in modes:
            self.start(alias, None)

    # ------------------------------------------------------------------ the learner

    @precondition(lambda self: self.tried > 3)
    @rule(layout=some_layout)
    def lay_out_anew(self, layout: Layout) -> None:
        self.lay_out(layout)

    def lay_out(self, layout: Layout) -> None:
        if layout != self.board.layout:
            self.epoch, self.slots, self.tried = self.epoch + 1, 3, 0
        self.board.lay_out(layout)
        assert self.board.layout == layout

    @rule(form=forms, adopts=st.lists(st.none() | which, min_size=1, max_size=5))
    def publish(self, form: str, adopts: list[int | None]) -> None:
        """Several versions; after each, one reader adopts it or none does."""
        for who in adopts:
            expected = self.version + 1 if self.takes_a_slot() else None
            assert self.publish_one(form) == expected
            if who is not None and self.living("running"):
                self.adopt(who)

    def publish_one(self, form: str = "plain") -> int | None:
        layout = self.layout
        tensors = version_tensors(layout, self.version + 1)
        self.tried += 1
        got = self.board.publish([in_form(tensor, form) for tensor in tensors])
        if got is not None:
            self.version = self.newest = got
            self.published[got] = Published(image_of(layout, tensors), self.epoch)
        return got

    @rule(how=st.sampled_from(["too few", "too many", "wrong shape", "broadcast", "breaks off"]))
    def publish_what_does_not_fit(self, how: str) -> None:
        tensors, error = spoiled(version_tensors(self.layout, 10**6), how)
        if how == "breaks off" and (not any(t.is_meta for t in tensors) or not self.takes_a_slot()):
            return
        with pytest.raises(error):
            self.board.publish(tensors)

    @rule(by=st.integers(-3, 5))
    def advance_and_ask(self, by: int) -> None:
        self.board.ledger.advance_to(self.version + by)
        self.version += max(0, by)
        self.asked, self.asked_from = self.asked + 1, self.newest
        assert self.board.ask() == self.asked

    @rule(behind=st.integers(-1, 2), numbers=st.none() | st.sets(st.integers(0, READERS), max_size=3))
    def wait(self, behind: int, numbers: set[int] | None) -> None:
        version = self.newest - behind
        asked = (set(self.readers) or {0}) if numbers is None else numbers  # of nobody, the first is awaited
        lines = {n: self.readers[n].line if n in self.readers else 0 for n in asked}
        missing = [n for n in sorted(asked) if lines[n] < version]
        dead = [n for n in missing if n in self.readers and self.readers[n].state == "dead"]
        if not missing:
            self.board.wait(version, SOON_S, numbers)
            return
        with pytest.raises(WorkerLost if dead else AdoptionTimeout) as caught:
            self.board.wait(version, LATE_S if dead else SOON_S, numbers)
        error = caught.value
        said = error.what if dead else error.where
        for n in dead or missing:
            assert f"worker {n} (pid {self.readers[n].pid if n in self.readers else 0}, " in said
        assert said.count("worker ") == len(dead or missing)

    # ------------------------------------------------------------------ readers come and go

    @precondition(lambda self: len(self.living()) < READERS)
    @rule(alias=mostly, number=st.none() | which)
    def start(self, alias: bool, number: int | None) -> None:
        process = self.pool.take()
        living = self.living()
        free = number if number is not None else min(n for n in range(READERS + 1) if n not in living)
        command = ("attach", self.board.handle, "alias" if alias else "copy", number)
        if free in living:
            with pytest.raises(PublishError, match=f"already reads the board as worker {free}"):
                process.ask(*command)
            self.pool.give_back(process)
            return
        assert process.ask(*command) == free
        self.readers[free] = Reader(process, process.pid, alias)
        for kind in Note:
            self.notes.pop((free, kind), None)

    @precondition(lambda self: self.living("running"))
    @rule(who=which)
    def leave(self, who: int) -> None:
        number = self.pick(who, "running")
        reader = self.readers.pop(number)
        reader.process.ask("detach")
        self.pool.give_back(reader.process)

    @precondition(lambda self: self.living())
    @rule(who=which)
    def kill(self, who: int) -> None:
        """Idle, with a lease or without, stopped, or in the middle of an adoption."""
        reader = self.readers[self.pick(who)]
        reader.process.end()
        reader.state, reader.leases = "dead", set()

    @precondition(lambda self: self.living("running"))
    @rule(who=which)
    def stop(self, who: int) -> None:
        reader = self.readers[self.pick(who, "running")]
        reader.process.signal(signal.SIGSTOP)
        reader.process.wait_until_stopped()
        reader.state = "stopped"

    @precondition(lambda self: self.living("stopped"))
    @rule(who=which)
    def go_on(self, who: int) -> None:
        reader = self.readers[self.pick(who, "stopped")]
        reader.process.signal(signal.SIGCONT)
        reader.process.wait_until_continued()
        reader.state = "running"
        if reader.inside:
            first, then = [reader.inside], [self.newest]
            ways = [first if first == then else first + then]
            if reader.inside not in reader.leases:  # its slot may have been used again, and is refused then
                ways.append(then)
            self.has_adopted(reader, reader.process.answer(), ways)

    # ------------------------------------------------------------------ adoptions

    @precondition(lambda self: self.living("running"))
    @rule(who=which)
    def adopt(self, who: int) -> None:
        reader = self.readers[self.pick(who, "running")]
        way = [self.newest] * (reader.version != self.newest)
        self.has_adopted(reader, reader.process.ask("adopt"), [way])

    @precondition(lambda self: self.newest and self.living("running"))
    @rule(who=which, leased=st.booleans(), meanwhile=st.lists(doings, max_size=4), layout=some_layout)
    def stop_inside_an_adoption(self, who: int, leased: bool, meanwhile: list[str], layout: Layout) -> None:
        """In the middle of reading the slot, or just before the slot that head named is leased."""
        reader = self.one_with_something_to_adopt(who)
        reader.process.tell("adopt_and_stop_inside" if leased else "adopt_and_stop_before_the_lease")
        reader.process.wait_until_stopped()
        reader.state, reader.inside = "stopped", self.newest
        if leased:
            reader.leases.add(self.newest)
        for doing in meanwhile:
            if doing == "publish":
                self.publish("plain", [None])
            elif doing == "break off":
                self.publish_what_does_not_fit("breaks off")
            else:
                self.lay_out(layout)

    @precondition(lambda self: self.newest and self.living("running"))
    @rule(who=which)
    def fail_inside_an_adoption(self, who: int) -> None:
        reader = self.one_with_something_to_adopt(who)
        with pytest.raises(OSError, match="not now"):
            reader.process.ask("adopt_and_fail")

    def one_with_something_to_adopt(self, who: int) -> Reader:
        reader = self.readers[self.pick(who, "running")]
        if reader.version == self.newest:
            self.forget(who)
        return reader

    @precondition(lambda self: self.living("running"))
    @rule(who=which, times=st.integers(1, 4))
    def adopt_while_the_learner_publishes(self, who: int, times: int) -> None:
        number = self.pick(who, "running")
        reader, before = self.readers[number], self.newest
        kept, slots = self.held(without=reader), self.slots
        own = len(reader.leases | {before}) + 1  # while it changes over it may lease two slots
        reader.process.tell("adopt")
        for _ in range(times):
            version = self.version
            if self.publish_one() is None:
                assert len(kept | {self.newest}) + own >= self.max_slots, "a slot was free"
                assert self.version == version
            self.slots = self.board.slot_count
            assert slots <= self.slots <= self.max_slots
        ways = [[v for v in self.published if before <= v and v != reader.version]]
        self.has_adopted(reader, reader.process.answer(), ways, exact=False)

    @precondition(lambda self: self.living("running"))
    @rule(who=which)
    def forget(self, who: int) -> None:
        reader = self.readers[self.pick(who, "running")]
        reader.process.ask("forget")
        reader.version = 0
        if reader.leases:
            reader.leases, reader.acts = set(), None

    @precondition(lambda self: self.living("running"))
    @rule(who=which, kind=st.sampled_from(Note), note=st.binary(max_size=200))
    def leave_a_note(self, who: int, kind: Note, note: bytes) -> None:
        number = self.pick(who, "running")
        self.readers[number].process.ask("leave_note", note, kind)
        self.notes[number, kind] = note

    def has_adopted(
        self, reader: Reader, answer: Adoption, ways: list[list[int]], *, exact: bool = True
    ) -> None:
        """Check what an adoption says, and every version that was applied on the way, bit for bit."""
        version, applied = answer
        taken = [each for each, _ in applied]
        assert taken == sorted(set(taken)), "versions fell"
        assert taken in ways if exact else set(taken) <= set(ways[0])
        assert version == (taken[-1] if taken else reader.version)
        for each, image in applied:
            assert image == self.published[each].image, f"what was applied as version {each} is not it"
        if taken:
            reader.adopted(version)

    # ------------------------------------------------------------------ the end

    @precondition(lambda self: self.tried > 8)
    @rule(layout=some_layout, max_slots=few_slots, modes=modes)
    def close_and_open_anew(self, layout: Layout, max_slots: int, modes: list[bool]) -> None:
        self.close()
        self.open(layout, max_slots, modes)

    def close(self) -> None:
        """Readers keep what they act with, adopt what was published, and know; newcomers are refused."""
        handle, layout = self.board.handle, self.layout
        self.board.close()
        refused: list[Callable[[], object]] = [
            lambda: self.board.publish([]),
            lambda: self.board.lay_out(layout),
            self.board.newest_views,
            self.board.ask,
        ]
        for call in refused:
            with pytest.raises(BoardClosed, match="was closed"):
                call()
        for number in self.living("stopped"):
            self.go_on(list(self.living("stopped")).index(number))
        for number in self.living("running"):
            reader = self.readers[number]
            self.check_report(reader, reader.process.ask("report"), closed=True)
            self.adopt(list(self.living("running")).index(number))
            self.leave(list(self.living("running")).index(number))
        newcomer = self.pool.take()
        with pytest.raises(BoardClosed, match="is gone"):
            newcomer.ask("attach", handle, "copy", None)
        self.pool.give_back(newcomer)
        self.readers.clear()

    def teardown(self) -> None:
        for reader in self.readers.values():
            reader.process.end()
        with suppress(AttributeError):  # it was never opened
            self.board.close()

    # ------------------------------------------------------------------ what always holds

    @invariant()
    def the_board_shows_what_the_model_says(self) -> None:
        board = self.board
        assert (board.version, board.newest) == (self.version, self.newest)
        assert board.slot_count == self.slots <= self.max_slots
        for number in range(READERS + 1):
            for kind in Note:
                assert board.note(number, kind) == self.notes.get((number, kind))
        states = {status.reader: status for status in board.status()}
        assert sorted(states) == sorted(self.readers)
        for number, reader in self.readers.items():
            status = states[number]
            assert (status.pid, status.state) == (reader.pid, reader.state)
            assert status.alive == (reader.state != "dead")
            assert status.adopted_version == reader.line
            assert status.lag_versions == self.newest - reader.line
            assert board.lives(number) == status.alive
        lines = {number: reader.line for number, reader in self.readers.items()}
        assert board.adopted(READERS + 1) == [lines.get(number, 0) for number in range(READERS + 1)]
        newest = self.published.get(self.newest)
        if newest is None or newest.epoch != self.epoch:
            with pytest.raises(BoardClosed):
                board.newest_views()
        else:
            assert image_of(self.layout, board.newest_views()) == newest.image

    @invariant()
    def what_acts_stays_as_it_was_adopted(self) -> None:
        for number in self.living("running"):
            reader = self.readers[number]
            self.check_report(reader, reader.process.ask("report"), closed=False)

    def check_report(self, reader: Reader, report: Report, closed: bool) -> None:
        assert (report.version, report.newest) == (reader.version, self.newest)
        about_it = reader.version >= max(1, self.asked_from)
        assert report.asked == (self.asked if about_it else 0)
        assert (report.closed_by_learner, report.learner_died) == (closed, False)
        if reader.acts is not None:
            shown = self.published[reader.acts].image if reader.acts else None
            assert report.acts == shown, f"it does not act with version {reader.acts}"

    # ------------------------------------------------------------------ the model

    @property
    def layout(self) -> Layout:
        layout = self.board.layout
        assert layout is not None
        return layout

    def living(self, state: str = "") -> list[int]:
        found = sorted(n for n, reader in self.readers.items() if reader.state != "dead")
        return [n for n in found if state in ("", self.readers[n].state)]

    def pick(self, who: int, state: str = "") -> int:
        found = self.living(state)
        return found[who % len(found)]

    def held(self, without: Reader | None = None) -> set[int]:
        """Versions in slots of the present layout that no publish may touch."""
        leases = [r.leases for r in self.readers.values() if r is not without]
        held = {self.newest}.union(*leases)
        return {v for v in held if v in self.published and self.published[v].epoch == self.epoch}

    def takes_a_slot(self) -> bool:
        """Whether a publish finds a slot now; one more is made only when all there are are held."""
        if len(self.held()) < self.slots:
            return True
        if self.slots == self.max_slots:
            return False
        self.slots += 1
        return True


def in_form(tensor: torch.Tensor, form: str) -> torch.Tensor:
    """The same numbers, bit for bit, as another kind of tensor."""
    if form == "strided":
        wide = torch.empty((*tensor.shape, 2), dtype=tensor.dtype)
        wide[..., 0] = tensor
        return wide[..., 0]
    if form == "conjugate" and tensor.is_complex():
        return tensor.conj().resolve_conj().conj()
    if form == "parameter" and tensor.is_floating_point():
        return torch.nn.Parameter(tensor)
    return tensor


def spoiled(tensors: list[torch.Tensor], how: str) -> tuple[list[torch.Tensor], type[Exception]]:
    """Tensors that a publish must refuse; "breaks off" is noticed when some are written."""
    *others, last = tensors
    if how == "too few":
        return others, LayoutMismatch
    if how == "too many":
        return [*tensors, last], LayoutMismatch
    if how == "wrong shape":
        return [*others, torch.zeros(7, 7, 7)], LayoutMismatch
    if how == "broadcast":
        return [*others, last.unsqueeze(0)], LayoutMismatch
    at = max(i for i, tensor in enumerate(tensors) if i == 0 or tensor.numel())
    if tensors[at].numel():
        tensors[at] = torch.empty_like(tensors[at], device="meta")
    return tensors, NotImplementedError


@pytest.mark.processes
@pytest.mark.timeout(500)  # time to find the shortest sequence that fails
@pytest.mark.parametrize("sequences", [8, pytest.param(50, marks=pytest.mark.thorough)])
def test_any_sequence_of_operations_between_real_processes_keeps_the_laws_of_a_board(sequences: int) -> None:
    pool = Pool()
    machine = type("Machine", (BoardMachine,), {"pool": pool})
    try:
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=sequences,
                stateful_step_count=40,
                deadline=None,
                derandomize=True,
                suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
            ),
        )
    finally:
        pool.end()


# ---------------------------------------------------------------------------------- known faults


def test_a_closed_board_that_is_watched_says_that_it_was_closed() -> None:
    board = CountedBoard()
    reader = BoardReader(board.handle, lambda version, layout, views: False)
    board.close()
    try:
        with pytest.raises(BoardClosed):
            board.wait(1, SOON_S)
    finally:
        reader.close()


def test_a_layout_without_leaves_can_be_published() -> None:
    board = CountedBoard()
    board.lay_out(Layout.build({}))
    try:
        assert board.publish([]) == 1
    finally:
        board.close()
