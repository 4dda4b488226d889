"""The ledger: numbers are given out once, ages are known or not, a resumed learner is a new generation."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsync.core import ledger as ledger_module
from rlsync.core.errors import ConfigError, PublishError
from rlsync.core.ledger import BLOCK, NOTHING, Ledger, Stamp


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


def test_a_learner_that_is_resumed_twice_is_of_the_third_generation() -> None:
    lives = [Ledger() for _ in range(3)]
    for one, other in itertools.pairwise(lives):
        publish(one)
        other.load_state_dict(one.state_dict())
    assert lives[2].generation == 3
    assert lives[2].version == 2


# ------------------------------------------------------------------------------------ reserved numbers


def life(file: Path, checkpoint: dict | None = None) -> Ledger:
    ledger = Ledger()
    ledger.count_with(lambda: 0)
    ledger.reserve_in(file)
    if checkpoint is not None:
        ledger.load_state_dict(checkpoint)
    return ledger


@pytest.mark.parametrize("starts_with_a_publish", [False, True])
def test_lives_that_are_killed_after_one_checkpoint_never_use_a_number_twice(
    tmp_path: Path, starts_with_a_publish: bool
) -> None:
    first = life(tmp_path / "versions.json")
    used = [publish(first) for _ in range(112)]
    checkpoint = first.state_dict()
    used += [publish(first) for _ in range(10)]
    for _ in range(3):
        killed = life(tmp_path / "versions.json")
        if starts_with_a_publish:  # by a collector's constructor
            used.append(publish(killed))
        killed.load_state_dict(checkpoint)
        used += [publish(killed) for _ in range(BLOCK + 7)]
    assert used == sorted(set(used))


def test_a_block_is_reserved_before_its_first_number_and_with_one_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, written, durable = tmp_path / "versions.json", ledger_module.write_whole, []

    def counted(*arguments, **options) -> None:
        written(*arguments, **options)
        durable.append(options["durable"])

    monkeypatch.setattr(ledger_module, "write_whole", counted)
    ledger = life(file)
    durable.clear()
    for number in range(1, 2 * BLOCK + 1):
        assert ledger.next.version == number <= json.loads(file.read_text())["up_to"]
        publish(ledger)
    assert durable == [True, True]


def test_a_life_that_ends_by_itself_leaves_no_gap(tmp_path: Path) -> None:
    first = life(tmp_path / "versions.json")
    publish(first)
    first.give_back()
    second = life(tmp_path / "versions.json", first.state_dict())
    assert publish(second) == 2
    second.give_back()
    assert publish(second) == 3  # it went on after all
    assert publish(life(tmp_path / "versions.json", first.state_dict())) == 2 + BLOCK + 1


def test_two_ledgers_of_one_file_share_no_number(tmp_path: Path) -> None:
    one, other = life(tmp_path / "versions.json"), life(tmp_path / "versions.json")
    used = [publish(ledger) for _ in range(BLOCK + 1) for ledger in (one, other)]
    one.give_back()
    assert len(set(used)) == len(used)
    assert publish(life(tmp_path / "versions.json")) > max(used)


def test_the_lives_of_one_file_have_one_run_id_and_another_file_has_another(tmp_path: Path) -> None:
    lives = [life(tmp_path / name / "versions.json") for name in ("a", "a", "b")]
    assert lives[0].run_id == lives[1].run_id != lives[2].run_id
    assert Ledger().run_id == ""


def test_numbers_that_a_killed_life_has_lost_make_no_version_older(tmp_path: Path) -> None:
    checkpoint = life(tmp_path / "versions.json")
    for _ in range(10):
        publish(checkpoint)
    for resumes in (1, 2):
        resumed = life(tmp_path / "versions.json", checkpoint.state_dict())
        newest = [publish(resumed) for _ in range(3)]
        assert newest[0] > resumes * BLOCK
        assert resumed.ages([10, 7, *newest]) == [3 * resumes, 3 * resumes + 3, 2, 1, 0]
        checkpoint = resumed


def test_a_file_of_reserved_numbers_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "versions.json"
    for content in ("{", '{"run_id": 3, "up_to": 1}', '{"run_id": "it", "up_to": "x"}'):
        file.write_text(content)
        with pytest.raises(ConfigError, match="cannot read the reserved version numbers") as refusal:
            life(file)
        assert "up_to" in refusal.value.cure
