"""Mixes online and replayed unrolls at a fixed ratio, for one agent or several that share a replay."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from rlsync import ConfigError
from rlsync.runs.actors import frames as keys
from rlsync.runs.actors.frames import concatenate
from rlsync.runs.actors.replay.shared import SharedReplay
from rlsync.runs.actors.replay.unrolls import Drawn, UnrollReplay


@dataclass(frozen=True, slots=True)
class MixCounts:
    """How many unrolls of each kind were in the batches.

    Example:
        >>> MixCounts(online=8, own=4, foreign=3).replayed
        7
    """

    online: int = 0  #: new ones
    own: int = 0  #: replayed ones that this agent made
    foreign: int = 0  #: replayed ones that other agents made

    @property
    def replayed(self) -> int:
        """All replayed ones."""
        return self.own + self.foreign

    def __add__(self, other: MixCounts) -> MixCounts:
        return MixCounts(
            self.online + other.online, self.own + other.own, self.foreign + other.foreign
        )


class ReplayMix:
    """Adds replayed unrolls to each online batch, then puts the online ones into the replay.

    Counting starts with the first batch for which the replay holds ``min_steps`` (or is full). After n online
    unrolls exactly ``floor(n * replay_ratio)`` were replayed: a ratio of 0.5 adds one to every second. An
    unroll can be drawn from the next batch on. Until the minimum is reached, nothing is added.

    Agents share experience when their mixes have one replay, and numbers of their own::

        replay = UnrollReplay(1_000_000)
        mixes = [ReplayMix(replay, replay_ratio=7, agent=number) for number in range(len(agents))]

    Each agent has its own network, optimizer, loss and ratio, and draws from the unrolls of all agents. The
    recurrent state of another agent's unroll, which another network made, is zeroed, and ``policy_version``,
    which counts another learner's publishes, is -1 (unknown).
    Environments, the length of unrolls and the keys must be the same.

    Args:
        replay: where unrolls are held.
        replay_ratio: replayed unrolls for each online one, zero or more.
        min_steps: how many steps the replay must hold before it is drawn from.
        agent: the number of the agent.

    Raises:
        ConfigError: an option is out of its range, or a batch does not fit the replay.

    Source: LASER, arXiv 1909.11583.

    Example:
        >>> no = torch.zeros(5, 2, dtype=torch.bool)
        >>> online = TensorDict({
        ...     "observation": torch.randn(6, 2, 4), "is_init": torch.zeros(6, 2, dtype=torch.bool),
        ...     "action": torch.zeros(5, 2, dtype=torch.int64), "reward": torch.ones(5, 2),
        ...     "behaviour_log_prob": torch.zeros(5, 2), "terminated": no, "truncated": no,
        ... })
        >>> mix = ReplayMix(UnrollReplay(1000), replay_ratio=1.5)
        >>> mix(online)["replayed"]
        tensor([False, False])
        >>> mix(online)["replayed"]
        tensor([False, False,  True,  True,  True])
    """

    def __init__(
        self,
        replay: UnrollReplay | SharedReplay,
        replay_ratio: float,
        *,
        min_steps: int = 1,
        agent: int = 0,
    ) -> None:
        if not 0 <= replay_ratio < math.inf:
            problem = f"the replay ratio cannot be {replay_ratio!r}"
            raise ConfigError(problem, "replay_ratio", "give zero or more")
        if not 1 <= min_steps <= replay.capacity_steps:
            problem = f"a replay of {replay.capacity_steps} steps never holds {min_steps}"
            raise ConfigError(problem, "min_steps", "give a number from 1 to the capacity")
        self.replay = replay
        self.agent = agent
        self.min_steps = min_steps
        self.last = MixCounts()
        self.total = MixCounts()
        #: unrolls that were learned from, by the agent that made them
        self.taught: Counter[int] = Counter()
        # Exactly as it is written: 0.1 is a tenth, not the nearest binary fraction.
        self._ratio = Fraction(str(replay_ratio))
        self._online = 0  # since the replay held min_steps
        self._replayed = 0

    def __call__(self, online: TensorDictBase) -> TensorDict:
        """Append replayed unrolls to a batch, on its device; and put the online ones into the replay.

        Args:
            online: as :mod:`rlsync.runs.actors.frames` says, from this agent's workers.
        """
        unrolls = online.get(keys.REWARD).shape[1]
        device = online.get(keys.REWARD).device
        marked = TensorDict(dict(online.items()))
        marked.set(keys.REPLAYED, torch.zeros(unrolls, dtype=torch.bool, device=device))
        drawn = self._draw(unrolls)
        self.replay.extend(online, self.agent)
        self.taught[self.agent] += unrolls
        if drawn is None:
            self.last = MixCounts(unrolls)
            self.total = self.total + self.last
            return marked
        by_me = int((drawn.agent == self.agent).sum())
        self.last = MixCounts(unrolls, own=by_me, foreign=len(drawn.agent) - by_me)
        self.total = self.total + self.last
        self.taught.update(drawn.agent.tolist())
        return concatenate([marked, drawn.batch.to(device)], self.replay.records)

    def state_dict(self) -> dict[str, Any]:
        """The counts of the ratio. The replay is saved by itself, because several mixes may share it."""
        total = self.total
        return {
            "online": self._online,
            "replayed": self._replayed,
            "total": (total.online, total.own, total.foreign),
            "taught": list(self.taught.items()),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Set the counts of the ratio.

        Args:
            state_dict: what :meth:`state_dict` returned.
        """
        self._online = state_dict["online"]
        self._replayed = state_dict["replayed"]
        self.total = MixCounts(*state_dict["total"])
        # of runs before it was counted: none
        self.taught = Counter(dict(state_dict.get("taught", ())))

    def _draw(self, unrolls: int) -> Drawn | None:
        if self.replay.steps < self.min_steps and not self.replay.full:
            return None
        self._online += unrolls
        owed = math.floor(self._online * self._ratio) - self._replayed
        if not owed:
            return None
        self._replayed += owed
        drawn = self.replay.draw(owed)
        foreign = drawn.agent != self.agent
        if keys.RECURRENT_STATE in drawn.batch:
            drawn.batch.get(keys.RECURRENT_STATE)[foreign] = 0
        if keys.POLICY_VERSION in drawn.batch:
            drawn.batch.get(keys.POLICY_VERSION)[:, foreign] = -1
        return drawn
