"""What an environment of gymnasium's is between two steps, so that another one made alike goes on from there.

An environment that can be saved has two methods, which its class, or one that it inherits from, defines::

    state()      returns all that decides what it answers from now on, its random numbers included, as
                 something that can be pickled
    load(state)  puts that back, in an environment that was made alike and reset

The law: after ``load(state)`` the same actions are answered as after the ``state()`` that returned it. A wrapper
with both methods answers for all that is in it. Gymnasium's own wrappers, such as TimeLimit, are saved by what
they hold; those of rlsync hold nothing that changes. Around any other wrapper nothing can be saved.
"""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import gymnasium
from gymnasium import Space
from gymnasium.envs.registration import EnvSpec

from rlsync import ConfigError
from rlsync.seams import first_line

AnyEnv: TypeAlias = gymnasium.Env[Any, Any]

#: What a wrapper holds besides its state: what is in it, and the arguments that it was made with.
_CONSTANT = ("env", "_saved_kwargs")

_CURE = "correct it; or put a wrapper of yours around it that has neither method: then its episodes are broken "
_CURE += "off at the end of a life, as those of other environments"


def state_of(env: AnyEnv) -> list[Any] | None:
    """The states of the levels of an environment, the outermost first; None: it cannot be saved.

    They may share memory with the environment: pickle them before the next step. ConfigError: ``state()`` raises.
    """
    levels = list(_levels(env))
    if not _saves(levels[-1]):
        return None
    *wrappers, saver = levels
    states: list[Any] = [_held_by(wrapper) for wrapper in wrappers]
    states.append(_called(saver, "state"))
    return states


def load_state(env: AnyEnv, states: Sequence[Any]) -> None:
    """Go on from what :func:`state_of` has returned; ConfigError: ``load(state)`` raises."""
    *wrappers, saver = _levels(env)
    *of_wrappers, state = states
    for wrapper, attributes in zip(wrappers, of_wrappers, strict=True):
        vars(wrapper).update(attributes)
    _called(saver, "load", state)


def pickled(states: Any) -> bytes:
    """What :func:`state_of` has returned, and what else belongs to it; ConfigError: it cannot be pickled."""
    try:
        return pickle.dumps(states, pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # it is foreign code, which may raise anything
        problem = "what state() of the environment returns, or what a wrapper of gymnasium's holds, cannot be "
        problem += f"pickled: {type(error).__name__}: {first_line(error)}"
        cure = "return numbers, texts, arrays and containers of these: no open files, locks or functions"
        raise ConfigError(problem, "state() of the environment", cure) from error


def _levels(env: AnyEnv) -> Iterator[AnyEnv]:
    """An environment, and what is in it, up to what saves itself, or hides what it holds."""
    yield env
    while not _saves(env) and isinstance(env, gymnasium.Wrapper) and _is_open(env):
        env = env.env
        yield env


def _saves(env: AnyEnv) -> bool:
    return all(inspect.isroutine(_of_class(env, name)) for name in ("state", "load"))


def _of_class(env: AnyEnv, name: str) -> Any:
    # Each CartPole has numbers in an attribute "state", which are no method, and would hide one.
    return inspect.getattr_static(type(env), name, None)


def _is_open(wrapper: AnyEnv) -> bool:
    """Whether it is known what a wrapper holds between two steps."""
    module = type(wrapper).__module__
    return module.startswith("gymnasium.wrappers.") or _is_rlsyncs(wrapper)


def _is_rlsyncs(wrapper: AnyEnv) -> bool:
    return type(wrapper).__module__.startswith("rlsync.")


def _held_by(wrapper: AnyEnv) -> dict[str, Any]:
    """What a wrapper holds that may change from step to step: no functions, and no spaces."""
    if _is_rlsyncs(wrapper):
        return {}
    attributes = {}
    for name, value in vars(wrapper).items():
        constant = name in _CONSTANT or isinstance(value, (Space, EnvSpec)) or callable(value)
        if not constant:
            attributes[name] = value
    return attributes


def _called(env: AnyEnv, name: str, *arguments: Any) -> Any:
    method = _of_class(env, name)
    try:
        return method(env, *arguments)
    except Exception as error:  # it is foreign code, which may raise anything
        place = f"{method.__qualname__}()"
        problem = f"{place} of an environment raises {type(error).__name__}: {first_line(error)}"
        raise ConfigError(problem, f"{method.__module__}.{place}", _CURE) from error
