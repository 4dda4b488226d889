"""A player with a Q-network: greedy, but for random actions that each worker takes at a rate of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Generator, Tensor, nn

from rlsync import ConfigError
from rlsync.runs.actors.envs.actions import DiscreteActions
from rlsync.runs.actors.envs.observations import Observations
from rlsync.runs.actors.player import Acted, Player, Record, State
from rlsync.seams import POLICY

#: Records of each step: the Q-value of the action taken, and the largest one. An initial priority needs both.
TAKEN_VALUE = "taken_value"
MAX_VALUE = "max_value"
_EXPONENT = "exponent"


class HasRate(Protocol):
    """A module with the exploration rate as its buffer, such as torchrl.modules.EGreedyModule."""

    eps: Tensor


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
            problem = f"no ladder has epsilon {self.epsilon:g} and alpha {self.alpha:g}"
            raise ConfigError(
                problem, "EpsilonLadder", "give an epsilon from 0 to 1, and an alpha of 0 or more"
            )

    def of(self, worker: int, num_workers: int) -> float:
        """The probability that a worker takes a random action.

        Args:
            worker: its number, from 0.
            num_workers: how many there are.
        """
        return float(self.epsilon ** self.exponent(worker, num_workers))

    def exponent(self, worker: int, num_workers: int) -> float:
        """The power of ``epsilon`` that makes a worker's rate: 1 for worker 0, ``1 + alpha`` for the last."""
        if num_workers <= 1:
            return 1.0
        return 1 + self.alpha * (worker / (num_workers - 1))


class EpsilonGreedyPlayer(Player):
    """Takes the action of the largest Q-value, or with probability epsilon a random one.

    Of equal values the first counts.

    Args:
        network: maps observations ``[N, *obs]`` to Q-values [N, n].
        actions: n.
        observation_shape, observation_dtype: of one observation; or what its rows are made of. A random action
            is then one that their mask allows.
        ladder: how often each worker explores. ``EpsilonLadder(0.0)`` acts greedily, as an evaluation does.
        policy: the module with all weights, whose destination is ``"policy"``; by default the network.
        rate: the part of the policy that has the exploration rate, in place of the ladder's ``epsilon``: so
            a publish brings both.
        record_values: record ``taken_value``, the Q-value of the action taken, and ``max_value``, the largest
            one.

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
        observation_shape: tuple[int, ...] | Observations,
        observation_dtype: torch.dtype = torch.float32,
        *,
        ladder: EpsilonLadder | None = None,
        policy: nn.Module | None = None,
        rate: HasRate | None = None,
        record_values: bool = True,
    ) -> None:
        self.network = network
        self.ladder = ladder or EpsilonLadder()
        self._rate = rate
        self._greedy = rate is None and not self.ladder.epsilon
        self._actions = actions
        if policy is None:
            policy = network
        records: list[Record] = []
        if record_values:
            records.append(Record(TAKEN_VALUE, (), torch.float32))
            records.append(Record(MAX_VALUE, (), torch.float32))
        super().__init__({POLICY: policy}, actions, observation_shape, observation_dtype, records)

    def begin(
        self, num_envs: int, generator: Generator, worker: int = 0, num_workers: int = 1
    ) -> State:
        if self._greedy:
            return {}
        exponent = self.ladder.exponent(worker, num_workers)
        return {_EXPONENT: torch.full((num_envs,), exponent, device="cpu")}

    def act(
        self,
        observation: Tensor,
        is_init: Tensor,
        reward: Tensor,
        state: State,
        generator: Generator,
    ) -> Acted:
        values = self.network(observation)
        largest, greedy = values.max(-1)
        if self._greedy:
            action = greedy
        else:
            action = self._explored(observation, greedy, state, generator)
        if not self.records:
            return Acted(action, {}, state)
        taken_value = values.gather(-1, action.unsqueeze(-1)).squeeze(-1)
        return Acted(action, {TAKEN_VALUE: taken_value, MAX_VALUE: largest}, state)

    def by_weights(self) -> Player:
        """A greedy player of the same modules, which records values.

        They tell weights apart, where random actions do not.
        """
        if self._greedy and self.records:
            return self
        return EpsilonGreedyPlayer(
            self.network,
            self._actions,
            self._observations or self.observation_shape,
            self.observation_dtype,
            ladder=EpsilonLadder(0.0),
            policy=self.modules[POLICY],
        )

    def _explored(
        self, observation: Tensor, greedy: Tensor, state: State, generator: Generator
    ) -> Tensor:
        """Random actions in place of some greedy ones."""
        # Both are drawn at every step, so that the random numbers do not depend on what was explored.
        epsilon: float | Tensor = self.ladder.epsilon
        if self._rate is not None:
            epsilon = self._rate.eps
        draws = torch.rand(len(greedy), generator=generator, device=greedy.device)
        explores = draws < epsilon ** state[_EXPONENT]
        allowed = self.allowed(observation)
        random = self._actions.drawn(len(greedy), generator, greedy.device, allowed)
        return torch.where(explores, random, greedy)
