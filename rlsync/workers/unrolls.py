"""A slot of the ring as a batch: which arrays it has, and how slots become what the learner reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlsync.core.errors import ConfigError
from rlsync.tensors.layout import Layout, LeafSpec
from rlsync.workers import frames as keys
from rlsync.workers.devices import CPU
from rlsync.workers.player import Player, Record

if TYPE_CHECKING:  # workers lay slots out, and tensordict takes seconds to import
    from tensordict import TensorDict

FINAL_COUNT = "final_count"
EPISODE_RETURN = "episode_return"
EPISODE_LENGTH = "episode_length"
VALUE = "value"

#: Key in a batch of what is not part of the contract.
COLLECTOR = "collector"
MASK = "mask"

_Arrays = dict[str, tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True, slots=True)
class RolloutShape:
    """How much one slot holds.

    Args:
        steps: T.
        num_envs: environments of one worker, N: a slot holds N unrolls.
    """

    steps: int
    num_envs: int

    def layout(self, player: Player) -> Layout:
        """The arrays of one slot.

        There is room for a final observation of every step. It lies last, and pages that are not written to
        cost no memory: only what truncations needed is resident.

        Args:
            player: what acts, and says what it records.

        Raises:
            ConfigError: two arrays have one name.
        """
        leaves = (
            LeafSpec(name, "buffer", shape, dtype) for name, (shape, dtype) in self._arrays(player).items()
        )
        return Layout.build({"rollout": list(leaves)})

    def _arrays(self, player: Player) -> _Arrays:
        steps, envs = (self.steps, self.num_envs), (self.num_envs,)
        seen = (self.steps + 1, self.num_envs)
        observation = player.observation_shape
        arrays: _Arrays = {
            keys.OBSERVATION: ((*seen, *observation), player.observation_dtype),
            keys.IS_INIT: (seen, torch.bool),
            keys.ACTION: ((*steps, *player.actions.shape), player.actions.dtype),
            keys.REWARD: (steps, torch.float32),
            keys.TERMINATED: (steps, torch.bool),
            keys.TRUNCATED: (steps, torch.bool),
            keys.POLICY_VERSION: (steps, torch.int64),
            EPISODE_RETURN: (steps, torch.float32),
            EPISODE_LENGTH: (steps, torch.int64),
            FINAL_COUNT: ((1,), torch.int64),
        }
        most = self.steps * self.num_envs
        last: _Arrays = {
            keys.FINAL_INDEX: ((most, 2), torch.int64),
            keys.FINAL_OBSERVATION: ((most, *observation), player.observation_dtype),
        }
        for record in player.records:
            if record.name in arrays or record.name in (*last, MASK, COLLECTOR):
                raise ConfigError(
                    f"two arrays of a batch are called {record.name!r}",
                    f"{type(player).__name__}.records",
                    "rename the record; rlsync.workers.frames lists the names that are taken",
                )
            lead = steps if record.per == "step" else envs
            arrays[record.name] = (*lead, *record.shape), record.dtype
        return arrays | last


def batch_of(
    rollouts: Sequence[Mapping[str, Tensor]], records: Sequence[Record] = (), device: torch.device = CPU
) -> TensorDict:
    """The batch of some slots; see :mod:`rlsync.workers.frames`.

    Besides the contract it has, under ``"collector"``: ``mask`` [T, B], all true, by which TorchRL's Trainer
    counts frames; ``episode_return`` and ``episode_length`` [T, B] of the episodes that ended with a step, 0
    where none did (of whole games, where lost lives end the learner's episodes); and what the player records
    beside. This part stays in host memory, where it is read.

    Args:
        rollouts: the arrays of each slot. On the CPU, those of a single one are not copied: the batch is the
            slot's own memory.
        records: what the player recorded.
        device: of what the learner reads. Copies to an accelerator are put into its current stream and may go
            on after the call: do not write to the slots before they are done.
    """
    from tensordict import TensorDict

    per_unroll = {record.name for record in records if record.per == "unroll"}
    aside = {EPISODE_RETURN, EPISODE_LENGTH} | {record.name for record in records if record.beside}
    batch: dict[str, Tensor] = {}
    beside: dict[str, Tensor] = {}
    for name in rollouts[0]:
        if name not in (*keys.FINAL, FINAL_COUNT):
            part, where = (beside, CPU) if name in aside else (batch, device)
            along = 0 if name in per_unroll else 1
            part[name] = _joined([rollout[name] for rollout in rollouts], where, along)
    batch |= _finals(rollouts, device)
    beside[MASK] = torch.ones(batch[keys.REWARD].shape, dtype=torch.bool)
    return TensorDict({**batch, COLLECTOR: TensorDict(beside)})


def _joined(parts: Sequence[Tensor], device: torch.device, along: int = 0) -> Tensor:
    """Parts from host memory as one tensor; a single one on the CPU is not copied."""
    there = [part.to(device, non_blocking=True) for part in parts]
    return there[0] if len(there) == 1 else torch.cat(there, along)


def _finals(rollouts: Sequence[Mapping[str, Tensor]], device: torch.device) -> dict[str, Tensor]:
    counts = [int(rollout[FINAL_COUNT]) for rollout in rollouts]
    if not sum(counts):
        return {}
    pairs = list(zip(rollouts, counts, strict=True))
    observations = [rollout[keys.FINAL_OBSERVATION][:count] for rollout, count in pairs]
    envs = rollouts[0][keys.REWARD].shape[1]
    indices = [rollout[keys.FINAL_INDEX][:count] for rollout, count in pairs]
    shifted = [index + index.new_tensor([0, envs * place]) for place, index in enumerate(indices)]
    return {keys.FINAL_OBSERVATION: _joined(observations, device), keys.FINAL_INDEX: _joined(shifted, device)}
