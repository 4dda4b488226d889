"""What a worker leaves behind: the actions of its life, and how it stood after its newest two rollouts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from rlsync.core.errors import BoardClosed, RlsyncError
from rlsync.runs.actors import frames as keys
from rlsync.runs.actors.trail import Standing, Sums, Trail, Trails

STEPS, ENVS, WORKERS = 3, 2, 2


def arrays(fill: float) -> dict[str, Tensor]:
    return {
        keys.ACTION: torch.full((STEPS, ENVS, 2), fill),
        keys.OBSERVATION: torch.full((STEPS + 1, ENVS, 4), fill),
        keys.REWARD: torch.full((STEPS, ENVS), fill),
        keys.TERMINATED: torch.zeros(STEPS, ENVS, dtype=torch.bool),
        keys.TRUNCATED: torch.zeros(STEPS, ENVS, dtype=torch.bool),
    }


def standing(fill: float) -> Standing:
    states = [{"h": torch.full((ENVS, 3), fill, dtype=torch.bfloat16), "none": torch.empty(0)}, {}]
    return Standing(states, torch.Generator().manual_seed(int(fill)).get_state())


@pytest.fixture
def trails() -> Iterator[Trails]:
    made = Trails(WORKERS, arrays(0)[keys.ACTION].nbytes)
    yield made
    made.close()


def noted(trail: Trail, number: int, place: int, fill: float) -> None:
    trail.note(number, place, trail.slot(number, arrays(fill)), standing(fill))


def test_another_process_reads_the_actions_and_how_the_worker_stood(trails: Trails) -> None:
    for worker in range(WORKERS):
        trail = trails.handle.open(worker)
        for place in range(5):
            noted(trail, 10 + place, place, 100 * worker + place)
        trail.close()
    for worker in range(WORKERS):
        trail = trails.handle.open(worker)
        for place in range(5):
            views = arrays(-1)
            sums = trail.entry(place, trail.slot(place, views))
            fill = 100 * worker + place
            assert bool((views[keys.ACTION] == fill).all())
            assert sums == trail.slot(100 + place, arrays(fill)).sums()
        for number in (13, 14):
            states, randomness = trail.standing_after(number)
            wanted = standing(100 * worker + number - 10)
            assert torch.equal(randomness, wanted.randomness)
            assert torch.equal(states[0]["h"], wanted.states[0]["h"])
            assert states[0]["none"].shape == (0,)
            assert states[1] == {}
        with pytest.raises(RlsyncError, match="after rollout 12 was not noted"):
            trail.standing_after(12)
        trail.close()


def test_a_note_that_was_not_completed_is_not_taken_and_the_one_before_is_whole(trails: Trails) -> None:
    trail = trails.handle.open(1)
    noted(trail, 0, 0, 1.0)
    noted(trail, 1, 1, 2.0)
    trail._file.write(b"torn", trail._note_at(1) + 100)
    with pytest.raises(RlsyncError, match="after rollout 1 was not noted"):
        trail.standing_after(1)
    assert torch.equal(trail.standing_after(0).states[0]["h"], standing(1.0).states[0]["h"])
    trail.close()


@pytest.mark.parametrize(
    ("name", "part"),
    [
        (keys.OBSERVATION, "observation"),
        (keys.REWARD, "reward"),
        (keys.TERMINATED, "end"),
        (keys.TRUNCATED, "end"),
    ],
)
def test_what_differs_is_named(trails: Trails, name: str, part: str) -> None:
    trail = trails.handle.open(0)
    one, other = arrays(1.0), arrays(1.0)
    other[name][-1] = 5.0 if other[name].is_floating_point() else True
    recorded = trail.slot(0, one).sums()
    assert isinstance(recorded, Sums)
    assert trail.slot(1, other).sums().other_than(recorded) == [part]
    assert trail.slot(0, one).sums().other_than(recorded) == []
    trail.close()


def test_what_two_lives_go_on_from_is_kept_and_what_was_not_completed_is_not_taken(trails: Trails) -> None:
    """Who dies after it was left for the next life begins its own life once more."""
    one, other = trails.handle.open(0), trails.of(1)
    for life in range(1, 4):
        for trail in (one, other):
            assert trail.saved(100 * life) is None
            trail.save(life, 100 * life, f"{trail._worker} {life}".encode())
        noted(one, life, 0, 1.0)
        for trail in (one, other):
            assert trail.saved(100 * life) == f"{trail._worker} {life}".encode()
            if life > 1:
                assert trail.saved(100 * (life - 1)) == f"{trail._worker} {life - 1}".encode()
            assert trail.saved(100 * (life - 2)) is None
    one._file.write(b"torn", trails.handle.saved_at + (1 << 28) + 16)
    assert one.saved(300) is None
    assert one.saved(200) == b"0 2"
    assert torch.equal(one.standing_after(3).states[0]["h"], standing(1.0).states[0]["h"])
    one.close()


def test_a_trail_is_gone_with_its_learner(trails: Trails) -> None:
    trails.close()
    with pytest.raises(BoardClosed):
        trails.handle.open(0)
