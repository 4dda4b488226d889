"""Which environments workers step: gymnasium's, ale-py's own, or TorchRL's.

All of them behave alike. An episode that has ended is reset in the same step: the observation that comes back
is the first of the next episode, and the last observation of a truncated episode comes beside it. See
:mod:`rlsync.workers.frames`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import gymnasium
from gymnasium.vector import AutoresetMode, VectorEnv

from rlsync.workers.envs.base import Envs
from rlsync.workers.envs.vectors import AleEnvs, VectorEnvs

if TYPE_CHECKING:  # at run time torchrl is imported only where its environments are made
    from torchrl.envs import EnvBase


@dataclass(frozen=True, slots=True)
class GymnasiumEnvs:
    """Any gymnasium id, as ``gymnasium.make_vec`` makes it; ``"module:Id-v0"`` imports the module first.

    Args:
        id: the id.
        options: keyword arguments for the environment.
        vectorized: True uses the id's own vector environment; False steps one environment after the other.
            A vector environment must reset in the step that ends an episode; some need
            ``options={"autoreset_mode": "SameStep"}`` for that.

    Example:
        >>> GymnasiumEnvs("CartPole-v1", {"max_episode_steps": 200}).id
        'CartPole-v1'
    """

    id: str
    options: Mapping[str, Any] = field(default_factory=dict)
    vectorized: bool = False


@dataclass(frozen=True, slots=True)
class AtariEnvs:
    """An Atari game on ale-py's C++ vector environment; pixels [4, 84, 84], four frames a step, grey.

    Args:
        game: the rom's name in snake_case: ``"pong"``, ``"space_invaders"``.
        repeat_action_probability: probability that a step repeats the last action ("sticky actions").
        full_action_space: all 18 actions instead of the game's own.
        max_episode_frames: an episode is truncated after this many frames; a step has four.
        threads: how many threads step the copies of one vector environment.
        options: more arguments of ``ale_py.vector_env.AtariVectorEnv``.

    Rewards are not clipped here: the loss does that.

    Example:
        >>> AtariEnvs("pong", repeat_action_probability=0.25).game
        'pong'
    """

    game: str
    repeat_action_probability: float = 0.0
    full_action_space: bool = False
    max_episode_frames: int = 108_000
    threads: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TorchRLEnvs:
    """TorchRL environments, one after the other.

    Args:
        make: makes one without a batch size; picklable where workers are spawned.
        observation: the key of what the player sees.

    Example:
        >>> from functools import partial
        >>> from torchrl.envs import GymEnv
        >>> TorchRLEnvs(partial(GymEnv, "CartPole-v1")).observation
        'observation'
    """

    make: Callable[[], EnvBase]
    observation: str = "observation"


EnvSpec = GymnasiumEnvs | AtariEnvs | TorchRLEnvs


def make_venv(spec: EnvSpec, num_envs: int, seed: int | None = None) -> Envs:
    """Make the environments of a spec.

    Args:
        spec: which environments.
        num_envs: how many of them step as one vector.
        seed: reset them once; the i-th one gets ``seed + i``. None does not reset them.

    Raises:
        ConfigError: they cannot be made, or do not behave as :mod:`rlsync.workers.frames` needs it.

    Example:
        >>> envs = make_venv(GymnasiumEnvs("CartPole-v1"), 3, seed=0)
        >>> envs.observation_shape, envs.actions, envs.reset(0).shape
        ((4,), DiscreteActions(n=2), torch.Size([3, 4]))
        >>> envs.close()
    """
    match spec:
        case AtariEnvs():
            envs: Envs = AleEnvs(spec.game, num_envs, _ale_options(spec))
        case GymnasiumEnvs():
            envs = VectorEnvs(_make_vec(spec, num_envs), spec.id)
        case TorchRLEnvs():
            from rlsync.workers.envs.serial import SerialEnvs

            envs = SerialEnvs(spec.make, num_envs, spec.observation)
    if seed is not None:
        envs.reset(seed)
    return envs


def _ale_options(spec: AtariEnvs) -> dict[str, Any]:
    return {
        "num_threads": spec.threads,
        "max_num_frames_per_episode": spec.max_episode_frames,
        "repeat_action_probability": spec.repeat_action_probability,
        "full_action_space": spec.full_action_space,
        "reward_clipping": False,
        **spec.options,
    }


def _make_vec(spec: GymnasiumEnvs, num_envs: int) -> VectorEnv[Any, Any, Any]:
    if spec.vectorized:
        return gymnasium.make_vec(spec.id, num_envs, "vector_entry_point", **spec.options)
    how = {"autoreset_mode": AutoresetMode.SAME_STEP}
    return gymnasium.make_vec(spec.id, num_envs, "sync", vector_kwargs=how, **spec.options)
