"""An environment with the spaces that a test names: it observes members of them, and keeps its actions."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete, Space

from rlsync.runs.recipes.env_settings import EnvConfig

ID = "rlsync-tests/Spaced-v0"
LENGTH = 5

SENT: list[Any] = []  #: the actions of all environments of this process, as they came


class Spaced(gymnasium.Env[Any, Any]):
    """A step earns 1 if its action is in the space; an episode is truncated after five steps."""

    def __init__(self, observation: Space[Any] | None = None, action: Space[Any] | None = None) -> None:
        self.observation_space = Box(-1, 1, (2,), np.float32) if observation is None else observation
        self.action_space = Discrete(2) if action is None else action
        self.steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.steps = 0
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        SENT.append(action)
        self.steps += 1
        earned = float(self.action_space.contains(action))
        return self.observation_space.sample(), earned, False, self.steps == LENGTH, {}


SHIFTED = "rlsync-tests/Shifted-v0"  #: one whose two choices are 5 and 6

gymnasium.register(ID, Spaced, disable_env_checker=True)
gymnasium.register(SHIFTED, Spaced, kwargs={"action": Discrete(2, start=5)}, disable_env_checker=True)


def spaced(observation: Space[Any] | None = None, action: Space[Any] | None = None) -> EnvConfig:
    """The settings of such an environment; without spaces it has two numbers to observe and two actions."""
    spaces = {"observation": observation, "action": action}
    return EnvConfig(ID, kwargs={name: space for name, space in spaces.items() if space is not None})
