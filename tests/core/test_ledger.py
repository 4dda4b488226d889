"""The ledger: numbers are given out once, ages are known or not, a resumed learner is a new generation."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsync.core.errors import PublishError
from rlsync.core.ledger import NOTHING, Ledger, Stamp


def publish(ledger: Ledger) -> int:
    ledger.record(ledger.next)
    return ledger.version


def test_numbers_begin_at_one_and_grow_by_one() -> None:
    ledger = Ledger()
    assert (ledger.version, ledger.generation) == (0, 1)
    assert [publish(ledger) for _ in range(3)] == [1, 2, 3]


def test_a_number_is_used_up_only_by_a_publish_that_succeeded() -> None:
    ledger = Ledger()
    assert ledger.next == ledger.next == Stamp(1, 1)
    publish(ledger)
    assert ledger.next == Stamp(1, 2)


def test_a_stamp_that_was_not_given_out_is_refused() -> None:
    ledger = Ledger()
    publish(ledger)
    for stamp in (Stamp(1, 1), Stamp(1, 3), Stamp(2, 2)):
        with pytest.raises(PublishError, match="was not given out"):
            ledger.record(stamp)
    assert ledger.version == 1


def test_stamps_are_ordered_by_generation_first() -> None:
    assert NOTHING < Stamp(1, 1) < Stamp(1, 15) < Stamp(2, 11)


def test_every_version_has_the_optimizer_steps_of_its_publish_whoever_published() -> None:
    ledger, steps = Ledger(), [0]
    ledger.count_with(lambda: steps[0])
    for steps[0] in (0, 10, 25):
        publish(ledger)
    assert [ledger.optim_steps_since(version, now=40) for version in (1, 2, 3)] == [40, 30, 15]


def test_the_age_of_a_version_that_the_ledger_does_not_know_is_unknown() -> None:
    ledger = Ledger()
    publish(ledger)  # nobody counted steps then
    ledger.count_with(lambda: 7)
    publish(ledger)
    assert ledger.optim_steps_since(1, now=7) is None
    assert ledger.optim_steps_since(2, now=7) == 0
    assert ledger.optim_steps_since(3, now=7) is None
    assert ledger.known(3) is None


def test_versions_from_before_the_first_optimizer_step_were_published_at_step_zero() -> None:
    ledger = Ledger()
    publish(ledger)
    ledger.count_with(lambda: 0)
    assert ledger.optim_steps_since(1, now=12) == 12


@given(st.integers(1, 40), st.integers(0, 120))
def test_no_more_versions_are_remembered_than_asked_for_and_they_are_the_newest(
    history: int, publishes: int
) -> None:
    ledger = Ledger(history)
    ledger.count_with(lambda: 0)
    for _ in range(publishes):
        publish(ledger)
    remembered = [v for v in range(1, publishes + 1) if ledger.known(v) is not None]
    assert remembered == list(range(max(1, publishes - history + 1), publishes + 1))
    assert len(ledger.state_dict()["published"]) == len(remembered)


def test_a_resumed_learner_goes_on_counting_in_the_next_generation() -> None:
    before, after = Ledger(), Ledger()
    before.count_with(lambda: 5)
    for _ in range(10):
        publish(before)
    publish(after)  # what the new process published while it was being built
    after.load_state_dict(before.state_dict())
    assert (after.version, after.generation) == (10, 2)
    assert after.next == Stamp(2, 11) > Stamp(1, 15)
    assert after.optim_steps_since(10, now=8) == 3
    known = after.known(10)
    assert known is not None
    assert (known.stamp, known.time_s) == (Stamp(1, 10), None)


def test_a_state_without_a_generation_is_of_the_first_one() -> None:
    ledger = Ledger()
    ledger.load_state_dict({"version": 4, "published": [(3, 30), (4, 40)]})
    assert ledger.next == Stamp(2, 5)
    assert ledger.optim_steps_since(3, now=50) == 20


def test_a_checkpoint_older_than_this_life_lets_no_number_and_no_generation_come_again() -> None:
    ledger = Ledger(generation=3)
    for _ in range(5):
        publish(ledger)
    ledger.load_state_dict({"version": 2, "generation": 1, "published": []})
    assert ledger.next == Stamp(3, 6)


def test_what_a_life_published_before_it_was_resumed_is_of_unknown_age() -> None:
    ledger = Ledger()
    ledger.count_with(lambda: 7)
    publish(ledger)
    ledger.load_state_dict({"version": 4, "published": [(3, 30)]})
    assert [ledger.optim_steps_since(version, now=40) for version in (1, 3)] == [None, 10]


def test_versions_of_the_life_before_are_not_taken_to_be_of_step_zero() -> None:
    ledger = Ledger()
    publish(ledger)
    ledger.follow(Stamp(1, 1))
    publish(ledger)
    ledger.count_with(lambda: 0)
    assert [ledger.optim_steps_since(version, now=12) for version in (1, 2)] == [None, 12]


def test_a_learner_that_is_resumed_twice_is_of_the_third_generation() -> None:
    lives = [Ledger() for _ in range(3)]
    for one, other in itertools.pairwise(lives):
        publish(one)
        other.load_state_dict(one.state_dict())
    assert lives[2].generation == 3
    assert lives[2].version == 2
