"""The steps of rollouts as TorchRL's transitions, with as few copies as their keys allow.

A batch is a TensorDict of batch size ``[B, T]``: T steps of each of B environments, those of one rollout
after those of the one before::

    key                      shape              what
    observation              [B, T, *obs]       what the action was chosen by
    action                   [B, T, *action]    one-hot int64 of a choice, or float32 numbers
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

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.nn import functional

from rlsync.core.errors import ConfigError
from rlsync.transport.ring.reader import TakenRollout
from rlsync.workers import frames as keys
from rlsync.workers.envs.actions import ActionSpec, DiscreteActions
from rlsync.workers.frames import joined, last_observations
from rlsync.workers.player import Record

NEXT = "next"
DONE = "done"

_BESIDE = (keys.EPISODE_RETURN, keys.EPISODE_LENGTH)


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
                what = f"the player records {record.name!r} once for each unroll, and transitions have steps"
                raise ConfigError(
                    what, "a collector of transitions", "record it at each step, or collect unrolls"
                )
        self._choices = actions.n if isinstance(actions, DiscreteActions) else None
        self._records = tuple(record.name for record in records)
        self._of_slots: dict[int, tuple[Mapping[str, Tensor], TensorDict]] = {}

    def batch(self, rollouts: Sequence[TakenRollout], device: torch.device) -> TensorDict:
        """The steps of these rollouts, on a device; what lies under ``"collector"`` stays in host memory.

        Args:
            rollouts: that the learner has taken; see above for how long their memory is used.
            device: where the batch is.
        """
        if len(rollouts) == 1 and device.type == "cpu":
            made = self._in_slot(rollouts[0])
        else:
            slots = [rollout.views for rollout in rollouts]
            arrays = {name: joined([slot[name] for slot in slots], device, 1) for name in self._timed()}
            arrays |= {name: joined([slot[name] for slot in slots], along=1) for name in _BESIDE}
            made = self._laid_out(arrays)
        if self._choices is not None:
            made.set(keys.ACTION, functional.one_hot(made.get(keys.ACTION), self._choices))
        finals = last_observations([rollout.views for rollout in rollouts], device)
        if finals:
            after = made.get((NEXT, keys.OBSERVATION)).clone()
            step, env = finals[keys.FINAL_INDEX].unbind(-1)
            after[env, step] = finals[keys.FINAL_OBSERVATION]
            made.set((NEXT, keys.OBSERVATION), after)
        return made

    def _in_slot(self, rollout: TakenRollout) -> TensorDict:
        """The memory of one slot, laid out once: it is the same memory at each of its rollouts."""
        known = self._of_slots.get(rollout.slot)
        if known is None or known[0] is not rollout.views:
            known = self._of_slots[rollout.slot] = rollout.views, self._laid_out(rollout.views)
        return known[1].copy()

    def _timed(self) -> tuple[str, ...]:
        return (*keys.REQUIRED, keys.POLICY_VERSION, *self._records)

    def _laid_out(self, arrays: Mapping[str, Tensor]) -> TensorDict:
        """Arrays ``[T, B, *]`` under TorchRL's keys: views, not copies."""
        size = list(arrays[keys.REWARD].shape[::-1])
        by_env = {name: arrays[name].transpose(0, 1) for name in (*self._timed(), *_BESIDE)}
        seen, begins = by_env[keys.OBSERVATION], by_env[keys.IS_INIT].unsqueeze(-1)
        after = {
            keys.OBSERVATION: seen[:, 1:],
            keys.REWARD: by_env[keys.REWARD].unsqueeze(-1),
            keys.TERMINATED: by_env[keys.TERMINATED].unsqueeze(-1),
            keys.TRUNCATED: by_env[keys.TRUNCATED].unsqueeze(-1),
            DONE: begins[:, 1:],  # an episode begins after every step that ended one
        }
        root = {
            keys.OBSERVATION: seen[:, :-1],
            keys.ACTION: by_env[keys.ACTION],
            keys.IS_INIT: begins[:, :-1],
            keys.POLICY_VERSION: by_env[keys.POLICY_VERSION],
            **{name: by_env[name] for name in self._records},
            NEXT: TensorDict(after, size),
            keys.COLLECTOR: TensorDict({name: by_env[name] for name in _BESIDE}, size),
        }
        return TensorDict(root, size)
