"""Play whole episodes with any player, in any vector of environments, and score them. Loads no torchrl."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from rlsync.workers.devices import CPU
from rlsync.workers.envs.vectors import Envs
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

    The standard deviation is that of these episodes (divided by their number), not an estimate for others.

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

    @property
    def rank(self) -> float:
        """What versions are ranked by: the mean return less its standard error.

        A version that was lucky in few or widely spread episodes does not replace one that is known to be
        good. With one episode there is no standard error, and the return itself counts.

        Example:
            >>> steady = Score(16, 470.0, 4.0, 460.0, 480.0, 470.0)
            >>> lucky = Score(16, 475.0, 60.0, 300.0, 500.0, 475.0)
            >>> steady.rank > lucky.rank
            True
        """
        if self.episodes < 2:
            return self.return_mean
        return self.return_mean - self.return_std / math.sqrt(self.episodes - 1)

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

    The player acts as worker 0 of 1, and its modules are moved to the device. ``episodes`` is a multiple of
    ``envs.num_envs``: each environment plays an equal share, so that short episodes are not counted more
    often. The seed is that of environments and actions.
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
