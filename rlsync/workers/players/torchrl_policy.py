"""A TorchRL policy as a player, for evaluations; this file imports torchrl."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModuleBase
from torch import Generator, Tensor, nn
from torchrl.envs.utils import ExplorationType, set_exploration_type

from rlsync.core.plan import POLICY
from rlsync.workers.envs.actions import ActionSpec, BoxActions
from rlsync.workers.player import Acted, Player, State


class PolicyPlayer(Player):
    """Acts with a TorchRL policy that reads ``observation`` and writes ``action``, one-hot or numbers.

    TorchRL's policies draw from torch's own random numbers, so :meth:`begin` seeds these.

    A policy with a memory reads what it carries under a key, and writes what the next step begins with under
    ``("next", key)``. Such a policy is also given ``is_init``.

    Args:
        policy: the policy.
        actions: what it chooses from.
        observation_shape, observation_dtype: of one observation.
        deterministic: take the likeliest action; otherwise draw one, if the policy draws at all.
        begins: what the policy carries from step to step, by key, as it is at the first step of an episode in
            one environment.
    """

    def __init__(
        self,
        policy: TensorDictModuleBase,
        actions: ActionSpec,
        observation_shape: tuple[int, ...],
        *,
        observation_dtype: torch.dtype = torch.float32,
        deterministic: bool = False,
        begins: Mapping[str, Tensor] | None = None,
    ) -> None:
        self._policy = policy
        self._actions = actions
        self._observation_shape = tuple(observation_shape)
        self._observation_dtype = observation_dtype
        self._begins = dict(begins or {})
        self._exploration = ExplorationType.DETERMINISTIC if deterministic else ExplorationType.RANDOM

    @property
    def modules(self) -> Mapping[str, nn.Module]:
        return {POLICY: self._policy}

    @property
    def actions(self) -> ActionSpec:
        return self._actions

    @property
    def observation_shape(self) -> tuple[int, ...]:
        return self._observation_shape

    @property
    def observation_dtype(self) -> torch.dtype:
        return self._observation_dtype

    def begin(self, num_envs: int, generator: Generator, worker: int = 0, num_workers: int = 1) -> State:
        torch.manual_seed(generator.initial_seed())
        return {key: value.expand(num_envs, *value.shape).clone() for key, value in self._begins.items()}

    def act(
        self, observation: Tensor, is_init: Tensor, reward: Tensor, state: State, generator: Generator
    ) -> Acted:
        seen = TensorDict({"observation": observation}, [len(observation)])
        for key, value in self._begins.items():
            seen[key] = torch.where(_shaped(is_init, state[key]), value.to(observation.device), state[key])
        if self._begins:
            seen["is_init"] = is_init.unsqueeze(-1)
        with set_exploration_type(self._exploration):
            action: Tensor = self._policy(seen).get("action")
        state = {key: seen["next", key] for key in self._begins}
        if isinstance(self._actions, BoxActions):
            return Acted(action, {}, state)
        return Acted(action.to(torch.int64).argmax(-1), {}, state)


def _shaped(chosen: Tensor, like: Tensor) -> Tensor:
    """[N] as ``[N, 1, ...]``, to choose from a tensor of N entries."""
    return chosen.reshape(-1, *[1] * (like.ndim - 1))
