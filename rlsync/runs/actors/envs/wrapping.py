"""What a person puts around an environment: wrappers by their names, and a stack of the newest observations."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint
from typing import Any, TypeAlias

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import VectorEnv
from gymnasium.wrappers import FrameStackObservation, TransformObservation
from numpy.typing import NDArray

from rlsync import ConfigError, RlsyncError
from rlsync.runs.actors.envs.observations import Rows, leaves
from rlsync.seams import first_line, user_input

AnyEnv: TypeAlias = gymnasium.Env[Any, Any]
AnyVector: TypeAlias = VectorEnv[Any, Any, Any]

Wrap: TypeAlias = Callable[[AnyEnv], AnyEnv]  #: what makes another environment of one

_WRAPPERS = "env.wrappers"

#: What arrays can be made of; all others need a wrapper.
_OF_NUMBERS = (spaces.Box, spaces.Discrete, spaces.MultiBinary, spaces.MultiDiscrete)


@dataclass(frozen=True, slots=True)
class NamedWrapper:
    """A wrapper by its place, ``module.Class`` or ``module:Class``; it is imported where it is called.

    Raises:
        ConfigError: it cannot be imported, raises, or returns no environment.

    Example:
        >>> limited = NamedWrapper("gymnasium.wrappers.TimeLimit", {"max_episode_steps": 9})
        >>> str(limited), type(limited(gymnasium.make("CartPole-v1"))).__name__
        ('TimeLimit(max_episode_steps=9)', 'TimeLimit')
        >>> NamedWrapper("gymnasium.wrappers.TimeLimt")(gymnasium.make("CartPole-v1"))
        Traceback (most recent call last):
        ...
        rlsync.core.errors.ConfigError: gymnasium.wrappers has no 'TimeLimt'
          where  env.wrappers, gymnasium.wrappers.TimeLimt
          cure   did you mean 'TimeLimit'? name what gymnasium.wrappers has
    """

    name: str  #: its place
    #: its arguments, after the environment
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        last = self.name.replace(":", ".").rpartition(".")[2]
        if not self.arguments:
            return last
        arguments = ", ".join(f"{name}={value}" for name, value in self.arguments.items())
        return f"{last}({arguments})"

    def __call__(self, env: AnyEnv) -> AnyEnv:
        wrapped = self._around(env)
        if not isinstance(wrapped, gymnasium.Env):
            raise self._no_environment(wrapped, "a gymnasium.Env")
        return wrapped

    def around_vector(self, envs: AnyVector) -> AnyVector:
        """The same for a vector environment, whose wrappers are those of ``gymnasium.wrappers.vector``."""
        wrapped = self._around(envs)
        if not isinstance(wrapped, VectorEnv):
            raise self._no_environment(wrapped, "a gymnasium.vector.VectorEnv")
        return wrapped

    def _around(self, env: object) -> object:
        where = f"{_WRAPPERS}, {self.name}"
        wrap = imported(self.name, where)
        try:
            return wrap(env, **self.arguments)
        except RlsyncError:
            raise
        except Exception as error:  # it is foreign code, which may raise anything
            problem = f"the wrapper {self} raises {type(error).__name__}: {first_line(error)}"
            cure = f"look at what it takes around {env}; arguments stand beside its name: "
            cure += "env.wrappers=[{name: gymnasium.wrappers.TimeLimit, max_episode_steps: 100}]"
            raise ConfigError(problem, where, cure) from error

    def _no_environment(self, returned: object, wanted: str) -> ConfigError:
        problem = f"the wrapper {self} returns no environment: {user_input.short(returned)}"
        cure = f"name a class or a function that takes an environment and returns {wanted}"
        return ConfigError(problem, f"{_WRAPPERS}, {self.name}", cure)


def parts_of(place: str) -> tuple[str, str]:
    """The module and the name in ``module:name`` or ``module.name``; empty where one is missing."""
    if ":" in place:
        module, _, name = place.partition(":")
    else:
        module, _, name = place.rpartition(".")
    return module, name


def imported(place: str, where: str) -> Callable[..., Any]:
    """What lies at a place, which can be called; ConfigError with the nearest name if nothing does.

    Args:
        place: ``module:name`` or ``module.name``.
        where: the key that names it, for errors.
    """
    module, name = parts_of(place)
    if not (module and name):
        problem = f"{place!r} does not say in which module it lies"
        raise ConfigError(problem, where, "write it as module:name")
    try:
        value = EntryPoint(name, f"{module}:{name}", where).load()
    except ModuleNotFoundError as error:
        near = user_input.did_you_mean(user_input.nearest_name(module, [*sys.modules], cutoff=0.85))
        cure = f"{near}correct its name, install that package, or name the folder that holds it in PYTHONPATH"
        raise ConfigError(f"cannot import {module}: {first_line(error)}", where, cure) from error
    except AttributeError as error:
        if module not in sys.modules:  # its own code raised it
            raise _raised(module, error, where) from error
        near = user_input.nearest_name(name, vars(sys.modules[module]))
        cure = f"{user_input.did_you_mean(near)}name what {module} has"
        raise ConfigError(f"{module} has no {name!r}", where, cure) from error
    except Exception as error:  # it is foreign code, which may raise anything
        raise _raised(module, error, where) from error
    if not callable(value):
        problem = f"{place} cannot be called: {user_input.short(value)}"
        raise ConfigError(problem, where, "name a function or a class")
    return value  # type: ignore[no-any-return]


def _raised(module: str, error: Exception, where: str) -> ConfigError:
    problem = f"importing {module} raises {type(error).__name__}: {first_line(error)}"
    return ConfigError(
        problem, where, f"correct the module; python -c 'import {module}' shows the line"
    )


def stacked(env: AnyEnv, count: int, name: str) -> AnyEnv:
    """An environment that shows its ``count`` newest observations; after a reset, the first one so many times.

    Vectors, and rows of numbers, are joined in one, the oldest first, and pictures along their channels:
    ``[4, 84, 84]`` of four grey ones ``[84, 84]``, ``[64, 64, 12]`` of four in colour ``[64, 64, 3]``.

    Raises:
        ConfigError: they are no arrays of up to three axes.

    Example:
        >>> stacked(gymnasium.make("CartPole-v1"), 3, "CartPole-v1").observation_space.shape
        (12,)
    """
    space = env.observation_space
    mixed = isinstance(space, Rows) and space.observations.features != math.prod(space.shape)
    if not isinstance(space, spaces.Box) or len(space.shape) > 3 or mixed:
        problem = (
            f"observations of {space} cannot be stacked: they are neither vectors nor pictures"
        )
        cure = (
            "make them so by env.wrappers=[gymnasium.wrappers.FlattenObservation], or leave it at 1"
        )
        raise ConfigError(problem, f"env.frame_stack={count} of {name!r}", cure)
    shape = space.shape
    last_is_least = len(shape) == 3 and shape[-1] < min(shape[0], shape[1])

    def joined(stack: NDArray[Any]) -> NDArray[Any]:
        if len(shape) < 2:
            return stack.reshape(-1)
        if len(shape) == 2:
            return stack
        if last_is_least:
            return np.concatenate(stack, axis=-1)
        return np.concatenate(stack, axis=0)

    frames = FrameStackObservation(env, count)
    bounds = frames.observation_space
    assert isinstance(bounds, spaces.Box), "a stack of boxes is one"
    low = joined(bounds.low)
    box = spaces.Box(low, joined(bounds.high), low.shape, space.dtype.type)
    return TransformObservation(frames, joined, box)


def require_numbers(space: spaces.Space[Any], name: str) -> None:
    """Raise ConfigError for observations with a part of which no array can be made, such as a text.

    Args:
        space: of the observations of one environment.
        name: the environment's, for errors.
    """
    without = _without_numbers(space)
    if not without:
        return
    parts = [f"{path} is {kind}" for path, kind in without.items() if path]
    problem = f"{name!r} gives observations that are no numbers: {', '.join(parts) or space}"
    cure = (
        "give it a wrapper that makes numbers of them, like gymnasium.wrappers.TransformObservation"
    )
    if isinstance(space, spaces.Dict):
        keys = [key for key, below in space.spaces.items() if not _without_numbers(below)]
        if any("MissionSpace" in kind for kind in without.values()):
            cure = "env.wrappers=[minigrid.wrappers.ImgObsWrapper] shows the picture alone, FlatObsWrapper "
            cure += "of the same module also the mission, as one vector; FullyObsWrapper before them all cells"
        elif keys:
            cure = "env.wrappers=[{name: gymnasium.wrappers.FilterObservation, filter_keys: ["
            cure += f"{', '.join(keys)}]}}] leaves them out"
    raise ConfigError(problem, "the environment's observation space", cure)


def _without_numbers(space: spaces.Space[Any]) -> dict[str, str]:
    """The parts of a space of which no array can be made: their paths, and their kinds."""
    kinds = {}
    for path, leaf in leaves(space):
        if not isinstance(leaf, _OF_NUMBERS):
            kinds[".".join(map(str, path))] = type(leaf).__name__
    return kinds
