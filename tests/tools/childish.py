"""An environment that starts a process."""

from __future__ import annotations

import subprocess

import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv


class Childish(CartPoleEnv):
    """Has a child, which obeys SIGTERM."""

    def __init__(self) -> None:
        super().__init__()
        self.child = subprocess.Popen(["sleep", "600"])

    def close(self) -> None:
        """Wait until the child has obeyed."""
        self.child.terminate()
        self.child.wait()


gymnasium.register("Childish-v0", Childish, max_episode_steps=200)
