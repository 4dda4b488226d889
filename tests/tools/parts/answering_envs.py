"""Environments that answer in a form of their own, or with one array each time."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

ID = f"{__name__}:Answering-v0"
SAME_ARRAY = f"{__name__}:SameArray-v0"
VECTOR = f"{__name__}:Vector-v0"
HORIZON = 4


class Answering(gymnasium.Env[Any, Any]):
    """Observes the number of its step. ``form`` names what it answers otherwise than the usual one does."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}

    def __init__(self, form: str = "usual", dtype: str = "float32", render_mode: str | None = None) -> None:
        self.observation_space = Box(0, 100, (3,), np.dtype(dtype).type)
        self.action_space = Discrete(2)
        self.form, self.render_mode, self.steps = form, render_mode, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
        super().reset(seed=seed)
        self.steps = 0
        return self._observed(), None if self.form == "info None" else {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        forms: dict[str, tuple[str, Any]] = {
            "reward None": ("reward", None),
            "reward text": ("reward", "1.0"),
            "reward of two": ("reward", np.ones(2)),
            "reward [1]": ("reward", np.ones(1, np.float32)),
            "reward [1, 1]": ("reward", np.ones((1, 1), np.float32)),
            "reward []": ("reward", np.array(1.0)),
            "reward list": ("reward", [1.0]),
            "reward int": ("reward", 1),
            "reward float32": ("reward", np.float32(1.0)),
            "terminated None": ("terminated", None),
            "terminated [1]": ("terminated", np.array([False])),
            "terminated 0": ("terminated", 0),
            "terminated 2": ("terminated", 2),
            "terminated 0.0": ("terminated", 0.0),
            "truncated None": ("truncated", None),
            "truncated numpy": ("truncated", np.False_),
            "info None": ("info", None),
            "info text": ("info", "nothing"),
        }
        answer = {
            "observation": self._observed(),
            "reward": 1.0,
            "terminated": False,
            "truncated": False,
            "info": {},
        }
        if self.form in forms:
            field, value = forms[self.form]
            answer[field] = value
        return tuple(answer.values())

    def _observed(self) -> Any:
        space, number = self.observation_space, self.steps
        assert isinstance(space, Box)
        match self.form:
            case "observation None":
                return None
            case "observation [1, 3]":
                return np.full((1, 3), number, space.dtype)
            case "observation of four":
                return np.full(4, number, space.dtype)
            case "observation list":
                return [number] * 3
            case "observation float64":
                return np.full(3, number, np.float64)
            case "observation 300":
                return np.full(3, 300)
        return np.full(3, number, space.dtype)

    def render(self) -> Any:
        return np.full((8, 8, 3), self.steps, np.uint8)


class SameArray(gymnasium.Env[Any, Any]):
    """Observes the number of its step, in one array that it changes; it draws into one array, too.

    Args:
        kept: when it is one array: "always", in "steps", in "resets" (which then observe the number of the
            episode), "two" by turns, or "constant", which never changes.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}
    observation_space = Box(0, 100, (4,), np.float32)
    action_space = Discrete(2)

    def __init__(self, kept: str = "always", render_mode: str | None = None) -> None:
        self.kept, self.render_mode, self.steps, self.episode = kept, render_mode, 0, -1
        self.arrays = [np.zeros(4, np.float32), np.zeros(4, np.float32)]
        self.reward = np.zeros((), np.float32)
        self.picture = np.zeros((8, 8, 3), np.uint8)

    def _observed(self) -> Any:
        number = self.steps
        match self.kept:
            case "constant":
                number = 7
            case "resets" if self.steps == 0:
                number = self.episode
            case "steps" if self.steps == 0:
                return np.zeros(4, np.float32)
            case "resets":
                return np.full(4, number, np.float32)
        array = self.arrays[self.steps % 2 if self.kept == "two" else 0]
        array[:] = number
        return array

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
        super().reset(seed=seed)
        self.steps = 0
        self.episode += 1
        return self._observed(), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        self.reward[...] = self.steps
        reward = float(self.steps) if self.kept in ("resets", "constant") else self.reward
        return self._observed(), reward, False, False, {}

    def render(self) -> Any:
        self.picture[:] = 20 * self.steps
        return self.picture


class Vector(VectorEnv[Any, Any, Any]):
    """Two environments of :class:`SameArray` in one, which resets in the step that ends an episode.

    ``form`` names what it answers otherwise.
    """

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}

    def __init__(self, num_envs: int, form: str = "usual", max_episode_steps: int = HORIZON) -> None:
        self.num_envs, self.form, self.horizon = num_envs, form, max_episode_steps
        self.single_observation_space = Box(0, 100, (3,), np.float32)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.single_action_space = Discrete(2)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.observed = np.zeros((num_envs, 3), np.float32)
        self.reward = np.zeros(num_envs)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.observed[:] = 0
        return self.observed, {}

    def step(self, actions: Any) -> Any:
        self.observed += 1
        self.reward[:] = self.observed[:, 0]
        over = self.observed[:, 0] >= self.horizon
        info: Any = {}
        if over.any():
            info = {"final_obs": self.observed if self.form == "same final" else self.observed.copy()}
            self.observed[over] = 0
        if self.form == "no final":
            info = None
        reward: Any = self.reward[:, None] if self.form == "reward [N, 1]" else self.reward
        if self.form == "reward [N, 2]":
            reward = np.ones((self.num_envs, 2))
        observed = self.observed[:, None] if self.form == "observation [N, 1, 3]" else self.observed
        return observed, reward, np.zeros(self.num_envs, np.bool_), over, info


gymnasium.register("Answering-v0", Answering, max_episode_steps=HORIZON)
gymnasium.register("SameArray-v0", SameArray, max_episode_steps=HORIZON)
gymnasium.register("Vector-v0", None, vector_entry_point=Vector, max_episode_steps=HORIZON)
