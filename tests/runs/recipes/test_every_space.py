"""Recipes learn in environments of every kind of spaces, and all that can be done with a run can be done there.

Such a run resumes, is made again bit by bit, is looked into, plays and is exported.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from rlsync.runs.recipes.run_files import statistics_in
from tests.tools.parts.space_envs import PARTS, TOLD, hinted
from tests.tools.programs import ENDS_WITHIN_S, run_program

COMMON = (
    "env.num_envs=8",
    "logger=none",
    "recipe.gamma=0.5",
    "recipe.target_return=null",
    "checkpoint_every_frames=100000",
)
PPO = ("recipe=ppo", "recipe.compile=off", "recipe.hidden=[32]", "collector.frames_per_batch=512")
UNROLLS = ("recipe.model.last_action=true", "collector.lag=1", "recipe.lr=0.01")
REPLAY = (
    "recipe.compile=off",
    "recipe.hidden=[32]",
    "recipe.pace.prefill=256",
    "recipe.pace.ratio=0.25",
    "recipe.n_step=1",
    "collector.frames_per_batch=64",
)
#: Pictures, numbers and choices; dqn sees them as they are.
NORMALIZED = "recipe.normalize.observations=true"
RECIPES = {
    "ppo": (*PPO, NORMALIZED, "recipe.batch_size=64", "recipe.lr=0.01"),
    "ppo-lstm": (
        *PPO,
        NORMALIZED,
        "recipe.batch_size=32",
        "recipe.lr=0.003",
        "recipe.model.lstm=32",
        "recipe.normalize_advantage=true",
    ),
    "impala": ("recipe=impala", *UNROLLS),
    "laser": ("recipe=laser", *UNROLLS, NORMALIZED, "recipe.replay.min_steps=500"),
    "dqn": ("recipe=dqn", *REPLAY, "recipe.epsilon_frames=2000"),
    "sac": ("recipe=sac", *REPLAY, NORMALIZED, "recipe.lr=0.003", "recipe.batch_size=64"),
    "dreamer_v3": (
        "recipe=dreamer_v3",
        "recipe.batch_size=8",
        "recipe.sequence_length=16",
        "recipe.horizon=4",
        "recipe.pace.prefill=512",
        "collector.frames_per_batch=64",
    ),
}
#: Of pictures, so that no encoder is larger than it must be.
SMALL = {"dreamer_v3": "recipe.channels=2"}


def told(actions: str) -> tuple[str, ...]:
    """An environment whose observation says what each of several choices should be."""
    return ("env=gymnasium", f"env.id={TOLD}", f"+env.kwargs.actions={actions}")


SPACES: dict[str, tuple[str, ...]] = {
    "several choices": told("discrete"),
    "bits": told("binary"),
    **{case: hinted(case) for case in PARTS},
    "numbers for a picture": (*hinted("picture and numbers"), "+env.kwargs.continuous=true"),
}
CASES = [
    ("ppo", "picture and mask", 6400, 5.0),
    ("impala", "several choices", 9600, 7.0),
    ("dqn", "mask", 6400, 6.0),
    *(
        pytest.param(*case, marks=pytest.mark.thorough)
        for case in [
            ("ppo", "several choices", 9600, 7.0),
            ("ppo", "bits", 9600, 7.0),
            ("ppo-lstm", "bits", 9600, 7.0),
            ("ppo-lstm", "picture and mask", 9600, 5.0),
            ("ppo", "numbers", 9600, 6.0),
            ("ppo", "picture and numbers", 9600, 6.0),
            ("ppo", "mask in info", 9600, 6.0),
            ("impala", "bits", 9600, 7.0),
            ("impala", "picture and mask", 9600, 6.0),
            ("impala", "mask in info", 9600, 6.0),
            ("laser", "several choices", 9600, 7.0),
            ("laser", "mask", 9600, 6.0),
            ("dqn", "numbers", 6400, 6.0),
            ("dqn", "picture and mask", 6400, 6.0),
            ("sac", "numbers for a picture", 1600, -9.0),
            ("dreamer_v3", "picture and numbers", 4000, 5.0),
        ]
    ),
]


def rlsync(folder: Path, *words: str) -> str:
    done = run_program("rlsync", *words, cwd=folder, timeout_s=ENDS_WITHIN_S / 2)
    assert done.returncode == 0, done.stdout + done.stderr
    return str(done.stdout)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(("recipe", "space", "frames", "enough"), CASES)
def test_a_run_learns_in_such_spaces_and_all_that_can_be_done_with_a_run_can_be_done_with_it(
    recipe: str, space: str, frames: int, enough: float, tmp_path: Path
) -> None:
    """``enough`` is a mean return that a player which does not look comes nowhere near to."""
    words = (*RECIPES[recipe], *SPACES[space], *COMMON)
    if "picture" in space:
        words = (*words, SMALL.get(recipe, "recipe.model.hidden=[32]"))
    rlsync(tmp_path, "train", *words, "run_dir=run", f"recipe.total_frames={frames // 2}")
    rlsync(tmp_path, "train", *words, "run_dir=run", f"recipe.total_frames={frames}", "resume=run")
    statistics = statistics_in(tmp_path / "run")
    assert statistics is not None
    assert statistics.return_mean is not None
    assert statistics.return_mean > enough, "a player that does not look earns less"

    assert "equal up to version" in rlsync(tmp_path, "rerun", "run")
    frame = json.loads(rlsync(tmp_path, "frame", "--json", "run", "100"))
    assert all(frame["equal"].values())
    given = [word.removeprefix("+env.kwargs.").split("=") for word in words if "kwargs" in word]
    arguments = {name: value.strip("'") for name, value in given}
    action_space = _made(words[len(RECIPES[recipe]) + 1], arguments).action_space
    assert action_space.contains(np.array(frame["sent"], action_space.dtype)[()])
    played = json.loads(rlsync(tmp_path, "eval", "run", "--json", "--no-video", "--deterministic"))
    assert played["return_mean"] > enough
    exported = rlsync(tmp_path, "export", "run", "policy.pt2")
    assert "compared on 1,000 observations" in exported


def _made(word: str, arguments: dict[str, Any]) -> gymnasium.Env[Any, Any]:
    """The environment of an override ``env.id=...``."""
    if "continuous" in arguments:
        arguments["continuous"] = arguments["continuous"] == "true"
    return gymnasium.make(word.removeprefix("env.id="), **arguments)
