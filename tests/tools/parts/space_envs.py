"""An environment with the spaces that a test names: it observes members of them, and keeps its actions."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space
from torch import Tensor

from rlsync.runs.actors.envs.observations import Observations, observations_of
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


#: Numbers, a choice and a picture that is no multiple of 16 high.
SEVERAL_PARTS = observations_of(
    Dict(camera=Box(0, 255, (18, 16, 3), np.uint8), speed=Box(-1, 1, (2,)), gear=Discrete(3)), "several parts"
)


def rows_of(observations: Observations, *lead: int, seed: int) -> Tensor:
    """Observations ``[*lead, *shape]`` of normally distributed numbers and of pictures."""
    generator = torch.Generator().manual_seed(seed)
    parts = {}
    for part in observations.parts:
        numbers = torch.randn(*lead, *part.shape, generator=generator)
        parts[part.name] = (50 * numbers).to(torch.uint8) if part.kind == "picture" else numbers
    return observations.join(parts)


HINTED = f"{__name__}:Hinted-v0"
#: What the observation of such an environment is made of, by the names of the tests' cases.
PARTS = {
    "numbers": "speed,gear",
    "picture": "camera",
    "picture and numbers": "camera,speed,gear",
    "mask": "speed,gear,action_mask",
    "picture and mask": "camera,gear,action_mask",
    "mask in info": "speed,gear,info",
}


class Hinted(gymnasium.Env[Any, Any]):
    """One of four actions is right, which the gear says, or else the picture; a step with it earns 1.

    An action that the mask forbids ends the program with an assertion. An episode has eight steps, and is
    truncated at a third of its ends.

    Args:
        parts: of the observation, with commas between them: speed, gear, camera, action_mask; and info, for a
            mask in the info. One part alone is no Dict.
        size: rows and columns of a picture.
        continuous: actions are two numbers, of which the first should be near the right action.
    """

    def __init__(self, parts: str, size: int = 12, continuous: bool = False) -> None:
        self._names = parts.split(",")
        spaces: dict[str, Space[Any]] = {
            "speed": Box(-1, 1, (2, 2), np.float64),
            "gear": Discrete(4, start=1),
            "camera": Box(0, 255, (size, size, 3), np.uint8),
            "action_mask": MultiBinary(4),
        }
        self._size = size
        within = {name: spaces[name] for name in self._names if name in spaces}
        self.observation_space = Dict(within) if len(within) > 1 else next(iter(within.values()))
        self.action_space = Box(-4, 4, (2,)) if continuous else Discrete(4)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._steps = 0
        return self._observe()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._steps += 1
        if isinstance(self.action_space, Discrete):
            assert self._allowed[action], (action, self._allowed)
            earned = float(action == self._right)
        else:
            earned = -abs(float(action[0]) - self._right)
        over = self._steps == 8
        truncated = over and bool(self.np_random.integers(3) == 0)
        observation, info = self._observe()
        return observation, earned, over and not truncated, truncated, info

    def _observe(self) -> tuple[Any, dict[str, Any]]:
        self._right = int(self.np_random.integers(4))
        self._allowed = np.ones(4, np.int8)
        if "action_mask" in self._names or "info" in self._names:
            self._allowed[(self._right + 1 + self.np_random.integers(3)) % 4] = 0
        camera = np.zeros((self._size, self._size, 3), np.uint8)
        camera[self._right :: 4] = 200
        values = {
            "speed": self.np_random.uniform(-1, 1, (2, 2)),
            "gear": self._right + 1,
            "camera": camera,
            "action_mask": self._allowed,
        }
        seen = {name: values[name] for name in self._names if name in values}
        info = {"action_mask": self._allowed} if "info" in self._names else {}
        return (seen if len(seen) > 1 else next(iter(seen.values()))), info


gymnasium.register("Hinted-v0", Hinted)


def hinted(case: str) -> tuple[str, ...]:
    """The overrides of a run in such an environment."""
    words = ("env=gymnasium", f"env.id={HINTED}", f"+env.kwargs.parts='{PARTS[case]}'")
    if case == "mask in info":
        return (*words, "env.action_mask=info")
    return words


TOLD = f"{__name__}:Told-v0"


class Told(gymnasium.Env[Any, Any]):
    """Observes, one-hot, what each choice should be; a step earns the share of them that are right.

    An episode has eight steps, so the return of one that does as it is told is 8.

    Args:
        actions: "discrete" for a MultiDiscrete space of two axes with a start, "binary" for MultiBinary.
    """

    def __init__(self, actions: str = "discrete") -> None:
        self.action_space: Any = MultiBinary(4)
        if actions == "discrete":
            self.action_space = MultiDiscrete([[3], [2], [4]], start=[[0], [5], [-1]])
        self._start = np.broadcast_to(getattr(self.action_space, "start", 0), self.action_space.shape)
        self._nvec = np.broadcast_to(getattr(self.action_space, "nvec", 2), self.action_space.shape)
        self.observation_space = Box(0, 1, (int(self._nvec.sum()),), np.float32)
        self._steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._steps = 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), action
        assert action.dtype == self.action_space.dtype
        self._steps += 1
        earned = float((action == self._right).mean())
        return self._observe(), earned, self._steps == 8, False, {}

    def _observe(self) -> np.ndarray[Any, Any]:
        indices = self.np_random.integers(self._nvec)
        self._right = self._start + indices
        rows = [np.eye(n)[i] for n, i in zip(self._nvec.ravel(), indices.ravel(), strict=True)]
        return np.concatenate(rows).astype(np.float32)


gymnasium.register("Told-v0", Told)
