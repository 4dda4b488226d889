"""Environments with and without a state that can be saved: a cart in the wind. A limit of time ends episodes."""

from __future__ import annotations

import threading
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.classic_control import CartPoleEnv

MODULE = __name__

#: Steps after which an episode is truncated.
LIMIT = 40


class Windy(CartPoleEnv):
    """A CartPole that goes on however its pole falls; the wind, a random number, moves it and is the reward."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.theta_threshold_radians = self.x_threshold = np.inf
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (4,))

    def step(self, action: Any) -> Any:
        _, _, *rest = super().step(action)
        wind = float(self.np_random.normal())
        self.state = np.array(self.state) + 0.1 * wind
        return self.state.astype(np.float32), wind, *rest


class Saving(Windy):
    """The same, with the two methods. Its numbers hide the first of them, as an attribute of each object."""

    def state(self) -> Any:
        numbers: Any = vars(self)["state"]
        return numbers.tolist(), self.np_random.bit_generator.state

    def load(self, state: Any) -> None:
        numbers, self.np_random.bit_generator.state = state
        vars(self)["state"] = np.array(numbers)


class Around(gymnasium.Wrapper[Any, Any, Any, Any]):
    """A wrapper that answers for what is in it."""

    def state(self) -> Any:
        cart: Any = self.env.unwrapped
        return cart.state, cart.np_random

    def load(self, state: Any) -> None:
        cart: Any = self.env.unwrapped
        cart.state, cart.np_random = state


class Hiding(gymnasium.Wrapper[Any, Any, Any, Any]):
    """A wrapper of which nobody knows what it holds."""


class Raises(Saving):
    def state(self) -> Any:
        raise OSError("the simulator is busy")


class Unloadable(Saving):
    def load(self, state: Any) -> None:
        raise OSError("the simulator is busy")


class Locked(Saving):
    def state(self) -> Any:
        return threading.Lock()


class Forgets(Saving):
    """Its state lacks its random numbers."""

    def state(self) -> Any:
        return super().state()[0]

    def load(self, state: Any) -> None:
        super().load((state, self.np_random.bit_generator.state))


for kind in (Windy, Saving, Raises, Unloadable, Locked, Forgets):
    gymnasium.register(f"{kind.__name__}-v0", kind, max_episode_steps=LIMIT)
gymnasium.register("Around-v0", lambda: Around(Windy()), max_episode_steps=LIMIT)
gymnasium.register("Hiding-v0", lambda: Hiding(Saving()), max_episode_steps=LIMIT)
