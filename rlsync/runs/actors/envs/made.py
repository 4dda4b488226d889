"""Environments that a function of the user's makes: gymnasium's, one or a vector of them, or TorchRL's."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, runtime_checkable

import gymnasium
from gymnasium.vector import VectorEnv
from gymnasium.wrappers import TimeLimit

from rlsync import ConfigError, RlsyncError
from rlsync.runs.actors.envs.answers import CheckedEnv
from rlsync.runs.actors.envs.specs import GymnasiumEnvs
from rlsync.runs.actors.envs.vectors import Envs, ListedEnvs, VectorEnvs
from rlsync.runs.actors.envs.wrapping import AnyEnv, AnyVector, NamedWrapper, imported
from rlsync.seams import first_line, user_input

if TYPE_CHECKING:  # at run time torchrl is imported only where its environments are made
    from torchrl.envs import EnvBase

_COUNT = "num_envs"

_KINDS = "return an environment or a vector environment of gymnasium's, or TorchRL's EnvBase without a batch size"


@runtime_checkable
class _OfManyAgents(Protocol):
    """What PettingZoo's environments have, and no other."""

    possible_agents: Any


@dataclass(frozen=True, slots=True)
class MadeEnvs(GymnasiumEnvs):
    """Environments that a function makes. ``id`` is its place, ``module:function``, ``options`` its arguments.

    It is called for each environment, or once for a vector of them. If it has an argument ``num_envs``, it
    gets their number, and must have it to return a vector.

    Example:
        >>> envs = MadeEnvs("gymnasium:make", {"id": "CartPole-v1"}, max_episode_steps=9).envs(2)
        >>> envs.observation_shape, envs.num_envs
        ((4,), 2)
        >>> envs.close()
    """

    def envs(self, num_envs: int) -> Envs:
        """These environments, as they step together; which kind they are is known once one is made.

        Args:
            num_envs: their number.

        Raises:
            ConfigError: the function cannot be imported, raises, or returns nothing that workers can step; or
                something is to be put around each environment, which only fits gymnasium's single ones.
        """
        match self._called(num_envs):
            case gymnasium.Env() as first:
                return ListedEnvs(self._beginning_with(first, num_envs), num_envs, self.id)
            case VectorEnv() as vector:
                return self._made_vector(vector, num_envs)
            case other:
                return self._made_by_torchrl(other, num_envs)

    def _bare(self, options: dict[str, Any]) -> AnyEnv:
        env = self._called(1)
        if not isinstance(env, gymnasium.Env):
            problem = (
                f"{self.id} returns {type(env).__name__}, which has no single environment to draw"
            )
            raise ConfigError(problem, self._where, "leave films and pictures out")
        return self._limited(env)

    def _limited(self, env: AnyEnv) -> AnyEnv:
        if self.max_episode_steps is None:
            return env
        return TimeLimit(env, self.max_episode_steps)

    def _beginning_with(self, first: AnyEnv, num_envs: int) -> Callable[[], CheckedEnv]:
        """What makes one environment after the other, the first of which is there."""
        ready = [first]

        def make() -> CheckedEnv:
            env = ready.pop() if ready else self._called(num_envs)
            if not isinstance(env, gymnasium.Env):
                self._refuse(env)
            return self._checked(self._wrapped(self._limited(env)))

        return make

    def _made_vector(self, vector: AnyVector, num_envs: int) -> Envs:
        try:
            if vector.num_envs != num_envs:
                problem = f"{self.id} returns a vector of {vector.num_envs} environments, and a worker steps "
                cure = f"let it have an argument {_COUNT}, and return so many"
                raise ConfigError(f"{problem}{num_envs}", self._where, cure)
            limits = "let the function put it around each environment of the vector"
            self._require_bare("it is a gymnasium vector environment", limits, wrappers=True)
            for wrap in self.wrappers:
                assert isinstance(wrap, NamedWrapper), "a config names its wrappers"
                vector = wrap.around_vector(vector)
        except ConfigError:
            vector.close()
            raise
        cure = "make it with autoreset_mode=AutoresetMode.SAME_STEP; or return one environment, and rlsync steps "
        cure += "one after the other"
        return VectorEnvs(self._checked_vector(vector), self.id, cure)

    def _made_by_torchrl(self, made: object, num_envs: int) -> Envs:
        from torchrl.envs import EnvBase

        if not isinstance(made, EnvBase):
            self._refuse(made)
        from rlsync.runs.actors.envs.serial import SerialEnvs

        made.close(raise_if_closed=False)  # those that step are made where they step
        if made.batch_size:
            problem = (
                f"{self.id} returns a TorchRL environment of batch size {list(made.batch_size)}"
            )
            cure = "return one without a batch size: rlsync puts them side by side"
            raise ConfigError(problem, self._where, cure)
        cure = "let the function add TorchRL's transforms: TransformedEnv(env, Compose(...))"
        self._require_bare("it is TorchRL's", cure)

        def make() -> EnvBase:
            env: EnvBase = self._called(num_envs)
            return env

        return SerialEnvs(make, num_envs, "observation", self.id)

    def _called(self, num_envs: int) -> Any:
        """What the function returns."""
        make = imported(self.id, self._where)
        arguments = dict(self.options)
        if self._takes_count(make):
            arguments.setdefault(_COUNT, num_envs)
        try:
            return make(**arguments)
        except RlsyncError:
            raise
        except Exception as error:  # it is foreign code, which may raise anything
            problem = f"{self.id} raises {type(error).__name__}: {first_line(error)}"
            cure = "correct the function"
            if isinstance(error, TypeError):
                cure += (
                    ", or its arguments: +env.kwargs.NAME=VALUE adds one, ~env.kwargs.NAME drops it"
                )
            raise ConfigError(problem, f"{self._where}, called with {arguments}", cure) from error

    @staticmethod
    def _takes_count(make: Callable[..., Any]) -> bool:
        try:
            return _COUNT in inspect.signature(make).parameters
        except (TypeError, ValueError):  # a class or function of C has none
            return False

    @property
    def _where(self) -> str:
        return f"env.make={self.id}"

    def _refuse(self, returned: object) -> NoReturn:
        problem = f"{self.id} returns no environment: {user_input.short(returned)}"
        cure = _KINDS
        if isinstance(returned, _OfManyAgents):
            problem = (
                f"{self.id} returns {type(returned).__name__}, an environment of several agents"
            )
            cure = "return what one of them sees and does: a gymnasium.Env in which the others are played by "
            cure += "policies of yours; several agents are not trained at once"
        raise ConfigError(problem, self._where, cure)
