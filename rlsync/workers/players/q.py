"""A player with a Q-network: greedy, but for random actions that each worker takes at a rate of its own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn

from rlsync.core.errors import ConfigError
from rlsync.core.plan import POLICY
from rlsync.workers.envs.actions import DiscreteActions
from rlsync.workers.player import Acted, Player, Record, State

#: Records of each step: the Q-value of the action taken, and the largest one. An initial priority needs both.
TAKEN_VALUE = "taken_value"
MAX_VALUE = "max_value"
_EPSILON = "epsilon"


@dataclass(frozen=True, slots=True)
class EpsilonLadder:
    """How often each worker takes a random action.

    Worker i of N does so with probability ``epsilon ** (1 + alpha * i / (N - 1))``: worker 0 explores most,
    the last one least. A single worker has ``epsilon``.

    Raises:
        ConfigError: a number is out of range.

    Source: Ape-X, arXiv 1803.00933.

    Example:
        >>> [round(EpsilonLadder(0.4, 7.0).of(worker, 4), 5) for worker in range(4)]
        [0.4, 0.04716, 0.00556, 0.00066]
    """

    epsilon: float = 0.4  #: the probability of worker 0, from 0 (greedy) to 1
    #: How much steeper the last worker's exponent is; 0 gives all workers the same probability.
    alpha: float = 7.0

    def __post_init__(self) -> None:
        if not 0 <= self.epsilon <= 1 or self.alpha < 0:
            what = f"no ladder has epsilon {self.epsilon:g} and alpha {self.alpha:g}"
            raise ConfigError(what, "EpsilonLadder", "give an epsilon from 0 to 1, and an alpha of 0 or more")

    def of(self, worker: int, num_workers: int) -> float:
        """The probability that a worker takes a random action.

        Args:
            worker: its number, from 0.
            num_workers: how many there are.
        """
        return float(self.epsilon ** self.exponent(worker, num_workers))

    def exponent(self, worker: int, num_workers: int) -> float:
        """The power of ``epsilon`` that makes a worker's rate: 1 for worker 0, ``1 + alpha`` for the last."""
        return 1 + self.alpha * (worker / (num_workers - 1) if num_workers > 1 else 0.0)


class EpsilonGreedyPlayer(Player):
    """Takes the action of the largest Q-value, or with probability epsilon a random one.

    It records ``taken_value``, the Q-value of the action taken, and ``max_value``, the largest one. Of equal
    values the first counts.

    Args:
        network: maps observations ``[N, *obs]`` to Q-values [N, n]. Its destination is ``"policy"``.
        actions: n.
        observation_shape, observation_dtype: of one observation.
        ladder: how often each worker explores. ``EpsilonLadder(0.0)`` acts greedily, as an evaluation does.

    Source: Ape-X, arXiv 1803.00933; torchrl.modules.EGreedyModule.

    Example:
        >>> greedy = EpsilonLadder(0.0)
        >>> player = EpsilonGreedyPlayer(nn.Identity(), DiscreteActions(2), (2,), ladder=greedy)
        >>> generator = torch.Generator().manual_seed(0)
        >>> values, is_init = torch.tensor([[0.5, 2.0]]), torch.ones(1, dtype=torch.bool)
        >>> acted = player.act(values, is_init, torch.zeros(1), player.begin(1, generator), generator)
        >>> acted.action, acted.records["max_value"]
        (tensor([1]), tensor([2.]))
    """

    def __init__(
        self,
        network: nn.Module,
        actions: DiscreteActions,
        observation_shape: tuple[int, ...],
        observation_dtype: torch.dtype = torch.float32,
        *,
        ladder: EpsilonLadder | None = None,
    ) -> None:
        self.network = network
        self.ladder = EpsilonLadder() if ladder is None else ladder
        self._choices = actions.n
        records = [Record(name, (), torch.float32) for name in (TAKEN_VALUE, MAX_VALUE)]
        super().__init__({POLICY: network}, actions, observation_shape, observation_dtype, records)

    def begin(self, num_envs: int, generator: Generator, worker: int = 0, num_workers: int = 1) -> State:
        return {_EPSILON: torch.full((num_envs,), self.ladder.of(worker, num_workers), device="cpu")}

    def act(
        self, observation: Tensor, is_init: Tensor, reward: Tensor, state: State, generator: Generator
    ) -> Acted:
        values = self.network(observation)
        largest, greedy = values.max(-1)
        # Both are drawn at every step, so that the random numbers do not depend on what was explored.
        device = values.device
        explores = torch.rand(len(values), generator=generator, device=device) < state[_EPSILON]
        random = torch.randint(self._choices, (len(values),), generator=generator, device=device)
        action = torch.where(explores, random, greedy)
        taken = values.gather(-1, action.unsqueeze(-1)).squeeze(-1)
        return Acted(action, {TAKEN_VALUE: taken, MAX_VALUE: largest}, state)
