"""CartPole that prints whenever it can: from Python, past Python, and from C's own buffer."""

from __future__ import annotations

import atexit
import ctypes
import os
from typing import Any

import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv


def say(where: str) -> None:
    print(f"simulator: {where}")  # noqa: T201  # this is what it is for
    os.write(1, f"simulator, past Python: {where}\n".encode())
    ctypes.CDLL(None).printf(f"simulator, from C: {where}\n".encode())


say("import")
atexit.register(say, "exit")


class Loud(CartPoleEnv):
    def reset(self, **kwargs: Any) -> Any:
        say("reset")
        return super().reset(**kwargs)

    def step(self, action: Any) -> Any:
        say("step")
        return super().step(action)

    def close(self) -> None:
        say("close")
        super().close()


gymnasium.register("Loud-v0", entry_point=Loud, max_episode_steps=20)
