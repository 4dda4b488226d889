"""Episodes played for what they return: by any policy, in any vector of environments."""

from __future__ import annotations

import statistics
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torchrl.envs.utils import ExplorationType, set_exploration_type

from rlsync.recipes.impala.env_base import Envs
from rlsync.recipes.impala.models import ImpalaNet

#: Environments that play at once, at most.
_AT_ONCE = 8


class Actor(ABC):
    """What chooses actions in N environments, step after step.

    Example:
        >>> from rlsync.recipes.impala import Categorical
        >>> actor: Actor = NetworkActor(ImpalaNet((4,), Categorical(2)), deterministic=True)
        >>> actor.begin(3, seed=0)
        >>> actor.act(torch.zeros(3, 4), torch.ones(3, dtype=torch.bool), torch.zeros(3)).shape
        torch.Size([3])
    """

    @abstractmethod
    def begin(self, num_envs: int, seed: int) -> None:
        """Forget what was seen.

        Args:
            num_envs: N.
            seed: of what is drawn from now on.
        """

    @abstractmethod
    def act(self, observation: Tensor, is_init: Tensor, reward: Tensor) -> Tensor:
        """The next action of every environment, [N, *action], as :meth:`Envs.send` takes it.

        Args:
            observation: [N, *obs].
            is_init: [N] bool, whether it is the first of an episode.
            reward: [N], of the action before.
        """


class NetworkActor(Actor):
    """Acts with the network of an actor-learner, and keeps its recurrent state.

    Args:
        network: what acts, as it is at each step.
        deterministic: take the likeliest action; else draw one.
    """

    def __init__(self, network: ImpalaNet, *, deterministic: bool = False) -> None:
        self._network = network
        self._deterministic = deterministic
        self._generator = torch.Generator()
        self._state = self._action = torch.empty(0)

    def begin(self, num_envs: int, seed: int) -> None:
        head = self._network.head
        self._generator.manual_seed(seed)
        self._state = self._network.initial_state(num_envs)
        self._action = torch.zeros(num_envs, *head.action_shape, dtype=head.action_dtype)

    def act(self, observation: Tensor, is_init: Tensor, reward: Tensor) -> Tensor:
        head = self._network.head
        params, _, self._state = self._network.step(observation, is_init, self._state, self._action, reward)
        self._action = head.mode(params) if self._deterministic else head.act(params, self._generator)[0]
        return self._action


class PolicyActor(Actor):
    """Acts with a TorchRL policy that reads ``observation`` and writes a one-hot ``action``.

    It draws from torch's own random numbers, which :meth:`begin` seeds.

    Args:
        policy: what acts.
        deterministic: take the likeliest action; else draw one, if the policy draws at all.
    """

    def __init__(self, policy: TensorDictModuleBase, *, deterministic: bool = False) -> None:
        self._policy = policy
        self._exploration = ExplorationType.DETERMINISTIC if deterministic else ExplorationType.RANDOM

    def begin(self, num_envs: int, seed: int) -> None:
        torch.manual_seed(seed)

    def act(self, observation: Tensor, is_init: Tensor, reward: Tensor) -> Tensor:
        seen = TensorDict({"observation": observation}, [len(observation)])
        with set_exploration_type(self._exploration):
            action: Tensor = self._policy(seen).get("action")
        return action.to(torch.int64).argmax(-1)


@dataclass(frozen=True, slots=True)
class Episode:
    """One that was played to its end: the sum of its rewards, not clipped, and its steps."""

    total: float
    length: int


@dataclass(frozen=True, slots=True)
class Score:
    """What a policy is worth.

    Args:
        episodes: how many were played.
        return_mean, return_std, return_min, return_max: of their returns; the deviation is theirs, not an
            estimate for others.
        length_mean: steps of an episode.

    Example:
        >>> print(Score.of([Episode(3.0, 10), Episode(5.0, 20)]))
        return 4.0 ± 1.0 (3.0 to 5.0)  length 15.0
    """

    episodes: int
    return_mean: float
    return_std: float
    return_min: float
    return_max: float
    length_mean: float

    @classmethod
    def of(cls, played: Sequence[Episode]) -> Score:
        """The score of one episode or more."""
        returns = [episode.total for episode in played]
        return cls(
            len(played),
            statistics.fmean(returns),
            statistics.pstdev(returns),
            min(returns),
            max(returns),
            statistics.fmean(episode.length for episode in played),
        )

    def __str__(self) -> str:
        return (
            f"return {self.return_mean:.1f} ± {self.return_std:.1f} "
            f"({self.return_min:.1f} to {self.return_max:.1f})  length {self.length_mean:.1f}"
        )


def at_once(episodes: int) -> int:
    """How many environments share so many episodes equally; at most eight.

    Example:
        >>> at_once(20), at_once(3), at_once(11)
        (5, 3, 1)
    """
    return max(count for count in range(1, _AT_ONCE + 1) if episodes % count == 0)


@torch.inference_mode()
def play(actor: Actor, envs: Envs, episodes: int, seed: int) -> Iterator[list[Episode]]:
    """Play episodes to their ends; after the reset and after each step yield those that ended in it.

    Each environment plays an equal share, so that short episodes are not counted more often.

    Args:
        actor: what acts.
        envs: where; as many play at once.
        episodes: how many; a multiple of ``envs.num_envs``.
        seed: of environments and actions.

    Example:
        >>> from rlsync.recipes.impala import Categorical, GymnasiumEnvs, make_venv
        >>> envs = make_venv(GymnasiumEnvs("CartPole-v1"), 2)
        >>> ended = play(NetworkActor(ImpalaNet((4,), Categorical(2))), envs, episodes=4, seed=0)
        >>> played = [episode for step in ended for episode in step]
        >>> len(played), all(episode.total == episode.length for episode in played)  # one for each step
        (4, True)
        >>> envs.close()
    """
    count = envs.num_envs
    left = [episodes // count] * count
    total, length = torch.zeros(count, dtype=torch.float64), torch.zeros(count, dtype=torch.int64)
    actor.begin(count, seed)
    observation, is_init, reward = envs.reset(seed), torch.ones(count, dtype=torch.bool), torch.zeros(count)
    yield []
    while any(left):
        envs.send(actor.act(observation, is_init, reward))
        answer = envs.recv()
        observation, reward = answer.observation, answer.reward.clone()
        is_init = answer.terminated | answer.truncated
        total += reward
        length += 1
        ended = []
        for env in is_init.nonzero().flatten().tolist():
            if left[env]:
                left[env] -= 1
                ended.append(Episode(float(total[env]), int(length[env])))
            total[env], length[env] = 0.0, 0
        yield ended
