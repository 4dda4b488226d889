"""A gymnasium environment whose steps do not come back while a file is there."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv

ID = "tests.tools.parts.hanging:Hanging-v0"


class Hanging(CartPoleEnv):
    """CartPole; a file ``hangs-PID-...`` beside ``flag`` says that one hangs."""

    def __init__(self, flag: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._flag = Path(flag)

    def step(self, action: Any) -> Any:
        while self._flag.exists():
            self._flag.with_name(f"hangs-{os.getpid()}-{id(self)}").touch()
            time.sleep(0.01)
        return super().step(action)


gymnasium.register("Hanging-v0", entry_point=Hanging, max_episode_steps=50)
