"""The steps of rollouts as TorchRL's transitions, with as few copies as their keys allow.

A batch is a TensorDict of batch size ``[B, T]``: T steps of each of B environments, those of one rollout
after those of the one before::

    key                      shape              what
    observation              [B, T, *obs]       what the action was chosen by
    action                   [B, T, *action]    one-hot int64 of a choice, int64 indices of several choices,
                                                or float32 numbers
    is_init                  [B, T, 1] bool     the observation is the first of its episode
    policy_version           [B, T] int64       the version that acted
    next, observation        [B, T, *obs]       what the step led to
    next, reward             [B, T, 1]
    next, terminated         [B, T, 1] bool     the step ended the episode: nothing comes after it
    next, truncated          [B, T, 1] bool     a limit ended it: the value of what comes after counts
    next, done               [B, T, 1] bool     one of the two
    collector, episode_*     [B, T]             return and length of the episode that ended, or 0

What the player records at each step is there under its own name, ``[B, T, *record]``.

``next, observation`` of a truncated step is the last one of its episode. After a terminated step it is the
first observation of the next episode: nothing may be learned from its value.

``observation`` and ``next, observation`` share their memory, for one is the other a step later: do not write
to either. The batch of a single rollout on a CPU is the memory of a slot, valid until the next batch is asked
for; others are copies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.nn import functional

from rlsync import ConfigError
from rlsync.runs.actors import frames as keys
from rlsync.runs.actors.envs.actions import ActionSpec, DiscreteActions
from rlsync.runs.actors.frames import joined, last_observations
from rlsync.runs.actors.player import Record
from rlsync.runs.actors.ring.reader import TakenRollout

NEXT = "next"
DONE = "done"

_BESIDE = (keys.EPISODE_RETURN, keys.EPISODE_LENGTH)

#: Leaving out entries that are not there copies a TensorDict and those in it, not the tensors, in a tenth of
#: the time of ``TensorDict.copy()``: 8 us, and 70.
_NO_ENTRIES = ((NEXT, ""), (keys.COLLECTOR, ""))


@dataclass(frozen=True, slots=True)
class _Slot:
    """The memory of one slot under the keys of a batch: it is the same memory at each of its rollouts."""

    views: Mapping[str, Tensor]  # of the slot
    batch: TensorDict
    choices: Tensor | None  # of the slot, flat: what its one-hot actions are made of
    one_hot: Tensor | None  # memory of the batch's actions, flat


class Transitions:
    """Makes batches of rollouts, as this module says.

    Args:
        actions: of the player that made the rollouts.
        records: what that player records; all of it at every step.

    Raises:
        ConfigError: the player records something once for each unroll, which no transition has.
    """

    def __init__(self, actions: ActionSpec, records: Sequence[Record]) -> None:
        for record in records:
            if record.per != "step":
                problem = f"the player records {record.name!r} once for each unroll, and transitions have steps"
                raise ConfigError(
                    problem,
                    "a collector of transitions",
                    "record it at each step, or collect unrolls",
                )
        self._choices: int | None = None
        if isinstance(actions, DiscreteActions):
            self._choices = actions.n
        self._one_hot = torch.eye(self._choices or 0, dtype=torch.int64, device="cpu")
        self._records = tuple(record.name for record in records)
        self._slots: dict[int, _Slot] = {}

    def batch(self, rollouts: Sequence[TakenRollout], device: torch.device) -> TensorDict:
        """The steps of these rollouts, on a device; what lies under ``"collector"`` stays in host memory.

        Args:
            rollouts: that the learner has taken; see above for how long their memory is used.
            device: where the batch is.
        """
        slots = [rollout.views for rollout in rollouts]
        if len(rollouts) == 1 and device.type == "cpu":
            batch = self._in_slot(rollouts[0])
        else:
            arrays: dict[str, Tensor] = {}
            for name in self._timed():
                arrays[name] = joined([slot[name] for slot in slots], device, along=1)
            for name in _BESIDE:
                arrays[name] = joined([slot[name] for slot in slots], along=1)
            if self._choices is not None:
                arrays[keys.ACTION] = functional.one_hot(arrays[keys.ACTION], self._choices)
            batch = self._laid_out(arrays)
        finals = last_observations(slots, device)
        if finals:
            after = batch.get((NEXT, keys.OBSERVATION)).clone()
            step, env = finals[keys.FINAL_INDEX].unbind(-1)
            after[env, step] = finals[keys.FINAL_OBSERVATION]
            batch.set((NEXT, keys.OBSERVATION), after)
        return batch

    def _in_slot(self, rollout: TakenRollout) -> TensorDict:
        slot = self._slots.get(rollout.slot)
        if slot is None or slot.views is not rollout.views:
            slot = self._slots[rollout.slot] = self._slot_of(rollout.views)
        if slot.choices is not None and slot.one_hot is not None:
            torch.index_select(self._one_hot, 0, slot.choices, out=slot.one_hot)
        return slot.batch.exclude(*_NO_ENTRIES)

    def _slot_of(self, views: Mapping[str, Tensor]) -> _Slot:
        if self._choices is None:
            return _Slot(views, self._laid_out(views), None, None)
        choices = views[keys.ACTION]
        one_hot = torch.empty((*choices.shape, self._choices), dtype=torch.int64, device="cpu")
        batch = self._laid_out({**views, keys.ACTION: one_hot})
        return _Slot(views, batch, choices.view(-1), one_hot.view(-1, self._choices))

    def _timed(self) -> tuple[str, ...]:
        return (*keys.REQUIRED, keys.POLICY_VERSION, *self._records)

    def _laid_out(self, arrays: Mapping[str, Tensor]) -> TensorDict:
        """Arrays ``[T, B, *]`` under TorchRL's keys: views, not copies."""
        size = list(arrays[keys.REWARD].shape[::-1])
        by_env = {name: arrays[name].transpose(0, 1) for name in (*self._timed(), *_BESIDE)}
        observed = by_env[keys.OBSERVATION]
        begins = by_env[keys.IS_INIT].unsqueeze(-1)
        after = {
            keys.OBSERVATION: observed[:, 1:],
            keys.REWARD: by_env[keys.REWARD].unsqueeze(-1),
            keys.TERMINATED: by_env[keys.TERMINATED].unsqueeze(-1),
            keys.TRUNCATED: by_env[keys.TRUNCATED].unsqueeze(-1),
            DONE: begins[:, 1:],  # an episode begins after every step that ended one
        }
        root = {
            keys.OBSERVATION: observed[:, :-1],
            keys.ACTION: by_env[keys.ACTION],
            keys.IS_INIT: begins[:, :-1],
            keys.POLICY_VERSION: by_env[keys.POLICY_VERSION],
            **{name: by_env[name] for name in self._records},
            NEXT: TensorDict(after, size),
            keys.COLLECTOR: TensorDict({name: by_env[name] for name in _BESIDE}, size),
        }
        return TensorDict(root, size)
