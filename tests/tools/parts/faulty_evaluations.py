"""CartPole, which has a fault where the evaluating process plays it, and only there."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from typing import Any

import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv

LINGERS_S = 8.0
ID = "tests.tools.parts.faulty_evaluations:Faulty-v0"


class Faulty(CartPoleEnv):
    """CartPole, without a limit of steps.

    Args:
        fault: ``made``, ``reset``, ``first``: it raises there. ``hangs``: so does its first step. ``late``:
            its fifth step raises; ``lingers``: likewise, and the process ends some seconds later;
            ``leaves``: that one ends the process as if all were well. ``endless``: no episode ends.
            ``infinite``: the return of each episode is infinite.
    """

    def __init__(self, fault: str = "", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._fault = fault if multiprocessing.current_process().name == "rlsync evaluator" else ""
        self._steps = 0
        self._raise_at("made")

    def reset(self, **kwargs: Any) -> Any:
        self._raise_at("reset")
        return super().reset(**kwargs)

    def step(self, action: Any) -> Any:
        self._steps += 1
        self._raise_at("first")
        if self._fault == "hangs":
            time.sleep(1000)
        if self._steps == 5:
            self._raise_at("late")
            if self._fault == "lingers":
                threading.Thread(target=time.sleep, args=(LINGERS_S,)).start()
            self._raise_at("lingers")
            if self._fault == "leaves":
                os._exit(0)
        if self._fault == "endless":
            self.state = self.np_random.uniform(-0.01, 0.01, 4)
        observation, reward, terminated, truncated, info = super().step(action)
        if self._fault == "endless":
            return observation, reward, False, False, info
        if self._fault == "infinite":
            reward = float("inf")
        return observation, reward, terminated, truncated, info

    def _raise_at(self, fault: str) -> None:
        if self._fault == fault:
            raise ValueError(f"the simulator fails: {fault}")


gymnasium.register("Faulty-v0", entry_point=Faulty)
