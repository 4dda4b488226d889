"""What the workers of recipes act with: a network of the loss, and how it draws and explores.

Each player holds the module that the loss, checkpoints and the sync map name, and calls the plain network in
it: observations in, the parameters of a distribution out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Generator, Tensor, nn

from rlsync.runs.actors.envs.actions import BoxActions
from rlsync.runs.actors.player import Acted, Player, Record, State
from rlsync.runs.recipes.impala.heads import PolicyHead
from rlsync.seams import POLICY

if TYPE_CHECKING:  # workers unpickle players, and need nothing of what probes environments
    from rlsync.runs.recipes.spaces import Spaces

#: Under this name a step has the log-probability of its action; TorchRL's losses read it.
ACTION_LOG_PROB = "action_log_prob"


class HeadPlayer(Player):
    """Draws actions from the distribution that a network describes, and records ``action_log_prob``.

    Args:
        policy: the module with all weights; its destination is ``"policy"``.
        network: the part of it that maps observations ``[N, *obs]`` to parameters ``[N, head.width]``.
        head: what these parameters mean.
        spaces: of the environment: ``player_actions()`` and ``observations``.
        deterministic: take the likeliest action, and record nothing.

    Example:
        >>> from rlsync.runs.recipes.env_settings import EnvConfig
        >>> from rlsync.runs.recipes.impala.heads import Categorical
        >>> from rlsync.runs.recipes.spaces import probe
        >>> network = nn.Linear(4, 2)
        >>> player = HeadPlayer(network, network, Categorical(2), probe(EnvConfig("CartPole-v1")))
        >>> [record.name for record in player.records]
        ['action_log_prob']
    """

    def __init__(
        self,
        policy: nn.Module,
        network: nn.Module,
        head: PolicyHead,
        spaces: Spaces,
        *,
        deterministic: bool = False,
    ) -> None:
        if deterministic:
            records = []
        else:
            records = [Record(ACTION_LOG_PROB, (), torch.float32)]
        super().__init__(
            {POLICY: policy}, spaces.player_actions(), spaces.observations, records=records
        )
        self._network = network
        self._head = head
        self._deterministic = deterministic

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
        parameters = self._network(observation)
        if self._deterministic:
            return Acted(self._head.mode(parameters), {}, state)
        action, log_prob = self._head.act(parameters, generator)
        return Acted(action, {ACTION_LOG_PROB: log_prob}, state)


class BoxPlayer(Player):
    """Chooses numbers between bounds: ``choose(network(observation), generator)`` says where, from -1 to 1.

    Args:
        policy: the module with all weights; its destination is ``"policy"``.
        network: the part of it that sees observations ``[N, *obs]``.
        choose: maps what the network says, and a generator, to ``[N, size]`` from -1 to 1. It must be
            picklable.
        spaces: of the environment, whose actions are numbers between finite bounds.

    Example:
        >>> from rlsync.runs.recipes.env_settings import EnvConfig
        >>> from rlsync.runs.recipes.spaces import BOX
        >>> network = nn.Linear(3, 1)
        >>> player = BoxPlayer(network, network, WithNoise(0.0), BOX.probe(EnvConfig("Pendulum-v1")))
        >>> generator, is_init = torch.Generator(), torch.ones(5, dtype=torch.bool)
        >>> with torch.inference_mode():
        ...     acted = player.act(torch.full((5, 3), 1e6), is_init, torch.zeros(5), {}, generator)
        >>> acted.action.abs()[0]
        tensor([2.0000])
    """

    def __init__(
        self, policy: nn.Module, network: nn.Module, choose: Callable[..., Tensor], spaces: Spaces
    ) -> None:
        actions = spaces.player_actions()
        assert isinstance(actions, BoxActions), "the recipe's probe has refused choices"
        super().__init__({POLICY: policy}, actions, spaces.observations)
        self._network = network
        self._choose = choose
        pairs = list(zip(actions.low, actions.high, strict=True))
        middle = [(low + high) / 2 for low, high in pairs]
        half = [(high - low) / 2 for low, high in pairs]
        # One number where all are alike: no tensor has to be made of it at each step.
        if len({*pairs}) == 1:
            self._bounds = (middle[:1], half[:1])
        else:
            self._bounds = (middle, half)

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
        place = self._choose(self._network(observation), generator)
        middle, half = self._bounds
        if len(half) == 1:
            return Acted(place * half[0] + middle[0], {}, state)
        return Acted(place * place.new_tensor(half) + place.new_tensor(middle), {}, state)


@dataclass(frozen=True, slots=True)
class Squashed:
    """Draws from a normal distribution, squashed by tanh; the network says location and scale, ``[N, size]``.

    Source: Haarnoja et al. 2018, https://arxiv.org/abs/1812.05905, appendix C; torchrl.modules.TanhNormal.

    Example:
        >>> likeliest = Squashed(deterministic=True)
        >>> likeliest((torch.zeros(1, 2), torch.ones(1, 2)), torch.Generator())
        tensor([[0., 0.]])
    """

    deterministic: bool = False  #: take the squashed location

    def __call__(self, parameters: tuple[Tensor, Tensor], generator: Generator) -> Tensor:
        loc, scale = parameters
        if not self.deterministic:
            noise = torch.empty_like(loc).normal_(generator=generator)
            loc = torch.addcmul(loc, noise, scale)
        return _inside(loc.tanh())


@dataclass(frozen=True, slots=True)
class WithNoise:
    """Adds normal noise to what a network says, squashed by tanh.

    Source: Fujimoto et al. 2018, https://arxiv.org/abs/1802.09477; torchrl.modules.TanhModule and
    AdditiveGaussianModule.

    Example:
        >>> WithNoise(0.0)(torch.zeros(1, 2), torch.Generator())
        tensor([[0., 0.]])
    """

    sigma: float  #: standard deviation of the noise, in halves of the range of each number

    def __call__(self, output: Tensor, generator: Generator) -> Tensor:
        place = _inside(output.tanh())
        if not self.sigma:
            return place
        noise = torch.empty_like(place).normal_(generator=generator)
        return torch.add(place, noise, alpha=self.sigma).clamp(-1.0, 1.0)


def _inside(squashed: Tensor) -> Tensor:
    """Numbers of tanh, no nearer to its limits than TorchRL's."""
    most = 1 - torch.finfo(squashed.dtype).resolution
    return squashed.clamp(-most, most)
