"""Recipes and the actor-learner on a second device, without a GPU; see tests/tools/parts/second_device.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlsync.runs.evaluation.checkpoint import load
from rlsync.runs.recipes.evaluating import acting_of
from rlsync.runs.recipes.run_files import CHECKPOINT
from tests.tools.programs import run_program
from tests.tools.second_device_checks import config_of

pytestmark = pytest.mark.processes

TOOLS = Path(__file__).parents[2] / "tools"
#: A process cannot get rid of a device: whatever needs it runs in a program of its own.
CHECKS, RLSYNC = str(TOOLS / "second_device_checks.py"), str(TOOLS / "second_device_program.py")


def held(cwd: Path, *check: str) -> None:
    done = run_program(CHECKS, *check, cwd=cwd)
    assert done.returncode == 0, done.stderr


def said(cwd: Path, *line: str) -> str:
    done = run_program(RLSYNC, *line, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.seconds
def test_workers_act_where_they_are_told_and_batches_lie_on_the_learners_device(tmp_path: Path) -> None:
    held(tmp_path, "workers_act_where_they_are_told")


@pytest.mark.seconds
def test_a_slot_is_given_back_only_when_its_copy_to_the_learners_device_is_done(tmp_path: Path) -> None:
    held(tmp_path, "a_slot_is_given_back_when_it_is_copied")


@pytest.mark.seconds
def test_the_evaluating_process_plays_on_its_own_device(tmp_path: Path) -> None:
    held(tmp_path, "evaluations_play_there")


def told(folder: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((folder / "told.json").read_text())
    return found


@pytest.mark.seconds
@pytest.mark.parametrize("recipe", ["sac", "impala", "ppo", "dqn"])
@pytest.mark.one_case
def test_a_recipe_learns_on_the_learners_device_and_its_checkpoint_plays_on_the_cpu(
    recipe: str, tmp_path: Path
) -> None:
    held(tmp_path, "the_learner_learns_there", recipe)
    facts = told(tmp_path)
    where = {name: facts[name] for name in ("consumed", "trained", "optimizer", "replay buffer")}
    assert where == {
        "consumed": ["second"],
        "trained": ["second"],
        "optimizer": ["second"],
        "replay buffer": [] if recipe == "impala" else ["second"],
    }
    assert facts["changed"]
    acting = acting_of(config_of(recipe))
    load(tmp_path / CHECKPOINT, acting)
    (policy,) = acting.player.modules.values()
    weights = [float(t.double().sum()) for t in policy.state_dict().values()]
    assert weights == pytest.approx(facts["policy"]), "the weights that the learner ended with"


@pytest.mark.seconds
def test_a_replay_buffer_on_the_learners_device_is_saved_and_loaded_there_or_elsewhere(
    tmp_path: Path,
) -> None:
    held(tmp_path, "a_replay_buffer_there_is_saved_and_loaded")


@pytest.mark.seconds
def test_a_recipe_that_does_not_train_where_it_is_told_is_refused(tmp_path: Path) -> None:
    held(tmp_path, "a_recipe_that_stays_on_the_cpu_is_refused")


SMALL = (
    *("~tuned", "recipe=laser", "logger=none", "env.num_envs=2", "collector.frames_per_batch=40"),
    *("recipe.unroll_length=10", "recipe.batch_size=4", "recipe.model.lstm=4", "recipe.model.hidden=[8]"),
    *("recipe.replay.min_steps=40", "recipe.replay.checkpointed=true", "recipe.total_frames=120"),
)
ON_SECOND = ("learner.device=second", "collector.device=[second,cpu]", "evaluation.device=second")


@pytest.mark.seconds
@pytest.mark.thorough
def test_a_run_resumes_on_another_device_and_back(tmp_path: Path) -> None:
    said(tmp_path, "train", *SMALL, *ON_SECOND, "run_dir=a")
    on_cpu = ("learner.device=cpu", "collector.device=cpu", "evaluation.device=cpu")
    lacking = run_program("rlsync", "check", "resume=a", "recipe.total_frames=200", cwd=tmp_path)
    assert lacking.returncode == 2
    assert "no device is called 'second'\n  where  learner.device" in lacking.stdout
    done = run_program(
        "rlsync", "train", "resume=a", "run_dir=b", "recipe.total_frames=200", *on_cpu, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "changed learner.device second -> cpu" in done.stdout
    back = said(tmp_path, "train", "resume=b", "run_dir=c", "recipe.total_frames=280", *ON_SECOND)
    assert "frames 200\n" in back
    assert "stopped: total_frames collected  frames 280" in back


@pytest.mark.seconds
@pytest.mark.thorough
def test_rlsync_eval_plays_and_films_on_the_device_that_the_config_or_the_option_names(
    tmp_path: Path,
) -> None:
    said(tmp_path, "train", *SMALL, *ON_SECOND, "run_dir=a")
    there = json.loads(said(tmp_path, "eval", "a", "--episodes", "2", "--json"))
    assert there["device"] == "second:0"
    assert there["video"]["file"] is not None
    line = ("eval", "a", "--episodes", "2", "--json", "--no-video")
    refused = run_program("rlsync", *line, cwd=tmp_path)
    assert refused.returncode == 2
    assert refused.stderr.startswith("no device is called 'second'\n  where  evaluation.device")
    here = run_program("rlsync", *line, "--device", "cpu", cwd=tmp_path)
    assert json.loads(here.stdout)["device"] == "cpu"
    assert json.loads(here.stdout)["return_mean"] == there["return_mean"]
