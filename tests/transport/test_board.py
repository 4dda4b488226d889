"""The board between real processes, whatever happens to them."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import signal
import struct
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from rlsync.core.errors import AdoptionTimeout, BoardClosed, ConfigError, PublishError, WorkerLost
from rlsync.core.ledger import Stamp
from rlsync.tensors.layout import Layout, LeafSpec
from rlsync.transport.board import BoardReader
from rlsync.transport.board import format as fmt
from rlsync.transport.board.format import BoardWatch, SlotState
from rlsync.transport.board.slots import SlotCopy
from rlsync.transport.board.writer import BoardWriter
from rlsync.transport.shared_file import KIND_VARIABLE, SharedFile, kind
from tests.conftest import LeakCheck
from tests.tools.board_workers import (
    Acts,
    Remote,
    filled,
    low_high,
    open_fds,
    plain_layout,
    shared_mappings,
)
from tests.tools.counted_board import CountedBoard

MEMFD = "/memfd:rlsync-board (deleted)"
LAYOUT = plain_layout()


def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


@pytest.fixture
def memfd(monkeypatch: pytest.MonkeyPatch) -> None:
    """For what holds of this kind of shared file alone."""
    monkeypatch.setenv(KIND_VARIABLE, "memfd")


@pytest.fixture
def start() -> Iterator[Callable[..., Remote]]:
    """Starts processes, and ends them with the test."""
    remotes: list[Remote] = []

    def begin(start_method: str = "forkserver") -> Remote:
        remotes.append(Remote(start_method))
        return remotes[-1]

    yield begin
    for remote in remotes:
        remote.end()


@pytest.fixture
def board() -> Iterator[CountedBoard]:
    board = CountedBoard()
    board.lay_out(LAYOUT)
    yield board
    board.close()


def publish(board: CountedBoard, number: float) -> int | None:
    assert board.layout is not None
    return board.publish(filled(board.layout, number))


def attach(board: CountedBoard, mode: str, number: int | None = None) -> tuple[BoardReader, Acts]:
    acts = Acts(mode)
    return BoardReader(board.handle, acts, number), acts


def fail_half_way(board: CountedBoard) -> None:
    """A publish that raises when some of its leaves are written."""

    class Spoiled(torch.Tensor):
        @classmethod
        def __torch_function__(
            cls, func: object, types: object, args: tuple = (), kwargs: object = None
        ) -> object:
            if func is not torch._foreach_copy_:
                return super().__torch_function__(func, types, args, kwargs or {})
            views, tensors = args
            for view, tensor in zip(views[:-1], tensors[:-1], strict=True):
                view.copy_(tensor)
            raise RuntimeError("half way")

    *others, last = filled(board.layout, 66.0)
    board.publish([*others, last.as_subclass(Spoiled)])


def bytes_in_memory(board: CountedBoard) -> int:
    return os.fstat(board._file.fd).st_blocks * 512


# ---------------------------------------------------------------------------------- resources


@pytest.mark.usefixtures("memfd")
@pytest.mark.processes
def test_a_reader_and_a_writer_hold_one_descriptor_each_however_many_tensors(
    start: Callable[..., Remote],
) -> None:
    remote = start()
    gc.collect()
    theirs, mine = remote.ask("fds"), open_fds()
    their_maps, my_maps = remote.ask("mappings"), shared_mappings()
    board = CountedBoard()
    board.lay_out(plain_layout(tensors=1000, size=16))
    remote.ask("attach", board.handle, "alias")
    for number in range(1, 6):
        publish(board, number)
        assert remote.ask("adopt") == number
        assert remote.ask("values") == (number, number)

    for before, after in ((theirs, remote.ask("fds")), (mine, open_fds())):
        assert sorted([*before, MEMFD]) == after
    for maps_before, maps_after in ((their_maps, remote.ask("mappings")), (my_maps, shared_mappings())):
        new = Counter(maps_after) - Counter(maps_before)  # an earlier test's board may still be mapped here
        assert set(new) == {MEMFD}, "nothing in /dev/shm"
    board.close()
    assert open_fds() == mine


@pytest.mark.seconds
def test_two_hundred_boards_leave_descriptors_and_mappings_as_they_were(
    no_leaks: LeakCheck,
) -> None:
    def cycle() -> None:
        board = CountedBoard()
        board.lay_out(LAYOUT)
        readers = [attach(board, mode)[0] for mode in ("alias", "copy")]
        for number in range(1, 4):
            publish(board, number)
            assert [reader.adopt() for reader in readers] == [number, number]
        for reader in readers:
            reader.close()
        board.close()

    cycle()
    no_leaks.rebase()
    maps = len(Path("/proc/self/maps").read_text().splitlines())
    for _ in range(200):
        cycle()
    assert no_leaks.leaks() == {}
    assert len(Path("/proc/self/maps").read_text().splitlines()) < maps + 50


@pytest.mark.seconds
def test_a_board_that_is_only_dropped_is_closed_too(no_leaks: LeakCheck) -> None:
    board = CountedBoard()
    board.lay_out(LAYOUT)
    handle = board.handle
    del board
    assert no_leaks.leaks() == {}
    with pytest.raises(BoardClosed):
        BoardReader(handle, Acts("copy"))


@pytest.mark.usefixtures("memfd")
def test_untouched_slots_cost_no_memory_and_three_are_there_from_the_start() -> None:
    size = 1_000_000
    board = CountedBoard()
    board.lay_out(plain_layout(tensors=1, size=size))
    image = 4 * size
    assert 3 * image <= bytes_in_memory(board) < 3.2 * image
    for number in range(1, 20):
        publish(board, number)
    assert bytes_in_memory(board) < 3.2 * image
    assert board.slot_count == 3
    board.close()


# ---------------------------------------------------------------------------------- leases


def test_slots_grow_with_leases_and_every_lease_keeps_its_values() -> None:
    board = CountedBoard()
    board.lay_out(LAYOUT)
    readers = []
    for number in range(1, 7):
        publish(board, number)
        readers.append(attach(board, "alias"))
        assert readers[-1][0].adopt() == number
    for number in range(7, 60):
        assert publish(board, number) == number
    assert board.slot_count == len(readers) + 2
    for number, (_, acts) in enumerate(readers, 1):
        assert low_high(acts.tensors) == (number, number)

    for reader, acts in readers:
        assert reader.adopt() == 59
        assert low_high(acts.tensors) == (59, 59)
    for number in range(60, 100):
        publish(board, number)
    assert board.slot_count == len(readers) + 2, "free slots are used again"
    in_use = {fmt.unpack_head(board._words[fmt.HEAD])[1]}
    for number in range(100, 110):
        publish(board, number)
        in_use.add(fmt.unpack_head(board._words[fmt.HEAD])[1])
    assert in_use <= {0, 1, 2}, "the lowest free slot is taken"
    for reader, _ in readers:
        reader.close()
    board.close()


@pytest.mark.parametrize("max_slots", [2, 0, -1, fmt.MAX_SLOTS + 1])
def test_a_bad_number_of_slots_is_refused_in_three_lines(max_slots: int) -> None:
    with pytest.raises(ConfigError) as caught:
        CountedBoard(max_slots=max_slots)
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize(("max_slots", "got"), [(3, [3, None]), (4, [3, 4])])
def test_twice_the_readers_plus_two_slots_never_coalesce(max_slots: int, got: list[int | None]) -> None:
    """For the moment of an adoption a reader leases the slot it leaves and the one it takes."""
    board = CountedBoard(max_slots=max_slots)
    board.lay_out(LAYOUT)
    in_the_middle: list[int | None] = []

    def apply(version: int, layout: Layout, views: Sequence[torch.Tensor]) -> bool:
        if version == 2:
            in_the_middle.extend(publish(board, number) for number in (3.0, 4.0))
        return True

    reader = BoardReader(board.handle, apply)
    publish(board, 1.0)
    reader.adopt()
    publish(board, 2.0)
    reader.adopt()
    reader.close()
    board.close()
    assert in_the_middle == got


def test_a_publish_tries_no_more_slots_where_many_are_leased(
    board: CountedBoard, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers = []
    for number in range(40):  # each has a version of its own
        publish(board, float(number))
        reader, _ = attach(board, "alias")
        reader.adopt()
        readers.append(reader)
    publish(board, 41.0)
    publish(board, 42.0)
    tried: list[int] = []
    try_lock = type(board._file).try_lock

    def counted(file: SharedFile, at: int, *, exclusive: bool) -> bool:
        tried.append(at)
        return try_lock(file, at, exclusive=exclusive)

    monkeypatch.setattr(type(board._file), "try_lock", counted)
    publish(board, 43.0)
    assert len(tried) == 1
    monkeypatch.undo()
    slots = board.slot_count
    for reader in readers:
        reader.close()
    for number in range(80):  # all are free again, and taken in turn
        publish(board, float(number))
    assert board.slot_count == slots


@pytest.mark.parametrize("mode", ["alias", "copy"])
def test_publishes_in_the_middle_of_an_adoption_do_not_reach_what_is_being_read(
    board: CountedBoard, mode: str
) -> None:
    halves: list[torch.Tensor] = []

    def apply(version: int, layout: Layout, views: Sequence[torch.Tensor]) -> bool:
        halves[:] = [view[:500].clone() for view in views]
        for number in range(board.version + 1, board.version + 20):
            publish(board, number)
        halves.extend(view[500:].clone() for view in views)
        return mode == "alias"

    reader = BoardReader(board.handle, apply)
    publish(board, 1.0)
    line = fmt.reader_line(reader.reader)
    for number in range(1, 20):
        # It adopts what head named, and goes on until it has the newest: stop it at the first.
        board._words[line + fmt.READER_ADOPTED] = 0
        head, reader_head = board._words[fmt.HEAD], reader._head
        assert head != reader_head
        version, slot = fmt.unpack_head(head)
        assert reader._lease_slot(version, slot)
        reader._take(head, version, slot)
        assert reader.version == version
        assert low_high(halves) == (version, version), f"round {number}"
    reader.close()


def test_without_leases_the_same_read_is_torn(board: CountedBoard, monkeypatch: pytest.MonkeyPatch) -> None:
    """That the test above can fail."""
    halves: list[torch.Tensor] = []

    def apply(version: int, layout: Layout, views: Sequence[torch.Tensor]) -> bool:
        halves.extend(view[:500].clone() for view in views)
        for number in (2.0, 3.0):
            publish(board, number)
        halves.extend(view[500:].clone() for view in views)
        return False

    reader = BoardReader(board.handle, apply)
    publish(board, 1.0)
    monkeypatch.setattr(kind(), "try_lock", lambda *_, **__: True)
    head = board._words[fmt.HEAD]
    reader._take(head, *fmt.unpack_head(head))
    assert low_high(halves) == (1.0, 3.0)
    reader.close()


@pytest.mark.parametrize(
    ("state", "version"),
    [(SlotState.WRITING, 1), (SlotState.EMPTY, 1), (SlotState.RETIRED, 1), (SlotState.READY, 2)],
)
def test_a_slot_that_is_not_what_head_named_is_never_taken(
    board: CountedBoard, state: SlotState, version: int
) -> None:
    reader, _ = attach(board, "copy")
    publish(board, 1.0)
    slot = fmt.unpack_head(board._words[fmt.HEAD])[1]
    line = fmt.slot_line(slot)
    board._words[line + fmt.SLOT_STATE] = state
    board._words[line + fmt.SLOT_VERSION] = version
    assert not reader._lease_slot(1, slot)
    assert board._file.try_lock(fmt.SLOT_LOCK + slot, exclusive=True), "it gave the lock back"
    board._file.unlock(fmt.SLOT_LOCK + slot)
    board._words[line + fmt.SLOT_STATE] = SlotState.READY
    board._words[line + fmt.SLOT_VERSION] = 1
    assert reader._lease_slot(1, slot)
    reader.close()


def test_an_adoption_that_fails_leaves_the_old_version_and_the_next_one_takes_the_newest(
    board: CountedBoard,
) -> None:
    acts, fail = Acts("alias"), [False]

    def apply(version: int, layout: Layout, views: Sequence[torch.Tensor]) -> bool:
        if fail[0]:
            raise OSError("not now")
        return acts(version, layout, views)

    reader = BoardReader(board.handle, apply)
    publish(board, 1.0)
    assert reader.adopt() == 1
    publish(board, 2.0)
    fail[0] = True
    with pytest.raises(OSError, match="not now"):
        reader.adopt()
    assert reader.version == 1
    assert board.status()[0].adopted_version == 1
    for number in range(3, 12):
        publish(board, number)
    assert low_high(acts.tensors) == (1.0, 1.0), "the old lease is kept"
    assert board.slot_count == 3, "the new one is not"
    fail[0] = False
    assert reader.adopt() == 11
    assert low_high(acts.tensors) == (11.0, 11.0)
    reader.close()


def test_forgetting_gives_the_lease_back(board: CountedBoard) -> None:
    reader, _ = attach(board, "alias")
    for number in range(1, 10):
        publish(board, number)
        assert reader.adopt() == number
        reader.forget()
    assert board.slot_count == 3
    reader.close()


# ---------------------------------------------------------------------------------- the learner


def test_publishing_before_laying_out_or_after_closing_is_refused() -> None:
    board = CountedBoard()
    with pytest.raises(BoardClosed, match="nothing is laid out"):
        board.publish([torch.ones(1)])
    with pytest.raises(BoardClosed, match="nothing was published"):
        board.newest_views()
    board.close()
    board.close()
    for call in (lambda: board.publish([]), lambda: board.lay_out(LAYOUT), board.newest_views):
        with pytest.raises(BoardClosed, match="was closed"):
            call()


def test_a_publish_that_fails_half_way_leaves_the_last_version_to_readers_and_late_joiners(
    board: CountedBoard,
) -> None:
    reader, acts = attach(board, "copy")
    publish(board, 1.0)
    for _ in range(5):
        with pytest.raises(RuntimeError, match="half way"):
            fail_half_way(board)
    assert board.version == 1
    assert reader.adopt() == 1
    late, late_acts = attach(board, "alias")
    assert late.adopt() == 1
    assert low_high(acts.tensors) == low_high(late_acts.tensors) == (1.0, 1.0)
    assert publish(board, 2.0) == 2
    assert board.slot_count == 3
    reader.close()
    late.close()


def test_an_interrupt_just_before_head_moves_leaves_the_slot_that_head_names_alone(
    board: CountedBoard,
) -> None:
    class InterruptedAtHead:
        def __init__(self, words: memoryview) -> None:
            self.words = words

        def __getitem__(self, at: int) -> int:
            return self.words[at]

        def __setitem__(self, at: int, value: int) -> None:
            if at == fmt.HEAD:
                raise KeyboardInterrupt
            self.words[at] = value

    publish(board, 1.0)
    words = board._words
    board._words = InterruptedAtHead(words)  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        publish(board, 2.0)
    board._words = words
    # The learner lives on and is interrupted again, or killed, in the middle of the next publish.
    with pytest.raises(RuntimeError, match="half way"):
        fail_half_way(board)
    version, slot = fmt.unpack_head(words[fmt.HEAD])
    line = fmt.slot_line(slot)
    assert words[line + fmt.SLOT_STATE] == SlotState.READY
    assert words[line + fmt.SLOT_VERSION] == version


@pytest.mark.processes
def test_a_forked_child_of_the_learner_cannot_publish(board: CountedBoard) -> None:
    publish(board, 1.0)
    child = os.fork()
    if child == 0:
        try:
            publish(board, 2.0)
        except BoardClosed:
            board.close()
            os._exit(7)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7
    reader, _ = attach(board, "copy")
    assert not reader.closed_by_learner, "the child's close is not the learner's"
    assert reader.adopt() == 1
    assert publish(board, 2.0) == 2
    reader.close()


# ---------------------------------------------------------------------------------- notes


@pytest.mark.processes
def test_a_reader_leaves_a_note_that_the_learner_reads(
    board: CountedBoard, start: Callable[..., Remote]
) -> None:
    remote = start()
    remote.ask("attach", board.handle, "copy", 2)
    assert board.note(2) is None
    for note in (b"first", b"", bytes(range(256)) * 1000, b"last"):
        remote.ask("leave_note", note)
        assert board.note(2) == note
    assert board.note(1) is None
    publish(board, 1.0)
    assert remote.ask("adopt") == 1
    assert remote.ask("values") == (1.0, 1.0), "a note lies beside the slots"
    assert board.note(2) == b"last"
    remote.kill()
    assert board.note(2) == b"last"
    reader, _ = attach(board, "copy", 2)
    assert board.note(2) is None, "a newcomer begins without one"
    reader.close()


def test_a_note_without_room_is_refused_and_the_old_one_stays(board: CountedBoard) -> None:
    reader, _ = attach(board, "copy", 0)
    reader.leave_note(b"small")
    noise = random.Random(0).randbytes(fmt.NOTE_BYTES + 1)
    with pytest.raises(PublishError, match="no room") as caught:
        reader.leave_note(noise)
    assert len(str(caught.value).splitlines()) == 3
    assert board.note(0) == b"small"
    reader.close()


def test_notes_of_the_first_and_the_last_reader_do_not_touch_what_lies_beside_them(
    board: CountedBoard,
) -> None:
    ends = [attach(board, "alias", number) for number in (0, fmt.MAX_READERS - 1)]
    publish(board, 1.0)
    noise = random.Random(0).randbytes(fmt.NOTE_BYTES - 1000)
    for reader, _ in ends:
        reader.adopt()
        reader.leave_note(noise)
    for reader, acts in ends:
        assert board.note(reader.reader) == noise
        assert low_high(acts.tensors) == (1.0, 1.0)
    assert [s.reader for s in board.status()] == [0, fmt.MAX_READERS - 1]
    for reader, _ in ends:
        reader.close()


# ---------------------------------------------------------------------------------- attaching


@pytest.mark.processes
def test_two_living_workers_cannot_have_one_number(board: CountedBoard, start: Callable[..., Remote]) -> None:
    remote = start()
    remote.ask("attach", board.handle, "copy", 4)
    fds = open_fds()
    with pytest.raises(PublishError, match="already reads the board as worker 4") as caught:
        attach(board, "copy", 4)
    assert len(str(caught.value).splitlines()) == 3
    assert open_fds() == fds


def test_a_reader_number_beyond_the_board_is_refused(board: CountedBoard) -> None:
    for number in (-1, fmt.MAX_READERS, 5000):
        with pytest.raises((ConfigError, PublishError)):
            attach(board, "copy", number)


def test_when_the_learner_closes_readers_keep_what_they_have_and_newcomers_are_refused() -> None:
    board = CountedBoard()
    board.lay_out(LAYOUT)
    handle = board.handle
    reader, acts = attach(board, "alias")
    publish(board, 1.0)
    reader.adopt()
    assert not reader.closed_by_learner
    board.close()
    assert reader.closed_by_learner
    assert reader.adopt() == 1
    assert low_high(acts.tensors) == (1.0, 1.0)
    with pytest.raises(BoardClosed, match="is gone") as caught:
        BoardReader(handle, acts)
    assert len(str(caught.value).splitlines()) == 3
    reader.close()


@pytest.mark.usefixtures("memfd")
def test_another_board_at_the_same_address_is_not_taken_for_the_old_one() -> None:
    old = CountedBoard()
    handle = old.handle
    old.close()
    new = CountedBoard()
    assert new.handle.address == handle.address, "the descriptor's number is used again"
    fds = open_fds()
    with pytest.raises(BoardClosed, match="is gone"):
        BoardReader(handle, Acts("copy"))
    assert open_fds() == fds
    new.close()


@pytest.mark.usefixtures("memfd")
@pytest.mark.processes
def test_another_file_at_the_address_of_a_closed_board_is_refused(
    start: Callable[..., Remote], tmp_path: Path
) -> None:
    board = CountedBoard()
    handle = board.handle
    board.close()
    file = (tmp_path / "log").open("wb")
    assert handle.address.path.endswith(f"/{file.fileno()}"), "the number is used again"
    remote = start()
    try:
        remote.ask("attach", handle, "copy")
    except BoardClosed:
        return
    except EOFError:
        remote.process.join(10)
        pytest.fail(f"the worker died of {signal.Signals(-remote.process.exitcode).name}")
    finally:
        file.close()
    pytest.fail("the worker attached to a log file")


# ---------------------------------------------------------------------------------- dying


@pytest.mark.processes
def test_a_killed_reader_gives_its_lease_and_its_line_back(start: Callable[..., Remote]) -> None:
    board = CountedBoard(max_slots=3)
    board.lay_out(LAYOUT)
    victim, survivor = start(), start()
    victim.ask("attach", board.handle, "alias", 0)
    survivor.ask("attach", board.handle, "alias", 1)
    publish(board, 1.0)
    assert victim.ask("adopt") == 1
    publish(board, 2.0)
    assert survivor.ask("adopt") == 2
    publish(board, 3.0)
    assert publish(board, 4.0) is None, "both leases hold their slots"
    pid = victim.pid
    victim.kill()
    assert publish(board, 4.0) == 4, "the kernel gave the lease back"
    status = {s.reader: s for s in board.status()}
    assert (status[0].pid, status[0].alive, status[0].state) == (pid, False, "dead")
    assert (status[1].alive, status[1].state) == (True, "running")
    assert survivor.ask("values") == (2.0, 2.0)

    restarted = start()
    assert restarted.ask("attach", board.handle, "alias", 0) == 0
    assert restarted.ask("adopt") == 4
    assert {s.reader: s.pid for s in board.status()} == {0: restarted.pid, 1: survivor.pid}
    board.close()


@pytest.mark.processes
@pytest.mark.parametrize("leave_behind", ["fork_a_child", "run_a_program"])
def test_what_a_killed_reader_started_does_not_keep_its_lease(
    start: Callable[..., Remote], leave_behind: str
) -> None:
    board = CountedBoard(max_slots=3)
    board.lay_out(LAYOUT)
    reader, _ = attach(board, "alias")
    victim = start()
    victim.ask("attach", board.handle, "alias")
    publish(board, 1.0)
    victim.ask("adopt")
    publish(board, 2.0)
    reader.adopt()
    publish(board, 3.0)
    grandchild = victim.ask(leave_behind)
    try:
        assert publish(board, 4.0) is None
        victim.kill()
        os.kill(grandchild, 0)  # it lives, and lets go as soon as it runs
        assert until(lambda: publish(board, 4.0) == 4)
        assert {s.reader: s.state for s in board.status()} == {0: "running", 1: "dead"}
    finally:
        os.kill(grandchild, signal.SIGKILL)
    reader.close()
    board.close()


@pytest.mark.usefixtures("memfd")
@pytest.mark.processes
def test_workers_forked_from_the_learner_read_with_leases_of_their_own() -> None:
    gc.collect()
    of_others = open_fds().count(MEMFD)
    board = CountedBoard(max_slots=3)
    board.lay_out(LAYOUT)
    publish(board, 1.0)
    remotes = [Remote("fork") for _ in range(2)]
    try:
        for number, remote in enumerate(remotes, 1):
            # A forked process closes the boards that it inherits, those of other tests perhaps among them.
            inherited = remote.ask("fds").count(MEMFD)
            assert inherited in (0, of_others), "the learner's is not inherited"
            remote.ask("attach", board.handle, "alias")
            assert remote.ask("fds").count(MEMFD) == inherited + 1
            assert remote.ask("adopt") == number
            publish(board, number + 1)
        assert publish(board, 4.0) is None
        remotes[0].kill()
        assert publish(board, 4.0) == 4
        assert remotes[1].ask("values") == (2.0, 2.0)
        assert remotes[1].ask("adopt") == 4
    finally:
        for remote in remotes:
            remote.end()
    board.close()


@pytest.mark.processes
def test_a_stopped_reader_delays_no_publish_and_is_named_when_somebody_waits_for_it(
    board: CountedBoard, start: Callable[..., Remote]
) -> None:
    stopped, lively = start(), start()
    for number, remote in enumerate((stopped, lively)):
        remote.ask("attach", board.handle, "alias", number)
    publish(board, 1.0)
    assert [stopped.ask("adopt"), lively.ask("adopt")] == [1, 1]
    stopped.signal(signal.SIGSTOP)
    assert until(lambda: board.status()[0].state == "stopped")

    for number in range(2, 402):
        assert publish(board, number) == number, "no publish is coalesced either"
        if number % 100 == 0:
            assert lively.ask("adopt") == number
    assert board.slot_count <= 4

    assert lively.ask("adopt") == 401
    board.wait(401, timeout_s=5, readers=[1])
    with pytest.raises(AdoptionTimeout) as caught:
        board.wait(401, timeout_s=0.2)
    said = str(caught.value)
    assert f"pid {stopped.pid}, stopped" in said
    assert str(lively.pid) not in said
    assert "400 behind" in said
    assert len(said.splitlines()) == 3

    stopped.signal(signal.SIGCONT)
    assert stopped.ask("values") == (1.0, 1.0)
    assert stopped.ask("adopt") == 401
    board.wait(401, timeout_s=5)


@pytest.mark.processes
def test_waiting_for_a_dead_reader_ends_at_once_with_its_pid(
    board: CountedBoard, start: Callable[..., Remote]
) -> None:
    dead, alive = start(), start()
    for number, remote in enumerate((dead, alive)):
        remote.ask("attach", board.handle, "copy", number)
    publish(board, 1.0)
    alive.ask("adopt")
    pid = dead.pid
    dead.kill()
    began = time.monotonic()
    with pytest.raises(WorkerLost) as caught:
        board.wait(1, timeout_s=60)
    assert time.monotonic() - began < 30
    said = str(caught.value)
    assert f"worker 0 (pid {pid}, dead" in said
    assert str(alive.pid) not in said
    assert len(said.splitlines()) == 3
    board.wait(1, timeout_s=5, readers=[1])


@pytest.mark.processes
def test_a_reader_that_dies_while_it_is_waited_for_ends_the_wait(
    board: CountedBoard, start: Callable[..., Remote]
) -> None:
    remote = start()
    remote.ask("attach", board.handle, "copy")
    publish(board, 1.0)
    killer = multiprocessing.get_context("fork").Process(target=_kill_soon, args=(remote.pid,))
    killer.start()
    with pytest.raises(WorkerLost, match=f"pid {remote.pid}, dead"):
        board.wait(1, timeout_s=60)
    killer.join(10)


def _kill_soon(pid: int) -> None:
    time.sleep(0.2)
    os.kill(pid, signal.SIGKILL)


def test_waiting_for_a_worker_that_never_came_names_it(board: CountedBoard) -> None:
    reader, _ = attach(board, "copy", 0)
    publish(board, 1.0)
    reader.adopt()
    with pytest.raises(AdoptionTimeout, match=r"worker 7 .*never attached"):
        board.wait(1, timeout_s=0.05, readers=[0, 7])
    reader.close()


@pytest.mark.processes
def test_a_stray_write_into_an_adopted_view_ends_the_reader_at_once_and_harms_nobody(
    board: CountedBoard, start: Callable[..., Remote]
) -> None:
    remote = start()
    remote.ask("attach", board.handle, "alias")
    reader, acts = attach(board, "alias")
    publish(board, 1.0)
    assert remote.ask("adopt") == reader.adopt() == 1
    remote.tell("write_into_a_view")
    remote.process.join(20)
    assert remote.process.exitcode == -signal.SIGSEGV
    assert low_high(acts.tensors) == (1.0, 1.0)
    assert low_high(board.newest_views()) == (1.0, 1.0)
    reader.close()


@pytest.mark.processes
def test_a_learner_killed_at_any_moment_leaves_the_last_complete_version_readable(
    start: Callable[..., Remote],
) -> None:
    rng = random.Random(0)
    in_the_middle = 0
    for _ in range(14):
        writer = start()
        handle = writer.ask("open_board", 8, 100_000)
        acts = {mode: Acts(mode) for mode in ("alias", "copy")}
        readers = {mode: BoardReader(handle, acts[mode]) for mode in acts}
        lagging = BoardReader(handle, lagging_acts := Acts("alias"))
        writer.tell("publish_until_killed")
        assert until(lambda lagging=lagging: lagging.adopt() > 0)
        stop = time.monotonic() + rng.uniform(0.0, 0.03)
        while time.monotonic() < stop:
            for mode, reader in readers.items():
                version = reader.adopt()
                assert low_high(acts[mode].tensors) == (version, version)
        assert not lagging.closed_by_learner
        writer.kill()

        assert lagging.closed_by_learner
        kept = lagging.version
        assert low_high(lagging_acts.tensors) == (kept, kept)
        newest = lagging.newest
        for mode, reader in readers.items():
            assert reader.adopt() == newest
            assert low_high(acts[mode].tensors) == (newest, newest)
        assert lagging.adopt() == newest
        assert low_high(lagging_acts.tensors) == (newest, newest)
        in_the_middle += _slots_being_written(lagging) > 0
        with pytest.raises(BoardClosed, match="is gone"):
            BoardReader(handle, Acts("copy"))
        for reader in (*readers.values(), lagging):
            reader.close()
        writer.end()
    assert in_the_middle >= 3, "the kills hardly ever found a publish under way"


def _slots_being_written(reader: BoardReader) -> int:
    words = reader._words
    states = [words[fmt.slot_line(s) + fmt.SLOT_STATE] for s in range(words[fmt.SLOT_COUNT])]
    return states.count(SlotState.WRITING)


@pytest.mark.processes
def test_a_forked_child_of_a_killed_learner_does_not_keep_the_board_open(
    start: Callable[..., Remote],
) -> None:
    writer = start()
    handle = writer.ask("open_board", 2, 10)
    assert writer.ask("publish", 1.0) == 1
    reader = BoardReader(handle, acts := Acts("alias"))
    child = writer.ask("fork_a_child")
    try:
        assert not reader.closed_by_learner
        writer.kill()
        assert reader.closed_by_learner
        assert reader.adopt() == 1
        assert low_high(acts.tensors) == (1.0, 1.0)
    finally:
        os.kill(child, signal.SIGKILL)
    reader.close()


# ---------------------------------------------------------------------------------- laying out anew


def test_a_second_destination_joins_while_readers_hold_leases() -> None:
    size = 200_000
    one, two = plain_layout(2, size), plain_layout(2, size, "env.transform[0]")
    image = one.image_bytes
    board = CountedBoard()
    board.lay_out(one)
    (keeper, kept), (mover, moved) = attach(board, "alias"), attach(board, "alias")
    publish(board, 1.0)
    keeper.adopt()
    publish(board, 2.0)
    mover.adopt()

    board.lay_out(two)
    assert keeper.adopt() == 2, "until the next publish the old layout's newest version stands"
    assert publish(board, 3.0) == 3
    assert low_high(kept.tensors) == low_high(moved.tensors) == (2.0, 2.0)
    late, joined = attach(board, "copy")
    assert late.adopt() == 3
    assert joined.layout == two
    assert len(joined.tensors) == 4
    for number in range(4, 10):
        publish(board, number)
    assert low_high(kept.tensors) == (2.0, 2.0)
    assert bytes_in_memory(board) < (3 * 2 + 1.3) * image, "one old slot is still leased"

    for reader, acts in ((keeper, kept), (mover, moved)):
        assert reader.adopt() == 9
        assert acts.layout == two
        assert low_high(acts.tensors) == (9.0, 9.0)
    publish(board, 10.0)
    assert bytes_in_memory(board) < (3 * 2 + 0.3) * image, "all old slots are given back"
    assert not board._slots._retiring
    for reader in (keeper, mover, late):
        reader.close()
    board.close()


def test_laying_out_the_same_again_changes_nothing(board: CountedBoard) -> None:
    publish(board, 1.0)
    slots, size = board._words[fmt.SLOT_COUNT], board._file.size_bytes()
    board.lay_out(plain_layout())
    assert (board._words[fmt.SLOT_COUNT], board._file.size_bytes()) == (slots, size)
    assert low_high(board.newest_views()) == (1.0, 1.0)


def test_laying_out_anew_gives_slots_that_nobody_reads_back_at_once() -> None:
    image, board = 4_000_000, CountedBoard()
    board.lay_out(plain_layout(tensors=1, size=image // 4))
    publish(board, 1.0)
    board.lay_out(plain_layout(tensors=1, size=image // 4 + 1))
    assert bytes_in_memory(board) < 4.2 * image, "the newest version, and the first three slots"
    board.close()


@pytest.mark.seconds
def test_texts_of_earlier_layouts_are_given_back() -> None:
    board = CountedBoard()
    layouts = [plain_layout(1, 8, *(f"extra{i}" for i in range(300 + n))) for n in range(40)]
    board.lay_out(layouts[0])
    publish(board, 1.0)
    held = bytes_in_memory(board)
    for layout in layouts:
        board.lay_out(layout)
        publish(board, 1.0)
    text = len(layouts[0].to_json())
    assert bytes_in_memory(board) < held + 8 * text, "40 texts are more than that"
    board.close()


def test_however_often_it_is_laid_out_anew_versions_and_readers_stay_right() -> None:
    board = CountedBoard()
    layouts = [plain_layout(1, 8), plain_layout(2, 8)]
    board.lay_out(layouts[0])
    reader, acts = attach(board, "copy")
    for number in range(1, 401):
        board.lay_out(layouts[number % 2])
        assert board._words[fmt.SLOT_COUNT] <= fmt.MAX_SLOTS, "a reader would look for it for ever"
        assert publish(board, number) == number
        assert reader.adopt() == number
        assert low_high(acts.tensors) == (number, number)
        assert len(acts.tensors) == number % 2 + 1
    assert [status.reader for status in board.status()] == [reader.reader]
    reader.close()
    board.close()


def test_however_often_it_is_laid_out_without_a_publish_the_lines_suffice_or_it_is_refused() -> None:
    board = CountedBoard()
    layouts = [plain_layout(1, 8), plain_layout(2, 8)]
    board.lay_out(layouts[0])
    reader, acts = attach(board, "copy", 0)
    publish(board, 1.0)
    for number in range(1, 400):
        try:
            board.lay_out(layouts[number % 2])
        except PublishError:
            break
        assert board._words[fmt.SLOT_COUNT] <= fmt.MAX_SLOTS, "it runs over the lines of the readers"
    assert reader.adopt() == 1
    assert publish(board, 2.0) == 2
    assert reader.adopt() == 2
    assert low_high(acts.tensors) == (2.0, 2.0)
    reader.close()
    board.close()


def test_a_line_that_is_used_again_is_not_taken_for_the_slot_it_was() -> None:
    """A reader that kept its views of a retired slot maps the new image of that number."""
    board = CountedBoard()
    board.lay_out(plain_layout(1, 8))
    (reader, acts), (other, _) = attach(board, "alias"), attach(board, "alias")
    publish(board, 1.0)
    reader.adopt()
    layout = plain_layout(3, 8)
    board.lay_out(layout)
    publish(board, 2.0)
    assert reader.adopt() == 2
    publish(board, 3.0)  # now nobody leases a slot of the old layout
    holders = [attach(board, "alias") for _ in range(4)]
    taken = set()
    for number, (holder, _) in enumerate([*holders, (other, None)], 4):
        assert publish(board, number) == number
        taken.add(fmt.unpack_head(board._words[fmt.HEAD])[1])
        assert holder.adopt() == reader.adopt() == number
        assert acts.layout == layout
        assert low_high(acts.tensors) == (number, number)
    assert taken & {0, 1, 2}, "no line was used again"
    for number, (_, held) in enumerate(holders, 4):
        assert low_high(held.tensors) == (number, number)
    for each in (reader, other, *(holder for holder, _ in holders)):
        each.close()
    board.close()


def test_a_layout_that_grows_past_the_mapped_pages_is_read_whole() -> None:
    names = [f"a.rather.long.name.of.a.leaf.{i}" for i in range(500)]
    layout = Layout.build({"policy": [LeafSpec(n, "buffer", (1,), torch.float32) for n in names]})
    assert len(layout.to_json()) > 4 * 4096
    board = CountedBoard()
    board.lay_out(layout)
    reader, acts = attach(board, "copy")
    publish(board, 1.0)
    reader.adopt()
    assert acts.layout == layout
    reader.close()
    board.close()


def test_head_packs_any_version_and_slot() -> None:
    for version, slot in ((0, 0), (1, 1023), (2**53, 512), (2**54 - 1, 1023)):
        head = fmt.pack_head(version, slot)
        assert fmt.unpack_head(head) == (version, slot)
        struct.pack("<Q", head)  # fits in one word


# ---------------------------------------------------------------------------------- in the background


def test_what_is_copied_in_the_background_lives_until_it_is_copied(board: CountedBoard) -> None:
    gate = threading.Event()
    board._copier.submit(gate.wait)
    try:
        tensors = filled(LAYOUT, 5.0)
        put_off = weakref.ref(tensors[0])
        board.publish(tensors, later={0})
        del tensors
        gc.collect()
        assert put_off() is not None, "the memory of a source was given back too early"
    finally:
        gate.set()
    board.join()
    assert low_high(board.newest_views()) == (5.0, 5.0)
    assert until(lambda: put_off() is None), "and no longer"


def test_what_an_accelerator_still_reads_lives_until_it_is_copied() -> None:
    """The accelerator gathers its leaves by itself, later than the host asks for it."""
    sources = [torch.ones(2), torch.ones(2)]
    alive = [weakref.ref(tensor) for tensor in sources]
    left = SlotCopy([torch.zeros(2), torch.zeros(2)], sources, []).begin({1})
    del sources
    gc.collect()
    assert all(ref() is not None for ref in alive)
    left.finish()
    del left
    gc.collect()
    assert not any(ref() is not None for ref in alive)


# ---------------------------------------------------------------------------------- the canary


@pytest.mark.processes
@pytest.mark.parametrize("adoptions", [100, pytest.param(500, marks=pytest.mark.thorough)])
def test_two_processes_that_look_as_fast_as_they_can_see_no_mixture_and_no_lie(
    start: Callable[..., Remote], adoptions: int
) -> None:
    layout = plain_layout(tensors=20, size=25_000)
    board = CountedBoard()
    board.lay_out(layout)
    remotes = {"alias": start(), "copy": start()}
    for mode, remote in remotes.items():
        remote.ask("attach", board.handle, mode)
        remote.tell("watch_closely", adoptions)
    tensors, number = filled(layout, 0.0), 0
    while not all(remote.connection.poll() for remote in remotes.values()):
        number += 1
        torch._foreach_zero_(tensors)
        torch._foreach_add_(tensors, float(number))
        assert board.publish(tensors) == number
    for mode, remote in remotes.items():
        seen = remote.answer()
        assert seen["adoptions"] == adoptions, f"{mode}: {seen}, {number} publishes"
        wrong = {key: seen[key] for key in ("torn", "wrong", "fell")}
        assert wrong == {"torn": 0, "wrong": 0, "fell": 0}, f"{mode}: {seen}, {number} publishes"
    assert board.slot_count <= 5
    board.close()


class Watched:
    """The control words of a board; somebody looks after each write."""

    def __init__(self, words: memoryview, look: Callable[[], object]) -> None:
        self._words = words
        self._look = look

    def __getitem__(self, at: int) -> int:
        return self._words[at]

    def __setitem__(self, at: int, value: int) -> None:
        self._words[at] = value
        self._look()


def test_nobody_sees_a_version_under_the_generation_before_while_it_is_published() -> None:
    writer = BoardWriter()
    writer.lay_out(LAYOUT)
    writer.publish(filled(LAYOUT, 1.0), stamp=Stamp(1, 1))
    seen: list[Stamp] = []
    watch = BoardWatch(*writer.handle.open())
    writer._words = Watched(writer._words, lambda: seen.append(watch.newest_stamp))  # type: ignore[assignment]
    writer.publish(filled(LAYOUT, 2.0), stamp=Stamp(2, 2))
    writer.close()
    assert seen[-1] == Stamp(2, 2)
    assert not [stamp for stamp in seen if stamp.version == 2 and stamp.generation == 1]


def test_a_reader_that_has_adopted_nothing_is_asked_nothing(board: CountedBoard) -> None:
    reader, _ = attach(board, "copy")
    question = board.ask(lowest=0)
    assert reader.asked == 0
    publish(board, 1.0)
    reader.adopt()
    assert reader.asked == question
    reader.close()


def test_nobody_sees_a_question_before_the_version_that_it_is_about(board: CountedBoard) -> None:
    reader, _ = attach(board, "copy")
    publish(board, 1.0)
    reader.adopt()
    assert reader.asked == 0
    seen: list[int] = []
    board._words = Watched(board._words, lambda: seen.append(reader.asked))  # type: ignore[assignment]
    board.ask(lowest=2)
    board.ask_as(7, lowest=3)
    assert seen
    assert set(seen) == {0}
    reader.close()
