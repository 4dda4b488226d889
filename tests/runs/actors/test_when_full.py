"""What happens when all slots of a rollout ring are full: the worker waits, or a rollout is dropped."""

from __future__ import annotations

import pytest
import torch

from rlsync.core.errors import ConfigError
from rlsync.runs.actors.ring import format as fmt
from rlsync.runs.actors.ring.format import WhenFull
from rlsync.runs.actors.ring.reader import RingCounters, RingHandle, RolloutRing
from rlsync.runs.actors.ring.writer import RingWriter
from rlsync.runs.recipes.checks import check
from rlsync.runs.recipes.impala.settings import ImpalaConfig
from rlsync.runs.recipes.settings import ClusterConfig, CollectorConfig, Config
from rlsync.tensors.layout import Layout, LeafSpec
from tests.runs.actors.test_ring import process, value, write
from tests.runs.actors.test_unroll_collector import CARTPOLE, cartpole_net, collecting
from tests.tools.parts import wait_until

WAIT_S = 60.0


def ring_that(when_full: WhenFull, slots: int = 2, writers: int = 1) -> RolloutRing:
    leaves = [LeafSpec("data", "buffer", (4096,), torch.int64), LeafSpec("tail", "buffer", (3,), torch.uint8)]
    ring = RolloutRing(Layout.build({"rollout": leaves}), slots, writers, when_full)
    ring.run()
    return ring


def test_a_ring_that_drops_the_newest_lets_the_writer_play_on_and_keeps_what_it_has() -> None:
    ring = ring_that("drop_newest")
    writer = RingWriter(ring.handle, 0)
    for number in range(5):
        write(writer, number)
    assert (ring.counters().written, ring.counters().dropped, ring.counters().full) == (2, 3, 2)
    taken = ring.take(WAIT_S)
    assert (value(taken), taken and taken.number) == (0, 0)
    write(writer, 5)  # the learner reads one slot and the other is full
    assert taken is not None
    ring.give_back(taken)
    write(writer, 6)
    assert [value(ring.take(WAIT_S)), value(ring.take(WAIT_S))] == [1, 6]
    assert (ring.counters().dropped, ring.counters().worker_wait_s) == (4, 0.0)
    writer.close()
    ring.close()


def test_a_paused_ring_drops_nothing_and_a_rollout_that_is_broken_off_is_not_counted() -> None:
    ring = ring_that("drop_newest")
    writer = RingWriter(ring.handle, 0)
    write(writer, 0)
    write(writer, 1)
    ring.pause()
    assert writer.take(timeout_s=0.01) is None
    ring.run()
    assert writer.take(timeout_s=WAIT_S) is not None
    writer.abandon()
    assert ring.counters().dropped == 0
    writer.close()
    ring.close()


def test_the_number_of_a_dropped_rollout_is_not_given_again_though_its_writer_had_not_counted_it() -> None:
    ring = ring_that("drop_oldest", writers=2)
    killed = RingWriter(ring.handle, 0)
    write(killed, 7)
    ring._words[fmt.writer_line(0) + fmt.WRITER_WRITTEN] = 0  # as when it was killed just before
    killed.close()
    write(RingWriter(ring.handle, 1), 8)
    assert value(ring.take(WAIT_S)) == 8
    assert ring.counters().dropped == 1
    ring.expect(0)
    write(RingWriter(ring.handle, 0), 9)
    taken = ring.take(WAIT_S)
    assert taken is not None
    assert (value(taken), taken.writer, taken.number) == (9, 0, 1)
    ring.close()


def test_a_ring_that_drops_the_oldest_does_so_when_the_learner_comes_and_finds_it_full() -> None:
    ring = ring_that("drop_oldest", slots=3)
    writer = RingWriter(ring.handle, 0)
    for number in range(3):
        write(writer, number)
    assert writer.take(timeout_s=0.01) is None, "the writer waits: it drops nothing itself"
    first = ring.take(WAIT_S)
    assert (value(first), ring.counters().dropped) == (1, 1)
    write(writer, 3)
    assert value(ring.take(WAIT_S)) == 3, "with all slots full or read, the older one of two is dropped"
    assert ring.counters().dropped == 2
    write(writer, 4)
    assert (value(ring.take(WAIT_S)), ring.counters().dropped) == (4, 2), "the only one is never dropped"
    writer.close()
    ring.close()


def write_for_ever(handle: RingHandle, number: int) -> None:
    writer, count = RingWriter(handle, number), 0
    while (views := writer.take()) is not None:
        views["data"].fill_(count * 2 + number)
        writer.commit()
        count += 1


@pytest.mark.processes
@pytest.mark.parametrize("when_full", ["drop_oldest", "drop_newest"])
def test_what_is_dropped_tears_nothing_and_changes_no_order(when_full: WhenFull) -> None:
    ring = ring_that(when_full, slots=3, writers=2)
    with process(write_for_ever, ring.handle, 0), process(write_for_ever, ring.handle, 1):
        newest, numbers = [-1, -1], [-1, -1]
        for _ in range(100):
            taken = ring.take(WAIT_S)
            assert taken is not None
            made = value(taken)
            assert made % 2 == taken.writer, "one writer's numbers in all of it"
            assert made > newest[taken.writer]
            assert taken.number > numbers[taken.writer]
            newest[taken.writer], numbers[taken.writer] = made, taken.number
            ring.give_back(taken)
        ring.pause()

        def is_accounted_for() -> bool:  # as soon as both writers see the pause
            counted = ring.counters()
            lost = counted.dropped if when_full == "drop_oldest" else 0
            return counted.writing == 0 and counted.written == counted.taken + counted.full + lost

        assert wait_until(is_accounted_for, WAIT_S)
        ring.close()


def is_full(counted: RingCounters) -> bool:
    return counted.free + counted.writing == 0


@pytest.mark.processes
@pytest.mark.parametrize("when_full", ["drop_oldest", "drop_newest"])
def test_workers_live_on_while_a_slow_learner_finds_the_ring_full(when_full: WhenFull) -> None:
    with collecting(cartpole_net(), CARTPOLE, steps=5, envs_per_worker=2, when_full=when_full) as collector:
        batches = iter(collector)
        next(batches)
        for _ in range(3):
            assert wait_until(lambda: is_full(collector.counters()), WAIT_S)
            if when_full == "drop_newest":
                before = collector.counters().dropped
                assert wait_until(lambda before=before: collector.counters().dropped > before, WAIT_S)
            assert next(batches)["observation"].shape == (6, 2, 4)
        assert collector.counters().dropped > 0
        assert collector.restarted == 0
        assert all(worker.is_alive() for worker in collector.procs)


def test_what_a_ring_cannot_do_is_refused() -> None:
    with pytest.raises(ConfigError, match="no policy for a full ring 'drop'"):
        ring_that("drop")  # type: ignore[arg-type]
    config = Config(
        recipe=ImpalaConfig(when_full="drop_oldest"),
        collector=CollectorConfig(frames_per_batch=160, lag=None),
        cluster=ClusterConfig(kind="ray"),
    )
    with pytest.raises(ConfigError, match="the nodes of a cluster drop no unroll"):
        check(config)
