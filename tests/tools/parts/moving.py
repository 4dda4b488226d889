"""A gymnasium environment that changes the working directory, as simulators do that load relative paths."""

from __future__ import annotations

import os

import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv

ID = "tests.tools.parts.moving:Moving-v0"


class Moving(CartPoleEnv):
    """CartPole that makes ``folder`` the working directory of whatever process makes it."""

    def __init__(self, folder: str, render_mode: str | None = None) -> None:
        super().__init__(render_mode=render_mode)
        os.chdir(folder)


gymnasium.register("Moving-v0", entry_point=Moving, max_episode_steps=50)
