"""One face over vectors of environments: gymnasium's, ale-py's own, and TorchRL's.

Whatever lies behind it: an episode that has ended is reset at once, the observation that comes back is the
first of the next episode, and what a truncation hid comes beside it. See rlsync.recipes.impala.batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import gymnasium
from gymnasium.vector import AutoresetMode, VectorEnv
from torchrl.envs import EnvBase

from rlsync.recipes.impala.env_base import Envs
from rlsync.recipes.impala.env_vectors import AleEnvs, SerialEnvs, VectorEnvs


@dataclass(frozen=True, slots=True)
class GymnasiumEnvs:
    """Any gymnasium id, as ``gymnasium.make_vec`` makes it; ``"module:Id-v0"`` imports the module first.

    Args:
        id: the id.
        options: for the environment.
        vectorized: use the id's own vector environment; else one environment after the other. It must reset
            in the step that ends an episode: some take ``options={"autoreset_mode": "SameStep"}`` for that.

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
        repeat_action_probability: of sticky actions.
        full_action_space: 18 actions instead of the game's own.
        max_episode_frames: frames, four a step, after which an episode is truncated.
        threads: that step the copies of one vector environment.
        options: further ones of ``ale_py.vector_env.AtariVectorEnv``.

    Rewards are not clipped: the loss does that.

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
        observation: the key of what the network sees.

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
    """The environments of a spec, reset once where a seed is given.

    Args:
        spec: which ones.
        num_envs: how many, stepped as one vector.
        seed: of the first one; the others have those that follow.

    Raises:
        ConfigError: they cannot be had, or not as :mod:`rlsync.recipes.impala.batch` needs them.

    Example:
        >>> envs = make_venv(GymnasiumEnvs("CartPole-v1"), 3, seed=0)
        >>> envs.observation_shape, envs.head, envs.reset(0).shape
        ((4,), Categorical(actions=2), torch.Size([3, 4]))
        >>> envs.close()
    """
    match spec:
        case AtariEnvs():
            envs: Envs = AleEnvs(spec.game, num_envs, _ale_options(spec))
        case GymnasiumEnvs():
            envs = VectorEnvs(_make_vec(spec, num_envs), spec.id)
        case TorchRLEnvs():
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
