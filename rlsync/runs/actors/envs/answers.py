"""What environments answer to ``reset()`` and ``step()``: checked and brought to one form, once.

Every gymnasium environment that workers, evaluations, films, exports and recipes step is stepped through this
file. An answer that can mean one thing only is read as that, any other is refused with a ConfigError. Arrays
are copied: an environment may write its next answer into the one before.

======================== ==================================================================================
reward                   one number: float, int, bool, array or list with one element; becomes a float
terminated, truncated    one bool, or a 0 or 1 of a whole-number type; becomes a bool
observation              an array or nested lists in the shape of the space; becomes an array of its dtype.
                         Floats are rounded, whole numbers become floats. What a space of whole numbers
                         cannot hold is refused, and so is a float for it
info                     a dict, or None; becomes a dict
======================== ==================================================================================
"""

from __future__ import annotations

import math
import reprlib
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import numpy as np
import torch
from gymnasium import Env, Space, Wrapper
from gymnasium.vector import VectorEnv, VectorWrapper
from numpy.typing import NDArray

from rlsync import ConfigError
from rlsync.runs.actors.envs.observations import (
    MASK,
    NUMBERS,
    Observations,
    OutsideSpace,
    Rows,
    as_promised,
)


class CheckedEnv(Wrapper[Any, Any, Any, Any]):
    """An environment whose answers have the form above. Without ``observed`` no observation is looked at."""

    def __init__(self, env: Env[Any, Any], name: str, *, observed: bool = True) -> None:
        super().__init__(env)
        if observed:
            self._form = _Form.of(name, env.observation_space)
        else:
            self._form = _Form.of(name, None)
        self._shape = self._form.shape
        self._dtype = self._form.dtype

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, Any]:
        return self._form.reset(self.env.reset(seed=seed, options=options))

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.step_uncopied(action)
        if self._shape is not None and type(observation) is np.ndarray:
            observation = observation.copy()
        return observation, reward, terminated, truncated, info

    def step_uncopied(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """As :meth:`step`, for a caller that copies the observation before the next call of anything here."""
        answer = self.env.step(action)
        try:
            observation, reward, terminated, truncated, info = answer
        except (TypeError, ValueError):
            self._form.refuse_step(answer)
        # Most answers already have their form, which types tell faster than anything else.
        fits = type(observation) is np.ndarray and observation.dtype == self._dtype
        if not fits or observation.shape != self._shape:
            observation = self._form.observation(observation, "step")
        if type(reward) is not float:
            reward = float(self._form.reward(reward))
        if type(terminated) is not bool:
            terminated = bool(self._form.end(terminated, "terminated"))
        if type(truncated) is not bool:
            truncated = bool(self._form.end(truncated, "truncated"))
        if type(info) is not dict:
            info = self._form.info(info, "step")
        return observation, reward, terminated, truncated, info


class InRows(Wrapper[Any, Any, Any, Any]):
    """An environment whose observations have several parts, or are choices, as rows of these.

    See :mod:`rlsync.runs.actors.envs.observations`. An observation outside its space is refused with a
    ConfigError that names the part, and so is a mask that allows no action where one is needed.

    Args:
        env: its own answers are checked already.
        name: the environment's, for errors.
        observations: what players see of it.
    """

    def __init__(self, env: CheckedEnv, name: str, observations: Observations) -> None:
        super().__init__(env)
        self.observation_space = Rows(observations)
        self._rows = _RowForm(observations, f"the environment {name!r}", env.observation_space)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, Any]:
        observation, info = self.env.reset(seed=seed, options=options)
        return self._rows.of("reset", observation, info), info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        row = self._rows.of("step", observation, info, ended=terminated)
        return row, float(reward), terminated, truncated, info


@dataclass(frozen=True, slots=True)
class _RowForm:
    """How the answers of one environment, or of a vector of them, become rows."""

    observations: Observations
    name: str  # in errors
    space: Space[Any]  # of one observation
    lead: tuple[int, ...] = ()  # () for one environment, else how many there are

    def of(
        self,
        method: str,
        answer: Any,
        info: dict[str, Any],
        *,
        ended: bool = False,
    ) -> NDArray[Any]:
        """Rows ``[*lead, *shape]``; in the last one of an episode that ``ended`` nothing need be allowed."""
        try:
            rows = self.observations.row(answer, self.lead, info.get(MASK))
        except OutsideSpace as error:
            problem = f"an observation is outside its space: {error}"
            cure = "correct what the environment returns, or give it the space of its answers"
            raise ConfigError(problem, self._where(method), cure) from None
        if not ended:
            self._require_an_action(rows, method)
        return rows

    def _require_an_action(self, rows: NDArray[Any], method: str) -> None:
        """Raise ConfigError where a mask leaves nothing to choose."""
        mask = self.observations.mask
        allowed = self.observations.allowed(torch.from_numpy(rows))
        if mask is None or allowed is None:
            return
        for choices in allowed.split(list(mask.choices), -1):
            if not bool(choices.any(-1).all()):
                problem = f"a mask allows no action: {allowed.int().tolist()}"
                cure = "allow at least one; where nothing can be done, end the episode"
                raise ConfigError(problem, self._where(method), cure)

    def _where(self, method: str) -> str:
        return f"{method}() of {self.name}; its observation space is {self.space}"


class CheckedVectorEnv(VectorWrapper):  # type: ignore[type-arg] # gymnasium 1.1's takes no types
    """A vector environment whose answers have the form above, once for each of its environments.

    Of ``info["final_obs"]`` it keeps what is read: the last observations of truncated episodes, by number,
    and with ``keeps_last`` those of all that end.
    """

    def __init__(self, envs: VectorEnv[Any, Any, Any], name: str) -> None:
        super().__init__(envs)
        self._form = _Form.of(name, envs.single_observation_space, envs.num_envs)
        self._one = _Form.of(name, envs.single_observation_space)
        self.keeps_last = False

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
        return self._form.reset(self.env.reset(seed=seed, options=options))

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        answer = self.env.step(actions)
        try:
            answered, reward, terminated, truncated, info = answer
        except (TypeError, ValueError):
            self._form.refuse_step(answer)
        observation = self._form.observation(answered, "step")
        reward = self._form.reward(reward)
        terminated = self._form.end(terminated, "terminated")
        truncated = self._form.end(truncated, "truncated")
        info = dict(self._form.info(info, "step"))
        hidden = terminated | truncated
        if not self.keeps_last:
            hidden &= ~terminated
        finals = info.pop("final_obs", None)
        if hidden.any():
            info["final_obs"] = {
                env: self._final(finals, env, answered) for env in np.flatnonzero(hidden).tolist()
            }
        return observation, reward, terminated, truncated, info

    def _final(self, finals: Any, env: int, answered: Any) -> NDArray[Any]:
        """The last observation of an episode; ``answered`` has the first one of the next."""
        promise = "it has to hold the last observation of each truncated episode"
        cure = "put it there, before you reset; or leave vectorized=False"
        try:
            last = finals[env]
        except (TypeError, IndexError, KeyError):
            self._form.refuse("step", "info['final_obs']", _shown(finals), promise, cure)
        if isinstance(answered, np.ndarray) and np.shares_memory(np.asarray(last), answered):
            self._form.refuse(
                "step", "info['final_obs']", "the array of the next observation", promise, cure
            )
        return self._one.observation(last, "step", "final observation")


class VectorInRows(CheckedVectorEnv):
    """A vector environment whose observations have several parts, or are choices, as rows of these.

    Args:
        envs: what answers.
        name: the environment's, for errors.
        observations: what players see of one environment.
    """

    def __init__(
        self, envs: VectorEnv[Any, Any, Any], name: str, observations: Observations
    ) -> None:
        super().__init__(envs, name)
        space = envs.single_observation_space
        self.single_observation_space = Rows(observations)
        self._rows = _RowForm(observations, f"the environment {name!r}", space, (envs.num_envs,))
        self._row = replace(self._rows, lead=())

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
        observation, info = super().reset(seed=seed, options=options)
        return self._rows.of("reset", observation, info), info

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        observation, reward, terminated, truncated, info = super().step(actions)
        rows = self._rows.of("step", observation, info)
        finals = {}
        for env, last in info.get("final_obs", {}).items():
            finals[env] = self._row.of("step", last, {}, ended=bool(terminated[env]))
        return rows, reward, terminated, truncated, info | {"final_obs": finals}


@dataclass(frozen=True, slots=True)
class _Form:
    """The form of the answers of one environment, or of a vector of them, and how it is reached."""

    name: str  # of the environment, in errors
    space: Space[Any] | None  # of one observation; None: it is not looked at
    lead: tuple[int, ...]  # () for one environment, else how many there are
    shape: tuple[int, ...] | None  # of all observations; None: they are no array, and not looked at
    dtype: np.dtype[Any] | None

    @classmethod
    def of(cls, name: str, space: Space[Any] | None, count: int | None = None) -> _Form:
        lead = () if count is None else (count,)
        if space is None or space.shape is None or space.dtype is None:
            return cls(name, space, lead, None, None)
        return cls(name, space, lead, (*lead, *space.shape), np.dtype(space.dtype))

    def reset(self, answer: Any) -> tuple[Any, dict[str, Any]]:
        try:
            observation, info = answer
        except (TypeError, ValueError):
            promise = "it has to return observation, info"
            cure = "return the two, as gymnasium's interface has been since 0.26"
            self.refuse("reset", "its answer", _shown(answer), promise, cure)
        return self.observation(observation, "reset"), self.info(info, "reset")

    def refuse_step(self, answer: Any) -> NoReturn:
        promise = "it has to return observation, reward, terminated, truncated, info"
        cure = "return the five, as gymnasium's interface has been since 0.26"
        self.refuse("step", "its answer", _shown(answer), promise, cure)

    def observation(self, answer: Any, method: str, field: str = "observation") -> Any:
        if self.shape is None or self.dtype is None:
            return answer
        array = _array(answer)
        if array is None or array.dtype.kind not in NUMBERS or array.shape != self.shape:
            self._refuse_observation(answer, method, field)
        try:
            cast = as_promised(array, self.dtype)
        except OutsideSpace as error:
            self._refuse_observation(array, method, field, str(error))
        if self.shape:
            return cast
        return cast[()]

    def _refuse_observation(self, answer: Any, method: str, field: str, more: str = "") -> NoReturn:
        assert self.shape is not None
        assert self.dtype is not None
        cure = "return what the space promises, or give the environment the observation_space of its answers"
        promise = f"its space promises {_form_of(self.shape, self.dtype)}"
        self.refuse(method, field, f"{_shown(answer)}{more}", promise, cure)

    def reward(self, answer: Any) -> NDArray[Any]:
        return self._numbers(
            answer, "reward", "fiub", "number", "return a float; 0.0 where a step earns nothing"
        )

    def end(self, answer: Any, field: str) -> NDArray[np.bool_]:
        cure = f"return bool({field}); False where an episode goes on"
        array = self._numbers(answer, field, "iub", "bool", cure)
        ended = array.astype(np.bool_)
        if not np.array_equal(ended, array):
            self._refuse_numbers(answer, field, "bool", cure)
        return ended

    def info(self, answer: Any, method: str) -> dict[str, Any]:
        if answer is None:
            return {}
        if not isinstance(answer, dict):
            cure = "return {} where there is nothing to tell"
            self.refuse(method, "info", _shown(answer), "it has to be a dict", cure)
        return answer

    def _numbers(self, answer: Any, field: str, kinds: str, what: str, cure: str) -> NDArray[Any]:
        array = _array(answer)
        if array is None or array.dtype.kind not in kinds or array.size != math.prod(self.lead):
            self._refuse_numbers(answer, field, what, cure)
        return array.reshape(self.lead).copy()

    def _refuse_numbers(self, answer: Any, field: str, what: str, cure: str) -> NoReturn:
        if self.lead:
            wanted = f"{self.lead[0]} {what}s, one for each environment"
        else:
            wanted = f"one {what}"
        self.refuse("step", field, _shown(answer), f"it has to be {wanted}", cure)

    def refuse(self, method: str, field: str, answer: str, promise: str, cure: str) -> NoReturn:
        problem = f"{self.name!r} answers {method}() with {field} = {answer}; {promise}"
        if self.space is None:
            space = ""
        else:
            space = f"; its observation space is {self.space}"
        raise ConfigError(problem, f"{method}() of the environment {self.name!r}{space}", cure)


def _array(value: Any) -> NDArray[Any] | None:
    try:
        return np.asarray(value)
    except (TypeError, ValueError):  # lists of different lengths; a tensor on an accelerator
        return None


def _shown(value: Any) -> str:
    """An answer in a few words."""
    if isinstance(value, np.ndarray):
        form = _form_of(value.shape, value.dtype)
        if value.size > 1:
            return form
        return f"{form}, {value.tolist()}"
    if value is None:
        return "None"
    if isinstance(value, np.generic):
        value = value.item()
    return f"{type(value).__name__} {reprlib.repr(value)}"


def _form_of(shape: tuple[int, ...], dtype: np.dtype[Any]) -> str:
    return f"{list(shape)} of {dtype}"
