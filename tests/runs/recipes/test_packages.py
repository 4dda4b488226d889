"""Environments of packages that people use: each is trained for a few batches, as its command line says."""

from __future__ import annotations

from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import gymnasium
import pytest

from rlsync.runs.cli.main import main

SMALL = {
    "ppo": ("recipe.num_epochs=1", "recipe.hidden=[16]", "collector.frames_per_batch=64"),
    "dqn": ("recipe.hidden=[16]", "recipe.pace.prefill=64", "collector.frames_per_batch=64"),
    "sac": ("recipe.hidden=[16]", "recipe.pace.prefill=64", "collector.frames_per_batch=64"),
    "impala": (
        "recipe.unroll_length=8",
        "recipe.batch_size=4",
        "env.num_envs=2",
        "collector.frames_per_batch=32",
    ),
}

#: The package that brings it, the recipe, and what names the environment.
CASES = {
    "LunarLander": ("Box2D", "dqn", ("env.id=LunarLander-v3",)),
    "BipedalWalker": ("Box2D", "sac", ("env.id=BipedalWalker-v3",)),
    "MiniGrid": (
        "minigrid",
        "ppo",
        ("env.id='minigrid:MiniGrid-Empty-5x5-v0'", "env.wrappers=[minigrid.wrappers.FlatObsWrapper]"),
    ),
    "MiniGrid-picture": (
        "minigrid",
        "impala",
        (
            "env.id='minigrid:MiniGrid-Empty-5x5-v0'",
            "env.wrappers=[{name: minigrid.wrappers.RGBImgPartialObsWrapper, tile_size: 8}, "
            "minigrid.wrappers.ImgObsWrapper]",
            "env.frame_stack=2",
        ),
    ),
    # Dicts of an observation, a goal and what is reached of it
    "Fetch": ("gymnasium_robotics", "sac", ("env.id='gymnasium_robotics:FetchReach-v4'",)),
    "PointMaze": ("gymnasium_robotics", "sac", ("env.id='gymnasium_robotics:PointMaze_UMaze-v3'",)),
    "HalfCheetah": ("mujoco", "ppo", ("env.id=HalfCheetah-v5", "env.clip_reward=true")),
    "Pong": (
        "ale_py",
        "impala",
        ("env=pong", "env.max_episode_frames=400", "env.clip_reward=true", "env.num_envs=2"),
    ),
}


@pytest.mark.seconds
@pytest.mark.parametrize("case", CASES)
def test_an_environment_of_a_package_is_trained_for_some_batches(case: str, tmp_path: Path) -> None:
    package, recipe, names = CASES[case]
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    if case == "Fetch":
        _require_joints()
    words = (f"recipe={recipe}", "env=gymnasium", *SMALL[recipe], *names)
    words = tuple(word for word in words if not (word == "env=gymnasium" and names[0].startswith("env=")))
    ends = ("recipe.total_frames=192", "recipe.target_return=null", "logger=none", f"run_dir={tmp_path}")
    assert main(["train", *words, "collector.num_workers=0", *ends]) == 0


def _require_joints() -> None:
    """Skip where gymnasium-robotics does not know the joints of the MuJoCo that is installed."""
    try:
        gymnasium.make("gymnasium_robotics:FetchReach-v4").close()
    except AssertionError:
        packages = " with ".join(f"{name} {version(name)}" for name in ("gymnasium-robotics", "mujoco"))
        pytest.skip(
            f"{packages}: set_joint_qpos asks `joint_type in (HINGE, SLIDE)`, never true "
            "since MuJoCo 3.12; this test passes with mujoco==3.11.0"
        )
