"""Play whole episodes with any player, in any vector of environments, and say what they returned."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from rlsync.workers.devices import CPU
from rlsync.workers.envs.base import Envs
from rlsync.workers.player import Player, Seat

#: How many environments play at once, at most.
_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class Episode:
    """An episode that was played to its end: the sum of its rewards, not clipped, and its steps.

    Where lost lives end the learner's episodes, it is the whole game.
    """

    total: float
    length: int


@dataclass(frozen=True, slots=True)
class Score:
    """The returns and lengths of some episodes.

    Args:
        episodes: how many were played.
        return_mean, return_std, return_min, return_max: of their returns; the standard deviation is that of
            these episodes (divided by their number), not an estimate for others.
        length_mean: mean number of steps of an episode.

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
    """How many environments can share so many episodes equally; at most eight.

    Example:
        >>> at_once(20), at_once(3), at_once(11)
        (5, 3, 1)
    """
    return max(count for count in range(1, _AT_ONCE + 1) if episodes % count == 0)


@torch.inference_mode()
def play(
    player: Player, envs: Envs, episodes: int, seed: int, device: torch.device = CPU
) -> Iterator[list[Episode]]:
    """Play episodes to their ends. Yields after the reset, and after each step the episodes that ended in it.

    Each environment plays an equal share, so that short episodes are not counted more often.

    Args:
        player: what acts, as worker 0 of 1.
        envs: the environments; all of them play at once.
        episodes: how many; a multiple of ``envs.num_envs``.
        seed: of environments and actions.
        device: where the player acts; its modules are moved there.

    Example:
        >>> from rlsync.recipes.impala import Categorical, GymnasiumEnvs, ImpalaNet, make_venv
        >>> envs = make_venv(GymnasiumEnvs("CartPole-v1"), 2)
        >>> ended = play(ImpalaNet((4,), Categorical(2)).player(), envs, episodes=4, seed=0)
        >>> played = [episode for step in ended for episode in step]
        >>> len(played), all(episode.total == episode.length for episode in played)  # one for each step
        (4, True)
        >>> envs.close()
    """
    count = envs.num_envs
    left = [episodes // count] * count
    total, length = torch.zeros(count, dtype=torch.float64), torch.zeros(count, dtype=torch.int64)
    seat = Seat.taken(player, seed, device)
    state = seat.begin(count)
    observation, is_init, reward = envs.reset(seed), torch.ones(count, dtype=torch.bool), torch.zeros(count)
    yield []
    while any(left):
        acted = seat.act(observation, is_init, reward, state)
        state = acted.state
        envs.send(acted.action)
        answer = envs.recv()
        observation, reward = answer.observation, answer.reward.clone()
        is_init = answer.terminated | answer.truncated
        total += reward
        length += 1
        ended = []
        for env in answer.over.nonzero().flatten().tolist():
            if left[env]:
                left[env] -= 1
                ended.append(Episode(float(total[env]), int(length[env])))
            total[env], length[env] = 0.0, 0
        yield ended
