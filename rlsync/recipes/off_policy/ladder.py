"""A ladder of exploration rates over the workers of a Q network.

Each worker's environments say how steep its rung is, and the epsilon-greedy module that all share reads it.
So one published rate is a different one for each worker, whichever collector runs them.

Source: Ape-X, arXiv 1803.00933.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from tensordict import TensorDictBase
from tensordict.utils import expand_as_right
from torchrl.data import Unbounded
from torchrl.envs import EnvBase, TensorDictPrimer
from torchrl.envs.utils import ExplorationType, exploration_type
from torchrl.modules import EGreedyModule

from rlsync.recipes.env_settings import EnvConfig
from rlsync.recipes.spaces import make_env
from rlsync.workers.players.q import EpsilonLadder
from rlsync.workers.players.torchrl_policy import EXPONENT


class GreedyOnLadder(EGreedyModule):
    """Takes a random action with probability ``eps ** exploration_exponent``, else leaves it alone."""

    def __init__(self, *, spec: object, eps_init: float, eps_end: float, annealing_num_steps: int) -> None:
        super().__init__(
            spec=spec, eps_init=eps_init, eps_end=eps_end, annealing_num_steps=annealing_num_steps
        )
        self.in_keys = [self.action_key, EXPONENT]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Explore, unless the exploration type says not to."""
        if exploration_type() not in (ExplorationType.RANDOM, None):
            return tensordict
        action = tensordict.get(self.action_key)
        rate = self.eps ** tensordict.get(EXPONENT).squeeze(-1)
        explores = torch.rand(rate.shape, device=rate.device) < rate
        random = self.spec[self.action_key].expand(action.shape).rand().to(action.device)
        return tensordict.set(self.action_key, torch.where(expand_as_right(explores, action), random, action))


def make_env_on_rung(config: EnvConfig, exponent: float) -> EnvBase:
    """The environments of one worker, which add ``exploration_exponent`` to each observation."""
    env = make_env(config)
    said = TensorDictPrimer(primers={EXPONENT: Unbounded((1,))}, default_value=exponent, expand_specs=True)
    return env.append_transform(said)


def env_makers(config: EnvConfig, alpha: float, num_workers: int) -> list[Callable[[], EnvBase]]:
    """What makes the environments of each worker.

    Args:
        config: the environment.
        alpha: see :class:`~rlsync.workers.players.q.EpsilonLadder`.
        num_workers: how many there are.
    """
    ladder = EpsilonLadder(alpha=alpha)
    return [
        partial(make_env_on_rung, config, ladder.exponent(worker, num_workers))
        for worker in range(num_workers)
    ]
