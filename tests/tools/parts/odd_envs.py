"""An environment that does one thing as a careless author writes it; in all else it is a counter.

An observation counts the steps of its episode, each step is rewarded with 1, and an episode has LENGTH steps:
so the return and the length of every whole episode are LENGTH, whatever acts.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete, MultiDiscrete, Space

ID = f"{__name__}:Odd-v0"
LENGTH = 12
_NUMBERS = 3

#: What ``kind`` may be, and what the environment does then.
KINDS = {
    "plain": "nothing odd",
    "start": "its actions begin at 5, and it refuses others",
    "reused_array": "it gives the same array at each step",
    "reward_of_shape_1": "a reward is an array of one number",
    "reward_none": "a reward is None",
    "reward_nan": "a reward is not a number",
    "reward_int": "a reward is a whole number",
    "observation_list": "an observation is a list",
    "observation_float64": "an observation has another dtype than its space",
    "observation_too_long": "an observation has more numbers than its space",
    "observation_in_a_row": "an observation has one more dimension than its space",
    "truncated_none": "truncated is None",
    "info_none": "info is None",
    "bytes": "observations are bytes",
    "doubles": "observations are float64, and so is their space",
    "whole_numbers": "actions are whole numbers in a box",
    "changes_folder": "it changes the process's folder",
    "prints": "it prints, from Python and past it",
    "never_ends": "its episodes have no end",
    "raises": "it raises at its tenth step",
}


class Odd(gymnasium.Env[Any, Any]):
    """``kind`` is one of KINDS; ``actions`` is "choice", "choices" or "numbers"."""

    def __init__(self, kind: str = "plain", actions: str = "choice") -> None:
        assert kind in KINDS, kind
        self._kind = kind
        self._step = 0
        self._array = np.zeros(_NUMBERS, np.float32)
        self.observation_space = self._observations()
        self.action_space = self._actions(actions)
        if kind == "changes_folder":
            os.chdir("/")
        if kind == "prints":
            sys.stdout.write("a simulator's greeting\n")
            sys.stdout.flush()
            os.write(1, b"and one from C\n")

    def _observations(self) -> Box:
        if self._kind == "bytes":
            return Box(0, 255, (_NUMBERS,), np.uint8)
        return Box(-1000, 1000, (_NUMBERS,), np.float64 if self._kind == "doubles" else np.float32)

    def _actions(self, actions: str) -> Space[Any]:
        if self._kind == "whole_numbers":
            return Box(-3, 3, (2,), np.int64)
        if actions == "numbers":
            return Box(-1, 1, (2,), np.float32)
        if actions == "choices":
            return MultiDiscrete([2, 3], start=[5, 5] if self._kind == "start" else None)
        return Discrete(2, start=5 if self._kind == "start" else 0)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
        super().reset(seed=seed)
        self._step = 0
        return self._seen(), self._info()

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, Any]:
        if not self.action_space.contains(np.asarray(action, self.action_space.dtype)):
            raise ValueError(f"{action!r} is no member of {self.action_space}")
        self._step += 1
        if self._kind == "raises" and self._step == 10:
            raise RuntimeError("the simulation became unstable")
        over = self._step >= LENGTH and self._kind != "never_ends"
        truncated = None if self._kind == "truncated_none" else False
        return self._seen(), self._reward(), over, truncated, self._info()

    def _seen(self) -> Any:
        match self._kind:
            case "reused_array":
                self._array[:] = self._step
                return self._array
            case "observation_list":
                return [float(self._step)] * _NUMBERS
            case "observation_float64":
                return np.full(_NUMBERS, self._step, np.float64)
            case "observation_too_long":
                return np.full(_NUMBERS + 1, self._step, np.float32)
            case "observation_in_a_row":
                return np.full((1, _NUMBERS), self._step, np.float32)
        return np.full(_NUMBERS, self._step, self.observation_space.dtype)

    def _reward(self) -> Any:
        match self._kind:
            case "reward_of_shape_1":
                return np.ones(1, np.float32)
            case "reward_none":
                return None
            case "reward_nan":
                return float("nan")
            case "reward_int":
                return 1
        return 1.0

    def _info(self) -> Any:
        return None if self._kind == "info_none" else {}


gymnasium.register("Odd-v0", Odd)
