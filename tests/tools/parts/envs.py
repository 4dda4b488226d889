"""Environments cheap enough to step thousands of times in a test."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import Bounded, Composite, OneHot, Unbounded
from torchrl.envs import Compose, EnvBase, GymEnv, TransformedEnv

from tests.tools.parts.canary import CanaryTransform
from tests.tools.parts.sizes import ACTIONS, OBSERVATIONS


class CountingEnv(EnvBase):
    """Observation = steps since reset, reward 1, done after `horizon`; no dependencies."""

    def __init__(self, horizon: int = 10, continuous: bool = False):
        super().__init__(device="cpu", batch_size=[])
        self.horizon = horizon
        self.steps = 0
        self.observation_spec = Composite(observation=Unbounded(shape=(OBSERVATIONS,)))
        self.action_spec = Bounded(-1.0, 1.0, shape=(1,)) if continuous else OneHot(ACTIONS)
        self.reward_spec = Unbounded(shape=(1,))

    def _observe(self) -> TensorDict:
        return TensorDict({"observation": torch.full((OBSERVATIONS,), float(self.steps))}, [])

    def _reset(self, tensordict: TensorDictBase | None = None) -> TensorDict:
        self.steps = 0
        return self._observe()

    def _step(self, tensordict: TensorDictBase) -> TensorDict:
        self.steps += 1
        done = torch.tensor([self.steps >= self.horizon])
        return self._observe().update(
            {"reward": torch.ones(1), "done": done, "terminated": torch.zeros_like(done)}
        )

    def _set_seed(self, seed: int | None) -> None:
        pass


class SlowEnv(CountingEnv):
    """A rollout in it takes a second or more, so what a test does at its beginning happens during it."""

    def _step(self, tensordict: TensorDictBase) -> TensorDict:
        time.sleep(0.05)
        return super()._step(tensordict)


class HangsWhile(CountingEnv):
    """A step in it does not come back while a file is there; a file beside it says that it hangs.

    Args:
        flag: the file.
    """

    def __init__(self, flag: Path) -> None:
        super().__init__()
        self._flag = flag

    def _step(self, tensordict: TensorDictBase) -> TensorDict:
        while self._flag.exists():
            self._flag.with_name(f"hangs-{os.getpid()}-{threading.get_ident()}").touch()
            time.sleep(0.01)
        return super()._step(tensordict)


def hanging(flag: Path) -> int:
    """How many of the environments of a flag hang."""
    return len(list(flag.parent.glob("hangs-*")))


def make_cartpole() -> EnvBase:
    return GymEnv("CartPole-v1")


def make_counting_env() -> EnvBase:
    return CountingEnv()


def make_continuous_env() -> EnvBase:
    return CountingEnv(continuous=True)


def make_env_with_module() -> EnvBase:
    """A counting environment whose `transform[0].module` is a Canary."""
    return TransformedEnv(CountingEnv(), Compose(CanaryTransform()))
