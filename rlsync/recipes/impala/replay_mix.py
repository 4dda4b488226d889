"""Online unrolls with replayed ones, at a fixed ratio, for one agent or for several that share a replay."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from rlsync.core.errors import ConfigError
from rlsync.recipes.impala import batch as keys
from rlsync.recipes.impala.batch import concatenate
from rlsync.recipes.impala.replay import Drawn, UnrollReplay


@dataclass(frozen=True, slots=True)
class MixCounts:
    """How many unrolls of each kind were given out.

    Args:
        online: new ones.
        own: replayed ones, of this agent.
        foreign: replayed ones, of others.

    Example:
        >>> MixCounts(online=8, own=4, foreign=4).own_fraction
        0.75
    """

    online: int = 0
    own: int = 0
    foreign: int = 0

    @property
    def replayed(self) -> int:
        """The agent's own and the others'."""
        return self.own + self.foreign

    @property
    def own_fraction(self) -> float:
        """How much is the agent's own experience, online or replayed; 0 of nothing."""
        return (self.online + self.own) / max(self.online + self.replayed, 1)

    def __add__(self, other: MixCounts) -> MixCounts:
        return MixCounts(self.online + other.online, self.own + other.own, self.foreign + other.foreign)


class ReplayMix:
    """Adds replayed unrolls to each online batch, then holds the online ones for later.

    After n online unrolls, counted from the first batch that met ``min_steps`` in the replay (or a full one),
    exactly ``floor(n * replay_ratio)`` were replayed: a ratio of 0.5 gives one to every second. What a batch
    brings is drawn from the next one on. Until the minimum is there, batches come back with nothing added.

    Agents share experience when their mixes have one replay, and numbers of their own::

        replay = UnrollReplay(1_000_000)
        mixes = [ReplayMix(replay, replay_ratio=7, agent=number) for number in range(len(agents))]

    Each has its own network, optimizer, loss and ratio; each draws from the unrolls of all. Environments,
    the length of unrolls and the keys must agree.

    Args:
        replay: where unrolls are held.
        replay_ratio: replayed unrolls for each online one, zero or more.
        min_steps: how many steps the replay must hold before it is drawn from.
        agent: the number of the agent.
        foreign_state: what becomes of the recurrent state of other agents' unrolls: ``"zero"``, because
            another network made it; or ``"keep"``, for agents whose networks hardly differ.

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
        replay: UnrollReplay,
        replay_ratio: float,
        *,
        min_steps: int = 1,
        agent: int = 0,
        foreign_state: str = "zero",
    ) -> None:
        if not 0 <= replay_ratio < math.inf:
            raise ConfigError(
                f"the replay ratio cannot be {replay_ratio!r}", "replay_ratio", "give zero or more"
            )
        if foreign_state not in ("zero", "keep"):
            raise ConfigError(
                f"foreign_state cannot be {foreign_state!r}", "foreign_state", "give 'zero' or 'keep'"
            )
        if not 1 <= min_steps <= replay.capacity_steps:
            raise ConfigError(
                f"a replay of {replay.capacity_steps} steps never holds {min_steps}",
                "min_steps",
                "give a number from 1 to the capacity",
            )
        self.replay = replay
        self.agent = agent
        self.min_steps = min_steps
        self.foreign_state = foreign_state
        self.last = MixCounts()
        self.total = MixCounts()
        # As it was written: 0.1 is a tenth, not the nearest binary fraction.
        self._ratio = Fraction(str(replay_ratio))
        self._online = 0  # since the minimum was there
        self._replayed = 0

    def __call__(self, online: TensorDictBase) -> TensorDict:
        """A batch of the online unrolls and, behind them, replayed ones; on the device of the online ones.

        Args:
            online: as :mod:`rlsync.recipes.impala.batch` says, from this agent's workers.
        """
        unrolls, device = online.get(keys.REWARD).shape[1], online.get(keys.REWARD).device
        marked = TensorDict(dict(online.items()))
        marked.set(keys.REPLAYED, torch.zeros(unrolls, dtype=torch.bool, device=device))
        drawn = self._draw(unrolls)
        self.replay.extend(online, self.agent)
        own = 0 if drawn is None else int((drawn.agent == self.agent).sum())
        self.last = MixCounts(unrolls, own, 0 if drawn is None else len(drawn.agent) - own)
        self.total = self.total + self.last
        return marked if drawn is None else concatenate([marked, drawn.batch.to(device)])

    def state_dict(self) -> dict[str, Any]:
        """Where the ratio stands; the replay is saved on its own, as several mixes may share it."""
        total = self.total
        return {
            "online": self._online,
            "replayed": self._replayed,
            "total": (total.online, total.own, total.foreign),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on at the ratio.

        Args:
            state_dict: what :meth:`state_dict` returned.
        """
        self._online, self._replayed = state_dict["online"], state_dict["replayed"]
        self.total = MixCounts(*state_dict["total"])

    def _draw(self, unrolls: int) -> Drawn | None:
        if self.replay.steps < self.min_steps and not self.replay.full:
            return None
        self._online += unrolls
        owed = math.floor(self._online * self._ratio) - self._replayed
        if not owed:
            return None
        self._replayed += owed
        drawn = self.replay.draw(owed)
        if self.foreign_state == "zero" and keys.RECURRENT_STATE in drawn.batch:
            drawn.batch.get(keys.RECURRENT_STATE)[drawn.agent != self.agent] = 0
        return drawn
