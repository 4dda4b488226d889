"""The contract for the batch that workers make and the learner reads.

A batch is a flat TensorDict of batch size [], time first: B unrolls of T steps, and the observation after
the last step, so that one contiguous tensor holds all that a network sees in one pass::

    key                 shape               what
    observation         [T+1, B, *obs]      o[0] .. o[T]; uint8 pixels [C, H, W] or float vectors
    is_init             [T+1, B] bool       o[t] is the first of its episode
    action              [T, B, *action]     the action taken at o[t]: int64 index, or float vector
    reward              [T, B]              its reward; see CollectSettings.clip_reward
    terminated          [T, B] bool         the step ended the episode: nothing comes after it
    truncated           [T, B] bool         a limit ended the episode: the value of what comes after counts
    policy_version      [T, B] int64        version of the weights that acted; no loss reads it
    replayed            [B] bool            the unroll comes from replay; for entropy_on="online" only
    final_observation   [K, *obs]           the last observations of truncated episodes; absent without any
    final_index         [K, 2] int64        (t, b) of the truncated step that each one followed

The player adds what it records (:class:`rlsync.runs.actors.player.Record`). These names have a fixed
meaning::

    behaviour_log_prob  [T, B]              log-probability of the action under the policy that took it
    behaviour_params    [T, B, P]           outputs of that policy; for a trust region only
    recurrent_state     [B, *state]         before o[0], as step() returned it; for an LSTM only
    last_action         [B, *action]        the action that led to o[0]; where the network takes it
    last_reward         [B]                 and its reward

After a step that ended an episode the environment is reset at once, and o[t+1] is the first observation of
the next episode: ``is_init[1:] == terminated | truncated``. There is no separate bootstrap observation: o[T]
is it, unless the last step was truncated; then the final observation is. o[T] is also o[0] of the next
unroll. A step that is both terminated and truncated counts as terminated, and needs no final observation.

Strides are free: pixels that lie in memory as [T+1, B, H, W, C] and are permuted to the shape above save a
channels-last network the reordering.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlsync import ConfigError
from rlsync.runs.actors.devices import CPU
from rlsync.runs.actors.player import Playable, Player, Record, player_of
from rlsync.seams import Layout, user_input

# workers need the names below and lay slots out, and tensordict takes seconds to import
if TYPE_CHECKING:
    from tensordict import TensorDict, TensorDictBase

    from rlsync.runs.actors.ring.reader import TakenRollout

OBSERVATION = "observation"
IS_INIT = "is_init"
ACTION = "action"
REWARD = "reward"
TERMINATED = "terminated"
TRUNCATED = "truncated"
BEHAVIOUR_LOG_PROB = "behaviour_log_prob"
BEHAVIOUR_PARAMS = "behaviour_params"
POLICY_VERSION = "policy_version"
RECURRENT_STATE = "recurrent_state"
LAST_ACTION = "last_action"
LAST_REWARD = "last_reward"
REPLAYED = "replayed"
FINAL_OBSERVATION = "final_observation"
FINAL_INDEX = "final_index"

REQUIRED = (OBSERVATION, IS_INIT, ACTION, REWARD, TERMINATED, TRUNCATED)  #: in every batch
#: One entry for each step: time first, unrolls second.
TIMED = (*REQUIRED, BEHAVIOUR_LOG_PROB, BEHAVIOUR_PARAMS, POLICY_VERSION)
PER_UNROLL = (RECURRENT_STATE, LAST_ACTION, LAST_REWARD, REPLAYED)  #: one entry for each unroll
FINAL = (FINAL_OBSERVATION, FINAL_INDEX)  #: one entry for each truncated step
KEYS = (*TIMED, *PER_UNROLL, *FINAL)

# Of a slot, and under "collector" in a batch, besides the contract.
FINAL_COUNT = "final_count"
EPISODE_RETURN = "episode_return"
EPISODE_LENGTH = "episode_length"
VALUE = "value"

COLLECTOR = "collector"  #: key in a batch of what is not part of the contract
MASK = "mask"

_Arrays = dict[str, tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True, slots=True)
class RolloutShape:
    """How much one slot of the ring holds: an unroll of T steps of each of a worker's environments."""

    steps: int
    num_envs: int

    def layout(self, player: Player) -> Layout:
        """The arrays of one slot. Final observations lie last: pages that are not written cost no memory."""
        return Layout.of_arrays("rollout", self.arrays(player))

    def arrays(self, player: Player) -> _Arrays:
        steps = (self.steps, self.num_envs)
        envs = (self.num_envs,)
        observed = (self.steps + 1, self.num_envs)
        observation = player.observation_shape
        arrays: _Arrays = {
            OBSERVATION: ((*observed, *observation), player.observation_dtype),
            IS_INIT: (observed, torch.bool),
            ACTION: ((*steps, *player.actions.shape), player.actions.dtype),
            REWARD: (steps, torch.float32),
            TERMINATED: (steps, torch.bool),
            TRUNCATED: (steps, torch.bool),
            POLICY_VERSION: (steps, torch.int64),
            EPISODE_RETURN: (steps, torch.float32),
            EPISODE_LENGTH: (steps, torch.int64),
            FINAL_COUNT: ((1,), torch.int64),
        }
        most = self.steps * self.num_envs
        last: _Arrays = {
            FINAL_INDEX: ((most, 2), torch.int64),
            FINAL_OBSERVATION: ((most, *observation), player.observation_dtype),
        }
        for record in player.records:
            if record.name in arrays or record.name in (*last, MASK, COLLECTOR):
                problem = f"two arrays of a batch are called {record.name!r}"
                cure = "rename the record; rlsync.runs.actors.frames lists the names that are taken"
                raise ConfigError(problem, f"{type(player).__name__}.records", cure)
            if record.per == "step":
                arrays[record.name] = (*steps, *record.shape), record.dtype
            else:
                arrays[record.name] = (*envs, *record.shape), record.dtype
        return arrays | last


class Unrolls:
    """Makes batches of rollouts, as this module says; see :func:`batch_of`.

    Args:
        records: what the player that made the rollouts records.
    """

    def __init__(self, records: Sequence[Record]) -> None:
        self._records = records

    def batch(self, rollouts: Sequence[TakenRollout], device: torch.device) -> TensorDict:
        """The batch of these rollouts, on a device.

        Args:
            rollouts: that the learner has taken.
            device: where the batch is.
        """
        return batch_of([rollout.views for rollout in rollouts], self._records, device)


def batch_of(
    rollouts: Sequence[Mapping[str, Tensor]],
    records: Sequence[Record] = (),
    device: torch.device = CPU,
) -> TensorDict:
    """The batch of some slots; see :mod:`rlsync.runs.actors.frames`.

    Besides the contract it has, under ``"collector"``: ``mask`` [T, B], all true, by which TorchRL's Trainer
    counts frames; ``episode_return`` and ``episode_length`` [T, B] of the episodes that ended with a step, 0
    where none did (of whole games, where lost lives end the learner's episodes); and what the player records
    beside. This part stays in host memory, where it is read.

    On the CPU a single slot is not copied: the batch is the slot's own memory. Copies to an accelerator are
    put into its current stream and may go on after the call: do not write to the slots before they are done.
    """
    from tensordict import TensorDict

    per_unroll = {record.name for record in records if record.per == "unroll"}
    aside = {EPISODE_RETURN, EPISODE_LENGTH} | {record.name for record in records if record.beside}
    batch: dict[str, Tensor] = {}
    beside: dict[str, Tensor] = {}
    for name in rollouts[0]:
        if name in (*FINAL, FINAL_COUNT):
            continue
        parts = [rollout[name] for rollout in rollouts]
        along = int(name not in per_unroll)
        if name in aside:
            beside[name] = joined(parts, CPU, along)
        else:
            batch[name] = joined(parts, device, along)
    batch |= last_observations(rollouts, device)
    beside[MASK] = torch.ones(batch[REWARD].shape, dtype=torch.bool, device="cpu")
    return TensorDict({**batch, COLLECTOR: TensorDict(beside)})


def joined(parts: Sequence[Tensor], device: torch.device = CPU, along: int = 0) -> Tensor:
    """Parts from host memory as one tensor; a single one on the CPU is not copied."""
    there = [part.to(device, non_blocking=True) for part in parts]
    if len(there) == 1:
        return there[0]
    return torch.cat(there, along)


def last_observations(
    rollouts: Sequence[Mapping[str, Tensor]], device: torch.device
) -> dict[str, Tensor]:
    """The last observations of truncated episodes, and where they belong; empty if there are none."""
    counts = [int(rollout[FINAL_COUNT]) for rollout in rollouts]
    if not any(counts):
        return {}
    observations = []
    used = []
    for rollout, count in zip(rollouts, counts, strict=True):
        observations.append(rollout[FINAL_OBSERVATION][:count])
        used.append({REWARD: rollout[REWARD], FINAL_INDEX: rollout[FINAL_INDEX][:count]})
    indices = list(_shifted_indices(used))
    return {FINAL_OBSERVATION: joined(observations, device), FINAL_INDEX: joined(indices, device)}


def check_batch(
    batch: TensorDictBase, network: Player | Playable, optional: Sequence[str] = ()
) -> None:
    """Refuse a batch that is not what this module's table says, for this player.

    It looks at values, too, which waits for an accelerator: call it on the first batch of a run.

    Args:
        batch: the batch.
        network: the network that learns from it and knows its player, or the player that made it.
        optional: more keys of the table that are needed.

    Raises:
        ConfigError: a key is missing or misspelt, a shape or dtype does not fit, an episode's end and the
            next one's beginning do not agree, or a truncation lacks its final observation.

    Example:
        >>> from tensordict import TensorDict
        >>> from rlsync.runs.recipes.impala import Categorical, ImpalaNet
        >>> check_batch(TensorDict({"observations": torch.zeros(3, 1, 4)}), ImpalaNet((4,), Categorical(2)))
        Traceback (most recent call last):
        ...
        rlsync.core.errors.ConfigError: the batch has no 'observation'
          where  batch; it has: observations
          cure   rename 'observations'; rlsync.runs.actors.frames lists the keys
    """
    needed = [*REQUIRED, *recorded_keys(network), *optional]
    for key in needed:
        if key not in batch:
            near = user_input.nearest_name(key, sorted(map(str, batch.keys())))
            if near and near not in KEYS:
                hint = f"rename {near!r}"
            else:
                hint = f"write {key!r}"
            raise bad_batch(f"the batch has no {key!r}", batch, hint)
    for key, shape, dtype in _expected(batch, player_of(network)):
        tensor = batch.get(key, None)
        if tensor is None:
            continue
        if tuple(tensor.shape) != shape or (dtype is not None and tensor.dtype != dtype):
            wants = f"{list(shape)}"
            if dtype is not None:
                wants += f" of {dtype}"
            has = f"{list(tensor.shape)} of {tensor.dtype}"
            raise bad_batch(f"{key!r} is {has}, not {wants}", batch, "lay it out as listed")
    _check_ends(batch)


def recorded_keys(acting: Player | Playable) -> list[str]:
    """The keys that a player adds to the required ones, without what it records beside."""
    return [record.name for record in player_of(acting).records if not record.beside]


def known_keys(records: Sequence[Record] = ()) -> tuple[str, ...]:
    """All keys that a batch may have, without what lies beside."""
    return tuple(dict.fromkeys([*KEYS, *(record.name for record in records if not record.beside)]))


def timed_keys(records: Sequence[Record] = ()) -> set[str]:
    """The keys whose entries are time first, unrolls second; those of others are unrolls first."""
    return {*TIMED, *(record.name for record in records if record.per == "step")}


def concatenate(batches: Sequence[TensorDictBase], records: Sequence[Record] = ()) -> TensorDict:
    """Put the unrolls of several batches into one, for example new and replayed ones.

    Args:
        batches: with the same T and the same keys; final observations may be missing in some.
        records: what the player records under names that the table does not have.

    Raises:
        ConfigError: keys differ, or a key is not in the table.

    Example:
        >>> from tensordict import TensorDict
        >>> one = TensorDict({"reward": torch.zeros(5, 1), "replayed": torch.tensor([True])})
        >>> concatenate([one, one])["reward"].shape
        torch.Size([5, 2])
    """
    from tensordict import TensorDict

    keys: set[str] = set()
    out = {}
    known = known_keys(records)
    timed = timed_keys(records)
    for batch in batches:
        check_known(batch, known)
        keys.update(map(str, batch.keys()))
    for key in sorted(keys.difference(FINAL)):
        parts = [batch.get(key, None) for batch in batches]
        for number, part in enumerate(parts):
            if part is None:
                problem = f"batch {number} has no {key!r}, others have"
                raise bad_batch(problem, batches[number], "add it")
        out[key] = torch.cat(parts, int(key in timed))
    finals = [batch.get(FINAL_OBSERVATION) for batch in batches if FINAL_INDEX in batch]
    if finals:
        out[FINAL_OBSERVATION] = torch.cat(finals)
        out[FINAL_INDEX] = torch.cat(list(_shifted_indices(batches)))
    return TensorDict(out)


def _shifted_indices(batches: Sequence[TensorDictBase | Mapping[str, Tensor]]) -> Iterator[Tensor]:
    """The indices of final observations once the unrolls of all batches stand behind each other."""
    before = 0
    for batch in batches:
        if FINAL_INDEX in batch:
            index: Tensor = batch[FINAL_INDEX]
            yield index + index.new_tensor([0, before])
        before += batch[REWARD].shape[1]


def _expected(
    batch: TensorDictBase, player: Player
) -> Iterator[tuple[str, tuple[int, ...], torch.dtype | None]]:
    """Key, shape and dtype; a dtype of None stands for any: of observations, and of floats but actions."""
    steps = tuple(batch.get(REWARD).shape[:2])
    if len(steps) != 2 or 0 in steps:
        problem = f"'reward' is {list(batch.get(REWARD).shape)}, not [T, B]"
        raise bad_batch(problem, batch, "lay it out as listed")
    finals = (0,)
    if FINAL_INDEX in batch:
        finals = batch.get(FINAL_INDEX).shape[:1]
    checked = {*REQUIRED, *recorded_keys(player), *FINAL}
    for name, (shape, dtype) in RolloutShape(*steps).arrays(player).items():
        if name not in checked:
            continue
        if name in FINAL:
            shape = (*finals, *shape[1:])
        any_dtype = dtype.is_floating_point and name != ACTION
        if any_dtype or name in (OBSERVATION, FINAL_OBSERVATION):
            yield name, shape, None
        else:
            yield name, shape, dtype
    yield REPLAYED, steps[1:], torch.bool


def _check_ends(batch: TensorDictBase) -> None:
    terminated = batch.get(TERMINATED)
    truncated = batch.get(TRUNCATED)
    odd = (batch.get(IS_INIT)[1:] != (terminated | truncated)).nonzero()
    if len(odd):
        t, b = odd[0].tolist()
        cure = (
            "write is_init[t+1] = terminated[t] | truncated[t], and reset at once after an episode"
        )
        raise bad_batch(
            f"step {t} of unroll {b} and 'is_init' of what follows do not agree", batch, cure
        )
    has_final = torch.zeros_like(truncated)
    if FINAL_INDEX in batch:
        index = batch.get(FINAL_INDEX)
        has_final[index[:, 0], index[:, 1]] = True
    lacking = (truncated & ~terminated & ~has_final).nonzero()
    if len(lacking):
        t, b = lacking[0].tolist()
        cure = "keep the last observation of an episode that is truncated, in 'final_observation'"
        raise bad_batch(
            f"the truncated step {t} of unroll {b} has no final observation", batch, cure
        )


def check_known(batch: TensorDictBase, known: Sequence[str]) -> None:
    for key in sorted(map(str, batch.keys())):
        if key not in known:
            cure = "drop it"
            near = user_input.nearest_name(key, known)
            if near:
                cure = f"did you mean {near!r}?"
            raise bad_batch(f"no batch has {key!r}", batch, cure)


def bad_batch(what: str, batch: TensorDictBase, cure: str) -> ConfigError:
    has = ", ".join(sorted(map(str, batch.keys()))) or "nothing"
    return ConfigError(
        what, f"batch; it has: {has}", f"{cure}; rlsync.runs.actors.frames lists the keys"
    )
