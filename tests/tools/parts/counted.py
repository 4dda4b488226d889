"""A gymnasium environment that writes a line to a file each time one is made."""

from __future__ import annotations

import os
from pathlib import Path

import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv

ID = "tests.tools.parts.counted:Counted-v0"


class Counted(CartPoleEnv):
    """CartPole that appends the number of its process to ``file``."""

    def __init__(self, file: str, render_mode: str | None = None) -> None:
        super().__init__(render_mode=render_mode)
        with Path(file).open("a") as lines:
            lines.write(f"{os.getpid()}\n")


gymnasium.register("Counted-v0", entry_point=Counted, max_episode_steps=50)
