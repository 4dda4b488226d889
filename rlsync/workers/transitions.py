"""Unrolls as the transitions that TorchRL's losses and replay buffers read."""

from __future__ import annotations

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torch.nn import functional

from rlsync.workers import frames as keys
from rlsync.workers.envs.actions import ActionSpec, DiscreteActions
from rlsync.workers.players.acting_policy import EXPONENT, REWARD_SUM
from rlsync.workers.unrolls import COLLECTOR

#: Key of the numbers of pieces of episodes, under ``"collector"``.
PIECES = "traj_ids"


def transitions(batch: TensorDictBase, actions: ActionSpec, first_piece: int = 0) -> TensorDict:
    """The steps of unrolls, with TorchRL's keys.

    ``("next", "observation")`` of a step that terminated an episode is the first observation of the next
    episode: nothing may be learned from its value. That of a truncated step is the last of its episode.

    Args:
        batch: see :mod:`rlsync.workers.frames`, with ``reward_sum``; it is not changed.
        actions: choices of n become one-hot, as TorchRL's environments have them.
        first_piece: pieces of episodes are numbered from here in ``("collector", "traj_ids")``; a piece ends
            with its episode or its unroll.

    Returns:
        ``[B, T]``, in memory of its own.

    Example:
        >>> steps = {name: torch.zeros(2, 1) for name in ("reward", "reward_sum")}
        >>> flags = {name: torch.zeros(2, 1, dtype=torch.bool) for name in ("terminated", "truncated")}
        >>> batch = TensorDict(
        ...     {
        ...         "observation": torch.arange(3.0).reshape(3, 1, 1),
        ...         "is_init": torch.zeros(3, 1, dtype=torch.bool),
        ...         "action": torch.tensor([[1], [0]]),
        ...         "policy_version": torch.ones(2, 1, dtype=torch.int64),
        ...         **steps,
        ...         **flags,
        ...     }
        ... )
        >>> made = transitions(batch, DiscreteActions(2))
        >>> made["action"].tolist(), made["next", "observation"].flatten().tolist()
        ([[[0, 1], [1, 0]]], [1.0, 2.0])
    """
    observation, action = batch.get(keys.OBSERVATION), batch.get(keys.ACTION)
    after = observation[1:].clone()
    if keys.FINAL_INDEX in batch:
        step, env = batch.get(keys.FINAL_INDEX).unbind(-1)
        after[step, env] = batch.get(keys.FINAL_OBSERVATION)
    if isinstance(actions, DiscreteActions):
        action = functional.one_hot(action, actions.n)
    terminated, truncated = batch.get(keys.TERMINATED), batch.get(keys.TRUNCATED)
    reward, before = batch.get(keys.REWARD), batch.get(REWARD_SUM)
    version = _by_env(batch.get(keys.POLICY_VERSION))
    ends = {"terminated": terminated, "truncated": truncated, "done": terminated | truncated}
    following = {keys.REWARD: reward, REWARD_SUM: before + reward, **ends}
    none = torch.zeros_like(_number(terminated))
    root = {
        keys.OBSERVATION: _by_env(observation[:-1]),
        keys.ACTION: _by_env(action),
        REWARD_SUM: _number(before),
        keys.POLICY_VERSION: version,
        **{name: none.clone() for name in ends},
    }
    nested = {name: _number(tensor) for name, tensor in following.items()}
    nested |= {keys.OBSERVATION: _by_env(after), keys.POLICY_VERSION: version.clone()}
    if EXPONENT in batch:
        root[EXPONENT] = _number(batch.get(EXPONENT))
        nested[EXPONENT] = root[EXPONENT].clone()
    known = {*root, *keys.KEYS, COLLECTOR}
    root |= {str(key): _by_env(tensor) for key, tensor in batch.items() if key not in known}
    begins = _by_env(batch.get(keys.IS_INIT)[:-1])
    begins[:, 0] = True
    pieces = begins.flatten().cumsum(0).reshape(begins.shape) - 1 + first_piece
    size = list(pieces.shape)
    beside = TensorDict({PIECES: pieces}, size)
    return TensorDict({**root, "next": TensorDict(nested, size), COLLECTOR: beside}, size)


def _by_env(tensor: Tensor) -> Tensor:
    """``[T, B, *]`` as ``[B, T, *]``, copied."""
    return tensor.transpose(0, 1).clone(memory_format=torch.contiguous_format)


def _number(tensor: Tensor) -> Tensor:
    """``[T, B]`` as ``[B, T, 1]``, copied."""
    return _by_env(tensor).unsqueeze(-1)
