"""One slot of the ring as a rollout writes to it: step by step, for each group of environments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rlsync.workers import frames as keys
from rlsync.workers.player import Player
from rlsync.workers.unrolls import EPISODE_LENGTH, EPISODE_RETURN, FINAL_COUNT

_TIMED = (
    keys.OBSERVATION,
    keys.IS_INIT,
    keys.ACTION,
    keys.REWARD,
    keys.TERMINATED,
    keys.TRUNCATED,
    EPISODE_RETURN,
    EPISODE_LENGTH,
)


@dataclass
class Slot:
    """The arrays of a slot, cut once for each group, one view a step: a step itself cuts nothing.

    Args:
        whole: the arrays.
        timed: by group and name, the group's part of each step.
        per_unroll: by group and name, the group's part of what an unroll has once.
    """

    whole: Mapping[str, Tensor]
    timed: list[dict[str, tuple[Tensor, ...]]] = field(default_factory=list)
    per_unroll: list[dict[str, Tensor]] = field(default_factory=list)

    @classmethod
    def cut(cls, views: Mapping[str, Tensor], groups: Sequence[range], player: Player) -> Slot:
        """Cut the arrays of a slot.

        Args:
            views: the arrays.
            groups: the columns of each group of environments.
            player: says which arrays it records.
        """
        slot = cls(views)
        timed = (*_TIMED, *(record.name for record in player.records if record.per == "step"))
        once = [record.name for record in player.records if record.per == "unroll"]
        for group in groups:
            part = slice(group.start, group.stop)
            slot.timed.append({name: views[name][:, part].unbind(0) for name in timed})
            slot.per_unroll.append({name: views[name][part] for name in once})
        return slot

    def add_final(self, step: int, env: int, observation: Tensor) -> None:
        """Keep the last observation of a truncated episode.

        Args:
            step: the truncated step.
            env: the column of the environment.
            observation: which is copied.
        """
        count = int(self.whole[FINAL_COUNT])
        self.whole[keys.FINAL_OBSERVATION][count].copy_(observation)
        self.whole[keys.FINAL_INDEX][count].copy_(torch.tensor([step, env]))
        self.whole[FINAL_COUNT].fill_(count + 1)
