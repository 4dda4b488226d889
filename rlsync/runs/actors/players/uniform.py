"""A player without weights: every action is equally likely."""

from __future__ import annotations

import math

import torch
from torch import Generator, Tensor

from rlsync import ConfigError
from rlsync.runs.actors import frames as keys
from rlsync.runs.actors.envs.actions import (
    ActionSpec,
    BoxActions,
    DiscreteActions,
    MultiDiscreteActions,
)
from rlsync.runs.actors.envs.observations import Observations
from rlsync.runs.actors.player import Acted, Player, Record, State


class UniformPlayer(Player):
    """Draws each action uniformly: one choice, several, or numbers of a bounded box.

    It records ``behaviour_log_prob``.

    Use it as a baseline, and to fill a replay before training begins. It has no weights, so its frames carry
    version 0.

    Args:
        actions: what it draws from.
        observation_shape, observation_dtype: of the environment; or what its rows are made of. It looks at nothing
            but a mask, if they have one.

    Raises:
        ConfigError: a box has no finite bounds.

    Example:
        >>> from rlsync.runs.actors.envs.actions import DiscreteActions
        >>> player = UniformPlayer(DiscreteActions(4), (3,))
        >>> generator = torch.Generator().manual_seed(0)
        >>> acted = player.act(
        ...     torch.zeros(2, 3), torch.ones(2, dtype=torch.bool), torch.zeros(2), {}, generator
        ... )
        >>> acted.records["behaviour_log_prob"].exp()
        tensor([0.2500, 0.2500])
    """

    def __init__(
        self,
        actions: ActionSpec,
        observation_shape: tuple[int, ...] | Observations,
        observation_dtype: torch.dtype = torch.float32,
    ) -> None:
        records = [Record(keys.BEHAVIOUR_LOG_PROB, (), torch.float32)]
        super().__init__({}, actions, observation_shape, observation_dtype, records)
        self._log_prob = _log_density(actions)

    def begin(
        self, num_envs: int, generator: Generator, worker: int = 0, num_workers: int = 1
    ) -> State:
        return {}

    def act(
        self,
        observation: Tensor,
        is_init: Tensor,
        reward: Tensor,
        state: State,
        generator: Generator,
    ) -> Acted:
        count = len(observation)
        actions = self.actions
        device = observation.device
        allowed = self.allowed(observation)
        if isinstance(actions, BoxActions):
            low = torch.tensor(actions.low, device=device)
            high = torch.tensor(actions.high, device=device)
            drawn = torch.rand(count, actions.size, generator=generator, device=device)
            action = low + (high - low) * drawn
        else:
            action = actions.drawn(count, generator, device, allowed)
        log_prob = torch.full((count,), self._log_prob, device=device)
        if allowed is not None:
            each = allowed.split(list(actions.choices), -1)
            log_prob = -sum(of_one.sum(-1).float().log() for of_one in each)
        return Acted(action, {keys.BEHAVIOUR_LOG_PROB: log_prob}, state)


def _log_density(actions: ActionSpec) -> float:
    if isinstance(actions, DiscreteActions):
        return -math.log(actions.n)
    if isinstance(actions, MultiDiscreteActions):
        return -math.log(math.prod(actions.nvec))
    widths = [high - low for low, high in zip(actions.low, actions.high, strict=True)]
    if not widths or not all(0 < width < math.inf for width in widths):
        problem = f"nothing can be drawn uniformly from {actions}"
        cure = "give actions with finite bounds, for example BoxActions(1, (-1.0,), (1.0,))"
        raise ConfigError(problem, "UniformPlayer(actions=...)", cure)
    return -sum(map(math.log, widths))
