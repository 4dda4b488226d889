"""The rollout ring: order, bounds, waiting that is counted, and writers that die at any moment."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlsync.core.errors import BoardClosed, ConfigError, PublishError
from rlsync.runs.actors.ring import format as fmt
from rlsync.runs.actors.ring.reader import RingHandle, RolloutRing, TakenRollout
from rlsync.runs.actors.ring.writer import RingWriter
from rlsync.tensors.layout import Layout, LeafSpec
from rlsync.transport.shared_file import SharedFile, kind
from tests.conftest import LeakCheck
from tests.tools.processes import kill, stopped, wait_until

FORK = multiprocessing.get_context("fork")
WAIT_S = 15.0
LARGE = 1 << 18


def make_ring(slots: int = 3, writers: int = 2, size: int = 4) -> RolloutRing:
    leaves = [
        LeafSpec("data", "buffer", (size,), torch.int64),
        LeafSpec("tail", "buffer", (3,), torch.uint8),
    ]
    ring = RolloutRing(Layout.build({"rollout": leaves}), slots, writers)
    ring.run()
    return ring


@pytest.fixture
def ring() -> Iterator[RolloutRing]:
    made = make_ring()
    yield made
    made.close()


def write(writer: RingWriter, value: int) -> None:
    views = writer.take(timeout_s=WAIT_S)
    assert views is not None
    views["data"].fill_(value)
    writer.commit()


def value(taken: TakenRollout | None) -> int:
    assert taken is not None, "no rollout came in time"
    low, high = (int(end) for end in taken.views["data"].aminmax())
    assert low == high, "a torn rollout"
    return low


@contextmanager
def process(target: Callable[..., None], *args: object) -> Iterator[BaseProcess]:
    started = FORK.Process(target=target, args=args, daemon=True)
    started.start()
    try:
        yield started
    finally:
        if started.is_alive():
            started.kill()
        started.join(WAIT_S)


def take_and_wait(handle: RingHandle, completed: int) -> None:
    """Complete some rollouts, then stay in the middle of one."""
    writer = RingWriter(handle, 0)
    for number in range(completed):
        write(writer, number)
    views = writer.take()
    assert views is not None
    views["data"][0] = -1
    writer.announce_ready()
    time.sleep(3600)


def write_for_ever(handle: RingHandle, writer_number: int) -> None:
    """Every number of a rollout is the same, and says which rollout of which process it is."""
    writer = RingWriter(handle, writer_number)
    number = 0
    while (views := writer.take()) is not None:
        views["data"].fill_(os.getpid() << 32 | number)
        writer.commit()
        number += 1


# -------------------------------------------------------------------------- order and bounds


def test_rollouts_come_in_the_order_in_which_they_were_completed(ring: RolloutRing) -> None:
    writers = [RingWriter(ring.handle, number) for number in range(2)]
    for round_ in range(5):  # the slots come round again in another order
        order = [0, 1, 1] if round_ % 2 else [1, 0, 0]
        for place, number in enumerate(order):
            write(writers[number], 10 * round_ + place)
        taken = [ring.take(WAIT_S) for _ in order]
        assert [value(t) for t in taken] == [10 * round_ + place for place in range(3)]
        assert [t.writer for t in taken if t] == order
        for t in reversed(taken):
            assert t is not None
            ring.give_back(t)


class Watched:
    """The states of a ring's slots; calls a function in the middle of a look, once slot 0 was read."""

    def __init__(self, states: Any, *then: Callable[[], None]) -> None:
        self.states, self.then = states, list(then)

    def __eq__(self, state: object) -> Any:
        slot_0 = self.states[:1] == state
        if self.then:
            self.then.pop(0)()
        return np.concatenate([slot_0, self.states[1:] == state])


def test_a_slot_that_fills_while_the_learner_looks_is_not_passed_over() -> None:
    ring = make_ring(slots=3, writers=1)
    writer = RingWriter(ring.handle, 0)

    def complete_two() -> None:
        write(writer, 1)  # in slot 0, which the learner has just seen to be free
        write(writer, 2)  # in slot 1, which it looks at next

    ring._states = Watched(ring._states, complete_two)  # type: ignore[assignment]
    assert [value(ring.take(WAIT_S)), value(ring.take(WAIT_S))] == [1, 2]
    ring.close()


def test_a_rollout_whose_elder_was_passed_over_in_the_second_look_waits_for_it() -> None:
    ring = make_ring(slots=3, writers=2)
    first, second = (RingWriter(ring.handle, number) for number in range(2))
    write(second, 0)
    write(first, 1)  # in slot 1
    taken = ring.take(WAIT_S)
    assert taken is not None
    ring.give_back(taken)  # slot 0 is free

    def complete_two() -> None:
        write(second, 2)  # in slot 0, which the learner has just seen to be free, for the second time
        write(second, 3)  # in slot 2, which it looks at next

    watched = Watched(ring._states, lambda: None, complete_two)
    with closing(ring.handle.open()[0]) as looking:
        assert looking.try_lock(fmt.SLOT_LOCK + 1, exclusive=True)
        ring._states = watched  # type: ignore[assignment]
        assert ring._try_take() is None, "the third rollout before the second"
    assert not watched.then
    assert [value(ring.take(WAIT_S)) for _ in range(3)] == [1, 2, 3]
    ring.close()


def test_a_full_slot_that_cannot_be_locked_holds_up_its_own_writer_only() -> None:
    ring = make_ring(slots=3, writers=2)
    first, second = (RingWriter(ring.handle, number) for number in range(2))
    write(first, 1)
    write(first, 2)
    write(second, 3)
    with closing(
        ring.handle.open()[0]
    ) as looking:  # as a writer that looks for a free slot does for a moment
        assert looking.try_lock(fmt.SLOT_LOCK, exclusive=True)
        assert value(ring.take(WAIT_S)) == 3
        assert ring.take(timeout_s=0.0) is None, "the second rollout of a writer before its first"
    assert [value(ring.take(WAIT_S)), value(ring.take(WAIT_S))] == [1, 2]
    ring.close()


def test_a_writer_waits_while_no_slot_is_free_and_the_wait_is_counted(ring: RolloutRing) -> None:
    writer = RingWriter(ring.handle, 0)
    for number in range(3):
        write(writer, number)
    assert writer.take(timeout_s=0.3) is None
    counters = ring.counters()
    assert (counters.full, counters.free, counters.written) == (3, 0, 3)
    assert counters.worker_wait_s >= 0.25
    taken = ring.take(WAIT_S)
    assert writer.take(timeout_s=0.0) is None, "a slot that is being read is not free"
    assert taken is not None
    ring.give_back(taken)
    write(writer, 3)
    assert [value(ring.take(WAIT_S)) for _ in range(3)] == [1, 2, 3], "nothing was dropped"


def test_a_writer_that_waits_gives_signs_of_life(ring: RolloutRing) -> None:
    writer = RingWriter(ring.handle, 0)
    heartbeat = fmt.writer_line(0) + fmt.WRITER_HEARTBEAT_NS
    for wait_for in (ring.pause, ring.run):  # paused; and full
        wait_for()
        ring._words[heartbeat] = 0
        assert writer.take(timeout_s=0.1) is None
        assert ring._words[heartbeat]
        for number in range(3):
            ring.run()
            if ring.counters().free:
                write(writer, number)


def test_a_blocked_writer_goes_on_when_a_slot_is_given_back(ring: RolloutRing) -> None:
    writer = RingWriter(ring.handle, 0)
    for number in range(3):
        write(writer, number)
    waiting = threading.Thread(target=write, args=(writer, 3), daemon=True)
    waiting.start()
    taken = ring.take(WAIT_S)
    assert taken is not None
    ring.give_back(taken)
    waiting.join(WAIT_S)
    assert ring.counters().written == 4


def test_the_learner_holds_several_rollouts_and_waits_no_longer_than_it_says(ring: RolloutRing) -> None:
    writer = RingWriter(ring.handle, 0)
    write(writer, 1)
    write(writer, 2)
    held = [ring.take(WAIT_S), ring.take(WAIT_S)]
    assert [value(taken) for taken in held] == [1, 2]
    assert ring.take(timeout_s=0.2) is None
    counters = ring.counters()
    assert (counters.reading, counters.taken) == (2, 2)
    assert counters.learner_wait_s >= 0.15


def test_a_rollout_that_is_given_back_twice_leaves_the_slot_to_the_one_that_is_being_read() -> None:
    ring = make_ring(slots=1)
    writer = RingWriter(ring.handle, 0)
    write(writer, 1)
    first = ring.take(WAIT_S)
    assert first is not None
    ring.give_back(first)
    write(writer, 2)
    second = ring.take(WAIT_S)
    assert second is not None
    assert second.slot == first.slot
    ring.give_back(first)
    assert ring.counters().reading == 1
    assert writer.take(timeout_s=0.0) is None, "the learner still reads this slot"
    assert value(second) == 2
    ring.give_back(second)
    write(writer, 3)
    assert value(ring.take(WAIT_S)) == 3
    ring.close()


def test_an_abandoned_slot_is_free_and_nobody_reads_it(ring: RolloutRing) -> None:
    writer = RingWriter(ring.handle, 0)
    writer.take()
    writer.abandon()
    assert ring.take(timeout_s=0.0) is None
    assert ring.counters().free == 3


def test_a_slot_that_another_writer_filled_a_moment_ago_is_not_taken(
    ring: RolloutRing, monkeypatch: pytest.MonkeyPatch
) -> None:
    late, quick = RingWriter(ring.handle, 0), RingWriter(ring.handle, 1)
    try_lock, waiting = kind().try_lock, [7]

    def after_the_other(file: SharedFile, at: int, *, exclusive: bool) -> bool:
        while waiting:  # the slot was free when the late one looked, and is not when it has the lock
            write(quick, waiting.pop())
        return try_lock(file, at, exclusive=exclusive)

    monkeypatch.setattr(kind(), "try_lock", after_the_other)
    write(late, 8)
    assert [value(ring.take(WAIT_S)) for _ in range(2)] == [7, 8]


# -------------------------------------------------------------------------- death


@pytest.mark.processes
def test_the_slot_of_a_writer_that_was_killed_in_the_middle_is_free_again(ring: RolloutRing) -> None:
    with process(take_and_wait, ring.handle, 0) as child:
        assert wait_until(lambda: ring.writer(0).ready, WAIT_S)
        assert ring.counters().writing == 1
        assert child.pid is not None
        kill(child.pid)
    assert ring.take(timeout_s=0.1) is None, "half a rollout is none"
    assert ring.counters().free == 3
    assert not ring.writer(0).alive
    successor = RingWriter(ring.handle, 0)
    for number in range(3):
        write(successor, number)
    assert [value(ring.take(WAIT_S)) for _ in range(3)] == [0, 1, 2]


@pytest.mark.processes
def test_what_a_writer_completed_before_it_was_killed_is_still_good(ring: RolloutRing) -> None:
    with process(take_and_wait, ring.handle, 2) as child:
        assert wait_until(lambda: ring.writer(0).ready, WAIT_S)
        assert child.pid is not None
        kill(child.pid)
    assert [value(ring.take(WAIT_S)) for _ in range(2)] == [0, 1]
    assert ring.take(timeout_s=0.0) is None


class KillsAt:
    """The words of a ring; whoever writes one of them is killed before it does."""

    def __init__(self, words: Any, index: int) -> None:
        self._words = words
        self._index = index

    def __getitem__(self, index: int) -> int:
        return self._words[index]

    def __setitem__(self, index: int, value: int) -> None:
        if index == self._index:
            os.kill(os.getpid(), signal.SIGKILL)
        self._words[index] = value


def die_before_it_is_counted(handle: RingHandle) -> None:
    writer = RingWriter(handle, 0)
    write(writer, 7)
    writer._words = KillsAt(writer._words, fmt.writer_line(0) + fmt.WRITER_WRITTEN)
    write(writer, 8)


@pytest.mark.processes
@pytest.mark.parametrize("taken_before_the_successor", [True, False])
def test_the_successor_of_a_writer_that_was_killed_gives_no_number_twice(
    ring: RolloutRing, taken_before_the_successor: bool
) -> None:
    with process(die_before_it_is_counted, ring.handle) as child:
        child.join(WAIT_S)
    rollouts = []
    if taken_before_the_successor:
        rollouts = [ring.take(WAIT_S), ring.take(WAIT_S)]
    ring.expect(0)
    write(RingWriter(ring.handle, 0), 9)
    while len(rollouts) < 3:
        rollouts.append(ring.take(WAIT_S))
    assert [value(rollout) for rollout in rollouts] == [7, 8, 9]
    assert [rollout.number for rollout in rollouts if rollout is not None] == [0, 1, 2]
    assert ring.counters().written == 3


@pytest.mark.processes
def test_a_stopped_writer_keeps_its_slot_and_the_others_go_on(ring: RolloutRing) -> None:
    with process(take_and_wait, ring.handle, 0) as child:
        assert wait_until(lambda: ring.writer(0).ready, WAIT_S)
        assert child.pid is not None
        with stopped(child.pid):
            other = RingWriter(ring.handle, 1)
            for number in range(6):
                write(other, number)
                taken = ring.take(WAIT_S)
                assert value(taken) == number
                assert taken is not None
                ring.give_back(taken)
            assert ring.counters().writing == 1


@pytest.mark.processes
def test_no_rollout_is_torn_lost_or_doubled_while_writers_are_killed() -> None:
    ring, rng = make_ring(slots=3, writers=3, size=LARGE), random.Random(0)
    seen: dict[int, list[int]] = {}
    children = {n: FORK.Process(target=write_for_ever, args=(ring.handle, n), daemon=True) for n in range(3)}
    for child in children.values():
        child.start()
    try:
        for count in range(480):
            taken = ring.take(WAIT_S)
            both = value(taken)
            seen.setdefault(both >> 32, []).append(both & 0xFFFFFFFF)
            assert taken is not None
            ring.give_back(taken)
            if count % 40 == 39:
                victim = rng.randrange(3)
                time.sleep(rng.uniform(0, 0.003))
                children[victim].kill()
                children[victim].join(WAIT_S)
                child = FORK.Process(target=write_for_ever, args=(ring.handle, victim), daemon=True)
                children[victim] = child
                child.start()
    finally:
        ring.close()
        for child in children.values():
            child.join(WAIT_S)
    assert len(seen) > 6
    assert all(numbers == list(range(len(numbers))) for numbers in seen.values())


def be_a_learner(told: multiprocessing.Queue[RingHandle]) -> None:
    ring = make_ring()
    told.put(ring.handle)
    time.sleep(3600)


@pytest.mark.processes
def test_a_writer_whose_learner_was_killed_waits_no_longer() -> None:
    told: multiprocessing.Queue[RingHandle] = FORK.Queue()
    with process(be_a_learner, told) as learner:
        writer = RingWriter(told.get(timeout=WAIT_S), 0)
        for number in range(3):
            write(writer, number)
        assert not writer.learner_gone
        assert learner.pid is not None
        kill(learner.pid)
    assert writer.take(timeout_s=WAIT_S) is None
    assert writer.learner_gone
    assert not writer.closing


# -------------------------------------------------------------------------- what both sides tell each other


def test_writers_wait_until_the_ring_runs_and_that_is_no_back_pressure() -> None:
    ring = make_ring()
    ring.pause()
    writer = RingWriter(ring.handle, 0)
    assert writer.take(timeout_s=0.2) is None
    assert ring.counters().worker_wait_s == 0
    ring.run()
    write(writer, 1)
    assert value(ring.take(WAIT_S)) == 1
    ring.close()


def test_a_seed_reaches_every_writer_once(ring: RolloutRing) -> None:
    first, second = RingWriter(ring.handle, 0), RingWriter(ring.handle, 1)
    assert first.new_seed() is None
    ring.seed(7)
    assert [first.new_seed(), first.new_seed(), second.new_seed()] == [7, None, 7]
    ring.seed(7)
    assert first.new_seed() == 7, "the same seed, given again, is a new one"


def test_the_last_words_of_a_writer_outlive_it_and_its_successor_begins_with_none(ring: RolloutRing) -> None:
    writer = RingWriter(ring.handle, 0)
    writer.announce_ready()
    writer.leave_last_words("the end, ünd out " + "x" * (1 << 17))
    writer.close()
    assert ring.writer(0).ready
    assert ring.writer(0).last_words.startswith("the end, ünd out x")
    ring.expect(0)
    assert ring.writer(0).last_words == ""
    assert not ring.writer(0).ready, "its successor has to say so itself"


def test_a_ring_tells_which_of_its_writers_live(ring: RolloutRing) -> None:
    writer = RingWriter(ring.handle, 1)
    assert ring.writer(1).alive
    assert ring.writer(1).pid == os.getpid()
    assert not ring.writer(0).alive
    writer.close()
    assert not ring.writer(1).alive


def test_writers_of_a_closed_ring_see_it_at_once(ring: RolloutRing) -> None:
    handle = ring.handle
    writer = RingWriter(handle, 0)
    ring.close()
    assert writer.closing
    assert writer.take(timeout_s=WAIT_S) is None
    with pytest.raises(BoardClosed, match="was closed"):
        ring.take(timeout_s=0.0)
    with pytest.raises(BoardClosed):
        RingWriter(handle, 0)


# -------------------------------------------------------------------------- refusals and leaks


@pytest.mark.parametrize(("slots", "writers"), [(0, 1), (fmt.MAX_SLOTS + 1, 1), (1, 0), (1, 5000)])
def test_numbers_out_of_range_are_refused(slots: int, writers: int) -> None:
    with pytest.raises(ConfigError, match="has between 1 and"):
        make_ring(slots, writers)


def test_a_writer_needs_a_number_of_its_own(ring: RolloutRing) -> None:
    with pytest.raises(ConfigError, match="no line for worker 2"):
        RingWriter(ring.handle, 2)
    writer = RingWriter(ring.handle, 0)
    with pytest.raises(PublishError, match="a living process already writes"):
        RingWriter(ring.handle, 0)
    writer.close()
    RingWriter(ring.handle, 0).close()


def test_nothing_is_committed_that_was_not_taken(ring: RolloutRing) -> None:
    with pytest.raises(PublishError, match="no slot was taken"):
        RingWriter(ring.handle, 0).commit()


@pytest.mark.seconds
def test_a_ring_leaves_no_descriptor_and_no_memory_behind(no_leaks: LeakCheck) -> None:
    for warm in (False, True):
        ring = make_ring()
        writer = RingWriter(ring.handle, 0)
        write(writer, 1)
        taken = ring.take(WAIT_S)
        assert value(taken) == 1
        del taken
        writer.close()
        ring.close()
        del writer, ring
        if not warm:
            no_leaks.rebase()


def test_pages_that_nobody_writes_to_are_not_in_memory() -> None:
    leaves = [
        LeafSpec("small", "buffer", (8,), torch.int64),
        LeafSpec("large", "buffer", (1 << 28,), torch.uint8),
    ]
    ring = RolloutRing(Layout.build({"rollout": leaves}), 4, 1)
    ring.run()
    writer = RingWriter(ring.handle, 0)
    views = writer.take(timeout_s=WAIT_S)
    assert views is not None
    views["small"].fill_(1)
    views["large"][: 1 << 12].fill_(1)
    writer.commit()
    assert Path(ring.handle.address.path).stat().st_blocks * 512 < 1 << 20
    ring.close()
