"""``rlsync plan`` says what a run will do; each recipe's run is held against it."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from rlsync.cli.main import main
from rlsync.recipes.off_policy.timeline import timeline
from tests.test_off_policy import Iteration, built, every_recipe, pace_of, small
from tests.test_recipes import WhenConfig, trained

WHEN = [WhenConfig(), WhenConfig(every=5, unit="optim_steps"), WhenConfig(every=100, unit="frames")]


@every_recipe
@pytest.mark.parametrize("when", WHEN, ids=lambda when: when.unit)
@pytest.mark.usefixtures("fork_workers")
def test_a_run_does_what_its_plan_says(name: str, when: WhenConfig) -> None:
    config = small(name)
    config.sync.when = when
    plan = timeline(config)
    trainer = built(config)
    pace, trace = pace_of(trainer), [Iteration(0, 0)]
    trainer.register_op("post_steps", lambda: trace.append(Iteration(trainer.collected_frames, pace.updates)))
    hook = trained(trainer)
    end = trace[-1]
    assert (plan.frames, plan.updates, plan.ratio) == (end.frames, end.updates, 0.25)
    assert sum(receipt.reason == "trigger" for receipt in hook.receipts) == plan.publishes
    prefill, learning = plan.phases
    for phase in (prefill, learning):
        frames = range(phase.first_frame, phase.last_frame + 1)
        made = [
            after.updates - before.updates for before, after in pairwise(trace) if before.frames in frames
        ]
        assert (len(made), sum(made)) == (phase.rounds, phase.updates)
        assert (min(made), max(made)) == (phase.fewest, phase.most)
    assert (prefill.updates, learning.updates) == (0, 48)


@pytest.mark.seconds
def test_the_verb_prints_phases_publishes_evaluations_and_what_the_words_mean(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", "recipe=dqn"]) == 0
    said = capsys.readouterr().out
    assert "plan of dqn on CartPole-v1" in said
    assert "frames 0 to 895" in said
    assert "learning: 12 to 64 updates after each batch of 128 frames (384 rounds)" in said
    assert "every 4 optim_steps: 6,131 versions after the first" in said
    assert "at least 2,000 frames apart, which are 250 versions" in said
    assert "50,048 frames, 24,524 updates, ratio 0.5" in said
    assert "one step of the optimizer" in said


@pytest.mark.seconds
def test_the_verb_prints_json_and_refuses_a_recipe_without_a_pace(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--json", "recipe=td3", "env=gymnasium", "env.id=Pendulum-v1"]) == 0
    said = json.loads(capsys.readouterr().out)
    (plan,) = said["plans"]
    assert [phase["name"] for phase in plan["phases"]] == ["prefill", "learning"]
    assert plan["evaluation_every_versions"] == 0
    assert "update" in said["glossary"]
    assert main(["plan", "recipe=ppo"]) == 2
    assert "has no pace" in capsys.readouterr().err
