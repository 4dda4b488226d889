"""A cart-pole that hangs down at first, and is rewarded only while the pole stands: few draws find that out.

    PYTHONPATH=benchmarks rlsync train recipe=laser env.id=swing_up:SparseSwingUp-v0

Random actions are rewarded in 1 of about 2,000 steps.
"""

from __future__ import annotations

import math
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from gymnasium.spaces import Box

#: a pole stands above this cosine of its angle, turning slower than so many rad/s
UPRIGHT, STILL = 0.95, 1.0


class SparseSwingUp(CartPoleEnv):
    """gymnasium's cart-pole without a limit of the angle; a step with the pole up brings 1, any other 0."""

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(render_mode=render_mode)
        self.theta_threshold_radians = math.inf
        self.observation_space = Box(-np.inf, np.inf, (5,), np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        _, info = super().reset(seed=seed, options=options)
        self.state[2] += math.pi
        return self._seen(), info

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        *_, terminated, truncated, info = super().step(action)
        stands = math.cos(self.state[2]) > UPRIGHT and abs(self.state[3]) < STILL
        return self._seen(), float(stands), terminated, truncated, info

    def _seen(self) -> np.ndarray:
        x, speed, angle, turning = self.state
        return np.array([x, speed, math.cos(angle), math.sin(angle), turning], np.float32)


gymnasium.register("SparseSwingUp-v0", SparseSwingUp, max_episode_steps=500)
