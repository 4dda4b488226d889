"""One rollout: environments and network in turn, straight into a slot."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Generator, Tensor

from rlsync.recipes.impala import batch as keys
from rlsync.recipes.impala.env_base import Envs
from rlsync.recipes.impala.models import ImpalaNet
from rlsync.recipes.impala.unrolls import (
    EPISODE_LENGTH,
    EPISODE_RETURN,
    FINAL_COUNT,
    VALUE,
    RolloutShape,
    observation_dtype,
)

_TIMED = (*keys.TIMED, EPISODE_RETURN, EPISODE_LENGTH, VALUE)


@dataclass
class Slot:
    """The arrays of a slot, cut once for each group: one view a step, so that a step cuts nothing.

    Args:
        whole: the arrays.
        timed: by group and name, the group's part of each step.
        per_unroll: by group and name, the group's part of what an unroll has once.
    """

    whole: Mapping[str, Tensor]
    timed: list[dict[str, tuple[Tensor, ...]]] = field(default_factory=list)
    per_unroll: list[dict[str, Tensor]] = field(default_factory=list)

    @classmethod
    def cut(cls, views: Mapping[str, Tensor], groups: Sequence[range]) -> Slot:
        """For groups of columns."""
        slot = cls(views)
        for group in groups:
            part = slice(group.start, group.stop)
            timed = {name: views[name][:, part].unbind(0) for name in _TIMED if name in views}
            once = {name: views[name][part] for name in keys.PER_UNROLL if name in views}
            slot.timed.append(timed)
            slot.per_unroll.append(once)
        return slot

    def add_final(self, step: int, env: int, observation: Tensor) -> None:
        """Keep an observation that a truncation hid."""
        count = int(self.whole[FINAL_COUNT])
        self.whole[keys.FINAL_OBSERVATION][count].copy_(observation)
        self.whole[keys.FINAL_INDEX][count].copy_(torch.tensor([step, env]))
        self.whole[FINAL_COUNT].fill_(count + 1)


class Group:
    """Environments that step together, and what the network knows of them between steps.

    Args:
        envs: they.
        network: what acts.
        shape: what is written.
        number: of this group.
        first: its first column.
        generator: draws the actions.
    """

    def __init__(
        self,
        envs: Envs,
        network: ImpalaNet,
        shape: RolloutShape,
        number: int,
        first: int,
        generator: Generator,
    ) -> None:
        self.envs = envs
        self.columns = range(first, first + envs.num_envs)
        self._network = network
        self._shape = shape
        self._number = number
        self._generator = generator
        count, head = envs.num_envs, network.head
        self._observation = torch.empty(count, *network.observation_shape, dtype=observation_dtype(network))
        self._is_init = torch.ones(count, dtype=torch.bool)
        self._state = network.initial_state(count)
        self._action = torch.zeros(count, *head.action_shape, dtype=head.action_dtype)
        self._reward = torch.zeros(count)
        self._returns = torch.zeros(count, dtype=torch.float64)
        self._lengths = torch.zeros(count, dtype=torch.int64)

    def reset(self, seed: int) -> None:
        """Begin anew everywhere."""
        self._observation.copy_(self.envs.reset(seed + self.columns.start))
        self._is_init.fill_(True)
        for past in (self._state, self._action, self._reward, self._returns, self._lengths):
            past.zero_()

    def begin(self, slot: Slot) -> None:
        """Write what stands before the first step."""
        self._slot, self._rows = slot, slot.timed[self._number]
        self._rows[keys.OBSERVATION][0].copy_(self._observation)
        self._rows[keys.IS_INIT][0].copy_(self._is_init)
        before = {
            keys.RECURRENT_STATE: self._state,
            keys.LAST_ACTION: self._action,
            keys.LAST_REWARD: self._reward,
        }
        for name, view in slot.per_unroll[self._number].items():
            view.copy_(before[name])

    def act(self, step: int) -> None:
        """Choose the actions of a step, and let the environments begin it."""
        rows, network = self._rows, self._network
        seen = network.step(
            rows[keys.OBSERVATION][step], rows[keys.IS_INIT][step], self._state, self._action, self._reward
        )
        self._action, log_prob = network.head.act(seen.params, self._generator)
        self.envs.send(self._action)
        self._state = seen.state
        rows[keys.ACTION][step].copy_(self._action)
        rows[keys.BEHAVIOUR_LOG_PROB][step].copy_(log_prob)
        if self._shape.store_params:
            rows[keys.BEHAVIOUR_PARAMS][step].copy_(seen.params)
        if self._shape.store_value:
            rows[VALUE][step].copy_(seen.value)

    def finish(self, step: int) -> None:
        """Wait for the environments, and write what came of the step."""
        rows, answer = self._rows, self.envs.recv()
        rows[keys.OBSERVATION][step + 1].copy_(answer.observation)
        self._reward = rows[keys.REWARD][step].copy_(answer.reward)
        rows[keys.TERMINATED][step].copy_(answer.terminated)
        rows[keys.TRUNCATED][step].copy_(answer.truncated)
        ended = torch.logical_or(answer.terminated, answer.truncated, out=rows[keys.IS_INIT][step + 1])
        for env, observation in answer.finals:
            self._slot.add_final(step, self.columns[env], observation)
        self._returns += answer.reward
        self._lengths += 1
        if ended.any():
            over = ~ended
            rows[EPISODE_RETURN][step].copy_(self._returns.masked_fill(over, 0.0))
            rows[EPISODE_LENGTH][step].copy_(self._lengths.masked_fill(over, 0))
            self._returns.masked_fill_(ended, 0.0)
            self._lengths.masked_fill_(ended, 0)

    def end(self) -> None:
        """Keep what the next rollout begins with; the slot is given away."""
        self._observation.copy_(self._rows[keys.OBSERVATION][-1])
        self._is_init.copy_(self._rows[keys.IS_INIT][-1])
        self._reward = self._reward.clone()


class Roller:
    """Makes rollouts with one group of environments, or two of which one steps while the other thinks.

    Args:
        groups: they.
        shape: what is written.
    """

    def __init__(self, groups: Sequence[Group], shape: RolloutShape) -> None:
        self._groups = groups
        self._shape = shape
        self._slots: dict[int, Slot] = {}

    @torch.inference_mode()
    def reset(self, seed: int) -> None:
        """Begin anew everywhere."""
        for group in self._groups:
            group.reset(seed)

    @torch.inference_mode()
    def roll(self, number: int, views: Mapping[str, Tensor], version: int, stop: Callable[[], bool]) -> bool:
        """Fill a slot.

        Args:
            number: of the slot.
            views: its arrays.
            version: what acts.
            stop: asked at every step; true breaks off.

        Returns:
            Whether the rollout is complete.
        """
        if number not in self._slots:
            self._slots[number] = Slot.cut(views, [group.columns for group in self._groups])
        slot, groups = self._slots[number], self._groups
        views[FINAL_COUNT].zero_()
        views[EPISODE_RETURN].zero_()
        views[EPISODE_LENGTH].zero_()
        views[keys.POLICY_VERSION].fill_(version)
        for group in groups:
            group.begin(slot)
            group.act(0)
        for step in range(1, self._shape.steps):
            if stop():
                return False
            for group in groups:
                group.finish(step - 1)
                group.act(step)
        for group in groups:
            group.finish(self._shape.steps - 1)
            group.end()
        return True

    def close(self) -> None:
        """Let go of the environments."""
        for group in self._groups:
            group.envs.close()
