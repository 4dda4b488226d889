"""Environments that their seeds do not decide."""

from __future__ import annotations

import os
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.classic_control import CartPoleEnv

MODULE = __name__


class Global(CartPoleEnv):
    """Its reward comes from numpy's global generator, from the second episode on."""

    episodes = 0

    def reset(self, **options: Any) -> Any:
        self.episodes += 1
        return super().reset(**options)

    def step(self, action: Any) -> Any:
        observation, _, *rest = super().step(action)
        reward = 1.0 if self.episodes == 1 else float(np.random.rand())
        return observation, reward, *rest


class Noisy(CartPoleEnv):
    """What it shows has noise that comes from the operating system."""

    def step(self, action: Any) -> Any:
        observation, *rest = super().step(action)
        return observation + np.float32(os.urandom(1)[0] / 2550), *rest


for kind in (Global, Noisy):
    gymnasium.register(f"{kind.__name__}-v0", kind, max_episode_steps=100)
