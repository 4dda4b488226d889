"""An environment that has to be remembered: CartPole without its velocities."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

MODULE = "tests.tools.parts.forgetful_envs"


class WithoutVelocities(gymnasium.ObservationWrapper[Any, Any, Any]):
    """Leaves out the second and the fourth number of CartPole's observations, which are the velocities."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        space = env.observation_space
        assert isinstance(space, gymnasium.spaces.Box)
        self.observation_space = gymnasium.spaces.Box(space.low[::2], space.high[::2], dtype=np.float32)

    def observation(self, observation: NDArray[np.float32]) -> NDArray[np.float32]:
        return observation[::2]
