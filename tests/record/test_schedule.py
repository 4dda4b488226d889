"""The file of a schedule: what is written is read, whatever ended the run, and damage is told."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from rlsync.core.errors import ConfigError
from rlsync.record.schedule import (
    EVERYBODY,
    FixedLag,
    Published,
    Rollout,
    ScheduleWriter,
    compared,
    lives_in,
)


def written(file: Path, *, last: int = 30) -> ScheduleWriter:
    """Two workers, a publish after each rollout of worker 0, digests of every tenth version."""
    writer = ScheduleWriter(file, {"seed": 3})
    for number in range(last):
        writer.rollout(number % 2, 0, number // 2, number + 1)
        writer.publish(number + 2, number + 1)
        if number % 10 == 0:
            writer.digests(number + 2, {"policy.a": number, "policy.b": 7})
    return writer


def test_what_was_noted_is_read_in_its_order(tmp_path: Path) -> None:
    writer = written(tmp_path / "s")
    writer.rollout(1, 2, 15, 31, dropped=True)
    writer.note("end", {"version": 31})
    writer.close()
    (life,) = lives_in(tmp_path / "s")
    assert life.facts == {"seed": 3}
    assert [type(event) for event in life.events[:4]] == [Rollout, Published, Rollout, Published]
    assert life.rollouts[3].number == 1
    assert life.publishes[-1].optim_steps == 30
    assert life.rollouts[-1].dropped
    assert life.rollouts[-1].life == 2
    assert life.digests[12] == {"policy.a": 10, "policy.b": 7}
    assert [note["event"] for note in life.notes] == ["end"]


def test_a_killed_run_leaves_a_readable_file_and_its_next_life_is_added(tmp_path: Path) -> None:
    killed = written(tmp_path / "s")
    killed.flush()
    whole = (tmp_path / "s").read_bytes()
    for cut in (1, 5, 100):
        (tmp_path / "s").write_bytes(whole[:-cut])
        assert len(lives_in(tmp_path / "s")[0].rollouts) == 21, "up to the last whole block"
    ScheduleWriter(tmp_path / "s", {"seed": 3, "resumed": True}).close()
    killed.close()
    first, second = lives_in(tmp_path / "s")
    assert len(first.rollouts) == 21
    assert second.facts["resumed"]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda data: data[:40] + bytes([data[40] ^ 4]) + data[41:], "damaged in the block at byte 16"),
        (lambda data: data[:8] + struct.pack("<I", 2) + data[12:], "has format 2, and this rlsync reads 1"),
        (lambda data: b"RIFF" + data, "no schedule of a run"),
        (lambda data: b"", "no schedule of a run"),
    ],
    ids=["flipped", "newer", "foreign", "empty"],
)
def test_a_file_that_cannot_be_read_is_refused_and_not_written_to(tmp_path: Path, change, told) -> None:
    written(tmp_path / "s").close()
    data = change((tmp_path / "s").read_bytes())
    (tmp_path / "s").write_bytes(data)
    with pytest.raises(ConfigError, match=told) as refused:
        lives_in(tmp_path / "s")
    assert len(str(refused.value).splitlines()) == 3
    if data:
        with pytest.raises(ConfigError, match=told):
            ScheduleWriter(tmp_path / "s", {})
        assert (tmp_path / "s").read_bytes() == data


def test_a_comparison_names_the_first_version_its_leaves_and_what_happened_since(tmp_path: Path) -> None:
    written(tmp_path / "a").close()
    writer = ScheduleWriter(tmp_path / "b", {})
    writer.rollout(0, 1, 0, 1)
    writer.digests(2, {"policy.a": 0, "policy.b": 7})
    writer.digests(12, {"policy.a": 10, "policy.b": 8})
    writer.digests(22, {"policy.a": 99, "policy.b": 7})
    writer.close()
    one, other = (lives_in(tmp_path / name)[0] for name in "ab")
    found = compared(one, other)
    assert (found.equal, found.last_equal, found.unequal, found.leaves) == (1, 2, 12, ("policy.b",))
    assert "updates 2 to 11, 10 rollouts; worker 0: 1 to 5; worker 1: 0 to 4" in str(found)
    assert str(compared(one, one)) == "equal up to version 22: 3 digests of 3"


@pytest.mark.parametrize("per_life", [None, 3])
@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize(("workers", "per_batch"), [(1, 1), (2, 4), (4, 2), (5, 3), (3, 5), (200, 1)])
def test_a_lag_knows_with_which_versions_rollouts_begin(
    workers: int, per_batch: int, lag: int, per_life: int | None
) -> None:
    plan = FixedLag(lag, workers, per_batch, per_life)
    begin = {plan[number].version for number in range(60)}
    last = max(begin)
    assert {version for version in range(1, last + 1) if plan.begins_with(version)} >= begin
    if per_life is None:
        assert {version for version in range(1, last + 1) if plan.begins_with(version)} == begin


def test_a_fixed_lag_lets_rollouts_begin_when_those_that_far_before_were_learned_from() -> None:
    """Two workers; the learner takes four rollouts a batch, and one more round of them may be out."""
    plan = FixedLag(lag=1, workers=2, per_batch=4)
    assert [plan[number].version for number in range(7)] == [1, 1, 1, 2, 2, 3, 3]
    order = plan.rollouts
    assert [(next(order).number, next(order).worker) for _ in range(2)] == [(0, 1), (1, 1)]


def test_a_rollout_costs_at_most_64_bytes(tmp_path: Path) -> None:
    writer = ScheduleWriter(tmp_path / "s", {})
    before = (tmp_path / "s").stat().st_size
    for number in range(1000):
        writer.rollout(EVERYBODY, 3, number, 2**31)
        writer.publish(2**31, number)
    writer.close()
    assert ((tmp_path / "s").stat().st_size - before) / 1000 <= 64
