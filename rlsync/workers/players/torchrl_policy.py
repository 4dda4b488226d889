"""TorchRL policies as players; this file imports torchrl."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModuleBase
from torch import Generator, Tensor
from torchrl.envs.utils import ExplorationType, set_exploration_type

from rlsync.core.plan import POLICY
from rlsync.workers import frames as keys
from rlsync.workers.envs.actions import ActionSpec, BoxActions
from rlsync.workers.player import Acted, Player, State


class PolicyPlayer(Player):
    """Acts with a TorchRL policy that reads ``observation`` and writes ``action``, one-hot or numbers.
    TorchRL's policies draw from torch's own random numbers, so :meth:`begin` seeds these. ``begins`` has what
    a policy with a memory carries at first: it writes ``("next", key)``, and is given ``is_init``, too.
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
        super().__init__({POLICY: policy}, actions, observation_shape, observation_dtype)
        self._policy = policy
        self._begins = dict(begins or {})
        self._exploration = ExplorationType.DETERMINISTIC if deterministic else ExplorationType.RANDOM

    def begin(self, num_envs: int, generator: Generator, worker: int = 0, num_workers: int = 1) -> State:
        torch.manual_seed(generator.initial_seed())
        return {key: value.expand(num_envs, *value.shape).clone() for key, value in self._begins.items()}

    def act(
        self, observation: Tensor, is_init: Tensor, reward: Tensor, state: State, generator: Generator
    ) -> Acted:
        # Not len(observation): torch.export would take the number of environments for a constant.
        seen = TensorDict({keys.OBSERVATION: observation}, observation.shape[:1])
        for key, value in self._begins.items():
            begins = is_init.reshape(-1, *[1] * value.ndim)
            seen[key] = torch.where(begins, value.to(observation.device), state[key])
        if self._begins:
            seen[keys.IS_INIT] = is_init.unsqueeze(-1)
        with set_exploration_type(self._exploration):
            action: Tensor = self._policy(seen).get(keys.ACTION)
        state = {key: seen["next", key] for key in self._begins}
        if isinstance(self.actions, BoxActions):
            return Acted(action, {}, state)
        return Acted(action.to(torch.int64).argmax(-1), {}, state)
