"""``rlsync check`` says what a run will do; each recipe's run is held against it."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from itertools import pairwise

import pytest

from rlsync import Every
from rlsync.core.errors import ConfigError
from rlsync.runs.cli.main import main
from rlsync.runs.cli.planned import as_text
from rlsync.runs.recipes.checks import more_frames
from rlsync.runs.recipes.dqn import DQNConfig
from rlsync.runs.recipes.impala.settings import ImpalaConfig, ModelConfig, UnrollReplayConfig
from rlsync.runs.recipes.sac import SACConfig
from rlsync.runs.recipes.settings import CollectorConfig, Config, EnvConfig, RecipeConfig, SyncConfig
from rlsync.runs.recipes.timeline import Timeline, publishes, timeline
from tests.runs.recipes.test_dreamer_recipes import small as small_dreamer
from tests.runs.recipes.test_off_policy import Iteration, built, every_recipe, pace_of, small
from tests.runs.recipes.test_recipes import WhenConfig, hook_of, small_ppo, trained

WHEN = [WhenConfig(), WhenConfig(every=5, unit="optim_steps"), WhenConfig(every=100, unit="frames")]


@every_recipe
@pytest.mark.parametrize("when", WHEN, ids=lambda when: when.unit)
@pytest.mark.usefixtures("fork_workers")
@pytest.mark.one_case
def test_a_run_does_what_its_plan_says(name: str, when: WhenConfig) -> None:
    config = small(name, workers=1, batch=32)
    config.sync.when = when
    plan = held_plan(config)
    assert plan.ratio == 0.5
    assert [phase.updates for phase in plan.phases] == [0, 48]


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["dreamer_v1", "dreamer_v3"])
@pytest.mark.usefixtures("fork_workers")
def test_a_world_model_is_trained_when_the_plan_says(name: str) -> None:
    plan = held_plan(small_dreamer(name, "sync.when.every=5", "sync.when.unit=optim_steps"))
    assert [phase.updates for phase in plan.phases] == [0, 16]
    assert "on 4 sequences of 4 stored frames; 3 steps are imagined from each of these 16" in plan.update


def held_plan(config: Config) -> Timeline:
    """The plan of a run, which the run was seen to keep: rounds, updates and publishes."""
    plan = timeline(config)
    trainer = built(config)
    pace, trace = pace_of(trainer), [Iteration(0, 0)]
    trainer.register_op("post_steps", lambda: trace.append(Iteration(trainer.collected_frames, pace.updates)))
    hook = trained(trainer)
    end = trace[-1]
    assert (plan.frames, plan.updates) == (end.frames, end.updates)
    assert sum(receipt.reason == "trigger" for receipt in hook.receipts) == plan.publishes
    prefill, learning = plan.phases
    for phase in (prefill, learning):
        frames = range(phase.first_frame, phase.last_frame + 1)
        made = [
            after.updates - before.updates for before, after in pairwise(trace) if before.frames in frames
        ]
        assert (len(made), sum(made)) == (phase.rounds, phase.updates)
        assert (min(made), max(made)) == (phase.fewest, phase.most)
    return plan


def on_policy(name: str) -> Config:
    """A run of a few small batches."""
    if name.startswith("ppo"):
        every = SyncConfig(when=WhenConfig(every=3, unit="optim_steps"))
        config = small_ppo(workers=1, batch=32, env=EnvConfig(num_envs=4), sync=every)
        if name == "ppo-lstm":
            config.recipe.model.lstm = 4
        return config
    replay = (
        UnrollReplayConfig(ratio=1.0, min_steps=20, capacity_steps=200)
        if name == "laser"
        else UnrollReplayConfig()
    )
    recipe = ImpalaConfig(
        total_frames=205,
        batch_size=4,
        unroll_length=10,
        model=ModelConfig(hidden=[16]),
        replay=replay,
    )
    collector = CollectorConfig(num_workers=1, frames_per_batch=40, lag=None)
    when = WhenConfig(every=2, unit="batches")
    return Config(env=EnvConfig(num_envs=2), recipe=recipe, collector=collector, sync=SyncConfig(when=when))


@pytest.mark.parametrize(
    ("name", "updates", "publishes"), [("ppo", 16, 5), ("ppo-lstm", 16, 5), ("impala", 6, 3), ("laser", 6, 3)]
)
@pytest.mark.usefixtures("fork_workers")
@pytest.mark.one_case
def test_a_run_without_a_pace_does_what_its_plan_says(name: str, updates: int, publishes: int) -> None:
    config = on_policy(name)
    plan, trainer = timeline(config), built(config)
    hook, trace = hook_of(trainer), [Iteration(0, 0)]
    trainer.register_op(
        "post_steps", lambda: trace.append(Iteration(trainer.collected_frames, hook.counters().optim_steps))
    )
    trained(trainer)
    end = trace[-1]
    assert (plan.frames, plan.updates, plan.updates) == (end.frames, end.updates, updates)
    assert sum(receipt.reason == "trigger" for receipt in hook.receipts) == plan.publishes == publishes
    (learning,) = plan.phases
    made = [after.updates - before.updates for before, after in pairwise(trace)]
    assert (len(made), min(made), max(made)) == (learning.rounds, learning.fewest, learning.most)


@pytest.mark.seconds
def test_the_verb_prints_phases_publishes_and_evaluations(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "recipe=dqn"]) == 0
    said = capsys.readouterr().out
    assert "plan of dqn on CartPole-v1" in said
    assert "frames 0 to 895" in said
    assert "learning: 12 to 64 updates after each batch of 128 frames (384 rounds)" in said
    assert "every 4 optim_steps: 6,131 versions after the first" in said
    assert "at least 1,000 frames apart" in said
    assert "50,048 frames, 24,524 updates, ratio 0.5" in said


SAC = """plan of sac on CartPole-v1
  frames 0 to 9,999          prefill: random actions, no update (100 rounds)
  frames 10,000 to 99,999    learning: 100 updates after each batch of 100 frames (900 rounds)
  publish                    every 1 batches: 1,000 versions after the first
  evaluation                 never
  checkpoint                 every 20,000 frames, the length of a life, and at the end
  workers                    2, each with 1 environment: 50 policy calls for a rollout, 2 rollouts for a batch; lag 1: workers act while the learner learns; more frames a second: env.num_envs=2
  end                        100,000 frames, 90,000 updates, ratio 1"""  # noqa: E501


@pytest.mark.parametrize(
    ("collector", "says"),
    [
        (
            CollectorConfig(2, 64, lag=0),
            "2, each with 1 environment: 32 policy calls for a rollout, 2 rollouts",
        ),
        (
            CollectorConfig(0, 64),
            "none, the learner has its 1 environment: 64 policy calls for a rollout, 1 roll",
        ),
    ],
)
def test_a_plan_says_who_acts_and_with_which_lag(collector: CollectorConfig, says: str) -> None:
    config = Config(recipe=DQNConfig(), collector=collector)
    text = as_text(config, timeline(config))
    assert says in text
    assert f" for a batch; {config.lag_facts()}" in text
    assert "lag 0: " in text


def test_a_plan_is_a_table_of_what_happens_when() -> None:
    config = Config(recipe=SACConfig(), collector=CollectorConfig(frames_per_batch=100))
    assert as_text(config, timeline(config)) == SAC


@pytest.mark.seconds
def test_the_verb_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--json", "recipe=td3", "env=gymnasium", "env.id=Pendulum-v1"]) == 0
    said = json.loads(capsys.readouterr().out)
    (plan,) = said["plans"]
    assert [phase["name"] for phase in plan["phases"]] == ["prefill", "learning"]
    assert plan["evaluation_every_frames"] == 0
    assert "update" in said["glossary"]


@pytest.mark.seconds
def test_a_recipe_that_cannot_tell_its_updates_has_no_plan() -> None:
    with pytest.raises(ConfigError, match="does not say how many updates follow a batch"):
        timeline(Config(recipe=RecipeConfig(name="mine")))


@pytest.mark.parametrize(
    ("change", "override"),
    [
        ({"env": EnvConfig(num_envs=4)}, "env.num_envs=8"),
        ({"env": EnvConfig(num_envs=16), "collector": CollectorConfig(lag=0)}, "collector.lag=1"),
        ({"env": EnvConfig(num_envs=4), "collector": CollectorConfig(2, 8, lag=0)}, "collector.lag=1"),
        ({"collector": CollectorConfig(2, 2)}, None),
    ],
)
def test_a_plan_names_a_key_with_which_workers_make_more_frames(
    change: dict[str, object], override: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    config = replace(Config(recipe=DQNConfig()), **change)  # type: ignore[arg-type]
    assert more_frames(config) == override
    if override is not None:
        assert f"more frames a second: {override}" in as_text(config, timeline(config))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    more = more_frames(
        replace(config, env=replace(config.env, num_envs=16), collector=CollectorConfig(2, 192))
    )
    assert more == "collector.num_workers=3"


def test_the_steps_of_a_round_lie_evenly_between_its_frames() -> None:
    assert list(publishes(Every(3, "optim_steps"), [Iteration(100, 4), Iteration(200, 8)])) == [75.0, 150.0]
