"""Functions that make environments, as ``env.make`` names them, and wrappers, right and wrong ones."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torchrl.envs import EnvBase, GymEnv

MODULE = "tests.tools.parts.made_envs"
HORIZON = 15

Env = gymnasium.Env[Any, Any]


def single(horizon: int = HORIZON, render_mode: str | None = None) -> Env:
    return gymnasium.make("CartPole-v1", max_episode_steps=horizon, render_mode=render_mode)


def vector(num_envs: int, mode: AutoresetMode = AutoresetMode.SAME_STEP) -> SyncVectorEnv:
    return SyncVectorEnv([single] * num_envs, autoreset_mode=mode)


def torchrls() -> EnvBase:
    return GymEnv("CartPole-v1", max_episode_steps=HORIZON)


# ------------------------------------------------------------------------------------ wrong ones


def three() -> SyncVectorEnv:
    return vector(3)


def late(num_envs: int) -> SyncVectorEnv:
    return vector(num_envs, AutoresetMode.NEXT_STEP)


def raises() -> Env:
    raise RuntimeError("no licence")


def nothing() -> None:
    return None


def unlabelled() -> EnvBase:
    return GymEnv("CartPole-v1", from_pixels=False).append_transform(_renamed())


def _renamed() -> Any:
    from torchrl.envs import RenameTransform

    return RenameTransform(in_keys=["observation"], out_keys=["state"])


class ManyAgents:
    """As PettingZoo's environments: no gymnasium.Env, and it has agents."""

    possible_agents = ("white", "black")


def agents() -> ManyAgents:
    return ManyAgents()


# -------------------------------------------------------------------------------------- wrappers


class Scaled(gymnasium.RewardWrapper[Any, Any]):
    """Rewards times a factor."""

    def __init__(self, env: Env, factor: float = 3.0) -> None:
        super().__init__(env)
        self.factor = factor

    def reward(self, reward: Any) -> float:
        return float(reward) * self.factor


class Breaks(gymnasium.Wrapper[Any, Any, Any, Any]):
    def __init__(self, env: Env) -> None:
        raise LookupError(f"nothing to do around {np.size(env)}")


def forgets(env: Env) -> None:
    env.reset()


NOT_CALLABLE = 3
