"""The pace: optimizer steps for each collected frame, by sheeprl's cases and by any sequence of batches."""

from __future__ import annotations

import math
import random
import warnings

import pytest

from rlsync.runs.actors.replay.pacing import Pace
from rlsync.runs.recipes.checks import check, errors
from rlsync.runs.recipes.dqn import DQNConfig
from rlsync.runs.recipes.hooks.steering import KeepPace
from rlsync.runs.recipes.replay.settings import PaceConfig
from rlsync.runs.recipes.sac import SACConfig
from rlsync.runs.recipes.settings import CollectorConfig, Config


def updates_after(pace: Pace, batches: list[int], updates: int = 0) -> list[tuple[int, int]]:
    """Frames and updates after each batch, whose sizes are given."""
    frames, found = 0, []
    for batch in batches:
        frames += batch
        updates += pace.due(frames, updates)
        found.append((frames, updates))
    return found


# ------------------------------------------------------------------------------- sheeprl's cases


def test_four_environments_make_1536_updates_in_4096_frames_and_the_logged_ratio_is_the_one_held() -> None:
    # sheeprl: 1,538 updates, and it logs 0.375
    pace = Pace(0.5, prefill=1024)
    frames, updates = updates_after(pace, [4] * 1024)[-1]
    assert (frames, updates) == (4096, 1536)
    assert pace.measured(frames, updates) == 0.5


def test_a_hundred_steps_of_pretraining_count_as_updates() -> None:
    # sheeprl: 2 updates follow at once
    pace = Pace(0.5, prefill=1024)
    trace = dict(updates_after(pace, [4] * 1024, updates=100))
    assert trace[1224] == 100, "those of the first 200 frames have been made"
    assert trace[1228] == 102
    assert trace[4096] == 1536


def test_after_a_gap_the_updates_come_in_bursts_of_the_size_that_was_asked_for() -> None:
    # sheeprl: one burst of 512
    trace = updates_after(Pace(0.5, burst=64), [1024] + [4] * 10)
    made = [after - before for (_, before), (_, after) in zip([(0, 0), *trace], trace, strict=False)]
    assert made[:8] == [64] * 8, "4 x 8 frames allow 16 more, so the eighth burst is not the last"
    assert sum(made) == (1024 + 40) / 2


# ---------------------------------------------------------------------------------------- always


@pytest.mark.parametrize("ratio", [0.1, 0.29, 1 / 3, 0.5, 1.0, 3.7])
def test_the_ratio_is_held_within_one_update_between_the_ends_of_any_two_batches(ratio: float) -> None:
    draw = random.Random(7)
    batches = [draw.choice([1, 2, 64, 500]) for _ in range(300)]
    trace = updates_after(Pace(ratio, prefill=100), batches)
    learning = [(frames, updates) for frames, updates in trace if frames >= 100]
    for at, (begin, before) in enumerate(learning):
        for end, after in learning[at + 1 :: 17]:
            assert abs((after - before) - ratio * (end - begin)) <= 1


def test_nothing_is_updated_during_the_prefill_and_no_ratio_is_claimed() -> None:
    pace = Pace(2.0, prefill=10)
    assert [pace.due(frames, 0) for frames in (0, 9, 10, 11)] == [0, 0, 0, 2]
    assert math.isnan(pace.measured(10, 0))


def test_a_pace_that_began_later_owes_nothing_of_the_time_before() -> None:
    pace = Pace(1.0, prefill=100, from_frames=1000, from_updates=450)
    assert (pace.due(1000, 450), pace.due(1010, 450)) == (0, 10)
    assert pace.measured(1010, 460) == 1.0
    early = Pace(1.0, prefill=100, from_frames=50)
    assert (early.due(100, 0), early.due(120, 0)) == (0, 20)


@pytest.mark.parametrize(
    ("recipe", "where"),
    [
        (SACConfig(lr=math.inf), "recipe.lr"),
        (SACConfig(pace=PaceConfig(ratio=0.0)), "recipe.pace.ratio"),
        (SACConfig(pace=PaceConfig(ratio=math.nan)), "recipe.pace.ratio"),
        (SACConfig(pace=PaceConfig(ratio=-0.5)), "recipe.pace.ratio"),
        (SACConfig(pace=PaceConfig(ratio=math.inf)), "recipe.pace.ratio"),
        (SACConfig(pace=PaceConfig(ratio=-math.inf)), "recipe.pace.ratio"),
        (SACConfig(pace=PaceConfig(burst=0)), "recipe.pace.burst"),
        (SACConfig(pace=PaceConfig(ratio=0.1, burst=12)), "recipe.pace.burst"),  # 12.8 are asked for
        (SACConfig(pace=PaceConfig(prefill=-1)), "recipe.pace.prefill"),
        (SACConfig(total_frames=1_000), "recipe.pace.prefill"),
        (SACConfig(total_frames=999), "recipe.pace.prefill"),
        (SACConfig(buffer_frames=0), "recipe.buffer_frames"),
        (DQNConfig(buffer_frames=32), "recipe.buffer_frames"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_anything_runs(recipe: SACConfig, where: str) -> None:
    config = Config(recipe=recipe, collector=CollectorConfig(frames_per_batch=128))
    found = list(errors(config))
    assert {error.where for error in found} == {where}
    assert len({error.what for error in found}) == len(found), "each is told once"


def test_a_burst_of_what_one_batch_asks_for_is_enough() -> None:
    recipe = SACConfig(pace=PaceConfig(ratio=0.1, burst=13))
    check(Config(recipe=recipe, collector=CollectorConfig(frames_per_batch=128)))
    assert updates_after(recipe.pace.pace(), [1000] + [128] * 50)[-1] == (7400, 640)


# --------------------------------------------------------------------------------------- resumed


def resumed(before: KeepPace, pace: Pace) -> KeepPace:
    after = KeepPace(pace)
    after.load_state_dict(before.state_dict())
    return after


def test_a_resumed_pace_goes_on_with_its_count() -> None:
    before = KeepPace(Pace(0.5, prefill=10))
    before.updates = 45
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        after = resumed(before, Pace(0.5, prefill=10))
    assert after.pace.due(110, after.updates) == 5
    assert resumed(after, Pace(0.5, prefill=10)).updates == 45


def test_the_configs_ratio_wins_over_that_of_the_checkpoint() -> None:
    before = KeepPace(Pace(0.5))
    before.updates = 50
    state = before.state_dict() | {"frames": 100}
    after = KeepPace(Pace(2.0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the list of changed settings tells it, once
        after.load_state_dict(state)
    assert after.pace.due(110, after.updates) == 20, (
        "not the 150 that the new ratio had asked for from the start"
    )
