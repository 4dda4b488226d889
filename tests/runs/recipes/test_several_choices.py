"""Recipes learn actions of several choices, and such a run resumes, is made again, plays and is exported."""

from __future__ import annotations

import json
from pathlib import Path

import gymnasium
import numpy as np
import pytest

from rlsync.runs.recipes.run_files import statistics_in
from tests.tools.parts.space_envs import TOLD
from tests.tools.programs import ENDS_WITHIN_S, run_program

COMMON = (
    "env=gymnasium",
    f"env.id={TOLD}",
    "env.num_envs=8",
    "logger=none",
    "recipe.gamma=0.5",
    "recipe.lr=0.01",
    "recipe.target_return=null",
)
PPO = ("recipe=ppo", "recipe.compile=off", "recipe.hidden=[32]", "collector.frames_per_batch=512")
UNROLLS = ("recipe.model.last_action=true", "collector.lag=1")
RECIPES = {
    "ppo": (*PPO, "recipe.batch_size=64"),
    "ppo-lstm": (*PPO, "recipe.batch_size=32", "recipe.model.lstm=32", "recipe.normalize_advantage=true"),
    "impala": ("recipe=impala", *UNROLLS),
    "laser": ("recipe=laser", *UNROLLS, "recipe.replay.min_steps=500"),
}
FRAMES = 9600


def rlsync(folder: Path, *words: str) -> str:
    done = run_program("rlsync", *words, cwd=folder, timeout_s=ENDS_WITHIN_S / 4)
    assert done.returncode == 0, done.stdout + done.stderr
    return str(done.stdout)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.each_value
@pytest.mark.parametrize("actions", ["discrete", "binary"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_run_learns_several_choices_and_all_that_can_be_done_with_a_run_can_be_done_with_it(
    recipe: str, actions: str, tmp_path: Path
) -> None:
    words = (*RECIPES[recipe], *COMMON, f"+env.kwargs.actions={actions}", "run_dir=run")
    rlsync(tmp_path, "train", *words, f"recipe.total_frames={FRAMES // 2}")
    rlsync(tmp_path, "train", *words, f"recipe.total_frames={FRAMES}", "resume=run")
    statistics = statistics_in(tmp_path / "run")
    assert statistics is not None
    assert statistics.return_mean is not None
    assert statistics.return_mean > 7, "choices that are not looked at earn less than 5"

    assert "equal up to version" in rlsync(tmp_path, "rerun", "run")
    told = json.loads(rlsync(tmp_path, "frame", "--json", "run", "100"))
    assert all(told["equal"].values())
    space = gymnasium.make(TOLD, actions=actions).action_space
    assert space.contains(np.array(told["sent"], space.dtype))
    played = json.loads(rlsync(tmp_path, "eval", "run", "--json", "--no-video", "--deterministic"))
    assert played["return_mean"] > 7.5
    exported = rlsync(tmp_path, "export", "run", "policy.pt2")
    assert "compared on 1,000 observations" in exported
