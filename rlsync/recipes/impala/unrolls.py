"""A slot of the ring as a batch: which arrays it has, and how slots become what the learner reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from tensordict import TensorDict
from torch import Tensor

from rlsync.recipes.impala import batch as keys
from rlsync.recipes.impala.models import ImpalaNet
from rlsync.tensors.layout import Layout, LeafSpec

FINAL_COUNT = "final_count"
EPISODE_RETURN = "episode_return"
EPISODE_LENGTH = "episode_length"
VALUE = "value"

#: What is not part of the contract; it lies under this key of a batch.
COLLECTOR = "collector"
MASK = "mask"
_BESIDE = (EPISODE_RETURN, EPISODE_LENGTH, VALUE)


@dataclass(frozen=True, slots=True)
class RolloutShape:
    """What workers write.

    Args:
        steps: T.
        num_envs: of one worker, N: a slot holds N unrolls.
        store_params: the outputs of the behaviour policy, too; a trust region reads them.
        store_value: the value that the behaviour policy's network gave, too.
    """

    steps: int
    num_envs: int
    store_params: bool = False
    store_value: bool = False

    def layout(self, network: ImpalaNet) -> Layout:
        """The arrays of one slot.

        There is room for a final observation of every step. It lies last, and untouched pages of it cost
        nothing: what is in memory is what truncations needed.
        """
        leaves = (
            LeafSpec(name, "buffer", shape, dtype) for name, (shape, dtype) in self._arrays(network).items()
        )
        return Layout.build({"rollout": list(leaves)})

    def _arrays(self, network: ImpalaNet) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        steps, envs, head = (self.steps, self.num_envs), (self.num_envs,), network.head
        seen, observation = (self.steps + 1, self.num_envs), network.observation_shape
        arrays: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            keys.OBSERVATION: ((*seen, *observation), observation_dtype(network)),
            keys.IS_INIT: (seen, torch.bool),
            keys.ACTION: ((*steps, *head.action_shape), head.action_dtype),
            keys.REWARD: (steps, torch.float32),
            keys.TERMINATED: (steps, torch.bool),
            keys.TRUNCATED: (steps, torch.bool),
            keys.BEHAVIOUR_LOG_PROB: (steps, torch.float32),
            keys.POLICY_VERSION: (steps, torch.int64),
            EPISODE_RETURN: (steps, torch.float32),
            EPISODE_LENGTH: (steps, torch.int64),
            FINAL_COUNT: ((1,), torch.int64),
        }
        if self.store_params:
            arrays[keys.BEHAVIOUR_PARAMS] = (*steps, head.width), torch.float32
        if self.store_value:
            arrays[VALUE] = steps, torch.float32
        if network.lstm is not None:
            arrays[keys.RECURRENT_STATE] = (*envs, *network.state_shape), torch.float32
        if network.takes_last_action:
            arrays[keys.LAST_ACTION] = (*envs, *head.action_shape), head.action_dtype
        if network.takes_last_reward:
            arrays[keys.LAST_REWARD] = envs, torch.float32
        most = self.steps * self.num_envs
        arrays[keys.FINAL_INDEX] = (most, 2), torch.int64
        arrays[keys.FINAL_OBSERVATION] = (most, *observation), observation_dtype(network)
        return arrays


def observation_dtype(network: ImpalaNet) -> torch.dtype:
    """How observations are stored: pixels as uint8, vectors as float32."""
    return torch.uint8 if len(network.observation_shape) == 3 else torch.float32


def batch_of(rollouts: Sequence[Mapping[str, Tensor]]) -> TensorDict:
    """The batch of some slots; see :mod:`rlsync.recipes.impala.batch`.

    Beside the contract it has, under ``"collector"``: ``mask`` [T, B], all true, by which TorchRL's Trainer
    counts frames; ``episode_return`` and ``episode_length`` [T, B] of the episodes that ended with a step,
    0 where none did; and ``value`` [T, B] where it was asked for.

    Args:
        rollouts: the arrays of each slot. Those of a single one are not copied: the batch is the slot's own
            memory.
    """
    parts = list(_gathered(rollouts))
    batch, beside = dict(parts), {}
    for name in _BESIDE:
        if name in batch:
            beside[name] = batch.pop(name)
    beside[MASK] = torch.ones_like(batch[keys.REWARD], dtype=torch.bool)
    return TensorDict({**batch, COLLECTOR: TensorDict(beside)})


def _gathered(rollouts: Sequence[Mapping[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    for name in rollouts[0]:
        if name in (*keys.FINAL, FINAL_COUNT):
            continue
        parts = [rollout[name] for rollout in rollouts]
        if len(parts) == 1:
            yield name, parts[0]
        else:
            yield name, torch.cat(parts, 0 if name in keys.PER_UNROLL else 1)
    counts = [int(rollout[FINAL_COUNT]) for rollout in rollouts]
    if sum(counts):
        pairs = list(zip(rollouts, counts, strict=True))
        observations = [rollout[keys.FINAL_OBSERVATION][:count] for rollout, count in pairs]
        yield keys.FINAL_OBSERVATION, observations[0] if len(pairs) == 1 else torch.cat(observations)
        envs = rollouts[0][keys.REWARD].shape[1]
        indices = [rollout[keys.FINAL_INDEX][:count] for rollout, count in pairs]
        shifted = [index + index.new_tensor([0, envs * place]) for place, index in enumerate(indices)]
        yield keys.FINAL_INDEX, torch.cat(shifted)
