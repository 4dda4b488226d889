"""Try an environment out: whether its answers can be read, and whether it writes into them later."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from functools import partial
from typing import Any, TypeAlias

import gymnasium
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlsync.runs.actors.devices import CPU
from rlsync.runs.actors.envs.actions import BoxActions
from rlsync.runs.actors.envs.specs import EnvSpec, GymnasiumEnvs, make_venv
from rlsync.runs.actors.envs.vectors import Envs, EnvStep, ListedEnvs

_STEPS = 100

AnyEnv: TypeAlias = gymnasium.Env[Any, Any]
AnyArray: TypeAlias = NDArray[Any]


def random_steps(
    envs: Envs, generator: torch.Generator, steps: int, observation: Tensor | None = None
) -> Iterator[EnvStep]:
    """Take random actions in environments that have been reset, and yield what they answer.

    ``observation`` is what the reset gave; where it has a mask, actions are those that it allows.
    """
    for _ in range(steps):
        actions = envs.actions
        if isinstance(actions, BoxActions):
            action = torch.randn(envs.num_envs, actions.size, generator=generator, device="cpu")
        else:
            allowed = None
            if observation is not None:
                allowed = envs.observations.allowed(observation)
            action = actions.drawn(envs.num_envs, generator, CPU, allowed)
        envs.send(action)
        answer = envs.recv()
        observation = answer.observation
        yield answer


def try_out(spec: EnvSpec, num_envs: int = 1, seed: int = 0, steps: int = _STEPS) -> None:
    """Make environments and take random actions in them.

    Raises the ConfigError of the first answer that cannot be read, see
    :mod:`rlsync.runs.actors.envs.answers`, and whatever the environments raise themselves.
    """
    with closing(make_venv(spec, num_envs)) as envs:
        _take_steps(envs, seed, steps)


def _take_steps(envs: Envs, seed: int, steps: int = _STEPS) -> None:
    first = envs.reset(seed)
    for _ in random_steps(envs, torch.Generator().manual_seed(seed), steps, first):
        pass


def one_by_one(spec: EnvSpec) -> bool:
    """Whether these are gymnasium environments that are stepped one after the other."""
    with closing(make_venv(spec, 1)) as envs:
        return isinstance(envs, ListedEnvs)


def overwritten(spec: GymnasiumEnvs, seed: int = 0) -> list[str]:
    """The parts of its answers into which an environment writes later, for example ``["observation"]``.

    What is stepped here is copied, see :mod:`rlsync.runs.actors.envs.answers`; TorchRL's GymWrapper keeps it.
    """
    keepers: list[_Keeps] = []

    def keep(env: AnyEnv) -> AnyEnv:
        keepers.append(_Keeps(env))
        return keepers[-1]

    with closing(ListedEnvs(partial(spec.make, keep), 1, spec.id)) as envs:
        _take_steps(envs, seed)
    return keepers[0].overwritten()


class _Keeps(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Keeps each array of the answers, and the bytes that it had."""

    def __init__(self, env: AnyEnv) -> None:
        super().__init__(env)
        self._kept: list[tuple[str, AnyArray, bytes]] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return self._keep(self.env.reset(seed=seed, options=options), ("observation", "info"))

    def step(self, action: Any) -> Any:
        return self._keep(
            self.env.step(action), ("observation", "reward", "terminated", "truncated", "info")
        )

    def _keep(self, answer: Any, names: tuple[str, ...]) -> Any:
        for name, part in zip(names, answer, strict=False):
            for array in _arrays(part):
                self._kept.append((name, array, array.tobytes()))
        return answer

    def overwritten(self) -> list[str]:
        names = []
        for name, array, content in self._kept:
            if array.tobytes() != content and name not in names:
                names.append(name)
        return names


def _arrays(part: object) -> Iterator[AnyArray]:
    match part:
        case np.ndarray():
            yield part
        case dict():
            for value in part.values():
                yield from _arrays(value)
        case tuple() | list():
            for value in part:
                yield from _arrays(value)
