"""The batch between workers and learner: one contract, written down here.

A batch is a flat TensorDict of batch size [], time first: B unrolls of T steps, and the observation after
the last step, so that one contiguous tensor holds all that the network sees in its one pass::

    key                 shape               what
    observation         [T+1, B, *obs]      o[0] .. o[T]; uint8 pixels [C, H, W] or float vectors
    is_init             [T+1, B] bool       o[t] is the first of its episode
    action              [T, B, *action]     the action taken at o[t]: int64 index, or float vector
    reward              [T, B]              its reward, not clipped
    terminated          [T, B] bool         the step ended the episode: nothing comes after it
    truncated           [T, B] bool         the step ended it by a limit: the value of what comes after counts
    behaviour_log_prob  [T, B]              log-probability of the action under the policy that took it
    behaviour_params    [T, B, P]           outputs of that policy; for a trust region only
    policy_version      [T, B] int64        version of the weights that acted; the loss does not read it
    recurrent_state     [B, *state]         before o[0], as step() returned it; for an LSTM only
    last_action         [B, *action]        the action that led to o[0]; where the network takes it
    last_reward         [B]                 and its reward
    replayed            [B] bool            the unroll comes from replay; for entropy_on="online" only
    final_observation   [K, *obs]           the observations that truncations hid; absent when there are none
    final_index         [K, 2] int64        (t, b) of the truncated step that each one followed

After a step that ended an episode the environment is reset at once, and o[t+1] is the first observation of
the next episode: ``is_init[1:] == terminated | truncated``. A bootstrap observation of its own does not
exist: o[T] is it, unless the last step was truncated; then the final observation is. o[T] is also o[0] of
the next unroll. A step that is both terminated and truncated is terminated, and needs no final observation.

Strides are free: pixels that lie in memory as [T+1, B, H, W, C] and are permuted to the shape above spare a
channels-last network the reordering.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from rlsync.core.errors import ConfigError
from rlsync.core.path import nearest_name
from rlsync.recipes.impala.models import ImpalaNet

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

#: Read in every batch.
REQUIRED = (OBSERVATION, IS_INIT, ACTION, REWARD, TERMINATED, TRUNCATED, BEHAVIOUR_LOG_PROB)
#: Time first, unrolls second.
TIMED = (*REQUIRED, BEHAVIOUR_PARAMS, POLICY_VERSION)
#: One for each unroll.
PER_UNROLL = (RECURRENT_STATE, LAST_ACTION, LAST_REWARD, REPLAYED)
#: One for each truncated step.
FINAL = (FINAL_OBSERVATION, FINAL_INDEX)
KEYS = (*TIMED, *PER_UNROLL, *FINAL)


def check_batch(batch: TensorDictBase, network: ImpalaNet, optional: Sequence[str] = ()) -> None:
    """Refuse a batch that is not what this module's table says, for this network.

    It looks at values, too, which on an accelerator means to wait: call it on the first batch of a run.

    Args:
        batch: the batch.
        network: what it is for: its shapes, and which inputs it takes.
        optional: keys of the table that are needed, too.

    Raises:
        ConfigError: a key is missing or misspelt, a shape or dtype does not fit, an episode's end and the
            next one's beginning do not agree, or a truncation lacks its final observation.

    Example:
        >>> from rlsync.recipes.impala import Categorical
        >>> check_batch(TensorDict({"observations": torch.zeros(3, 1, 4)}), ImpalaNet((4,), Categorical(2)))
        Traceback (most recent call last):
        ...
        rlsync.core.errors.ConfigError: the batch has no 'observation'
          where  batch; it has: observations
          cure   rename 'observations'; rlsync.recipes.impala.batch lists the keys
    """
    needed = [*REQUIRED, *network_keys(network), *optional]
    for key in needed:
        if key not in batch:
            near = nearest_name(key, sorted(map(str, batch.keys())))
            hint = f"rename {near!r}" if near and near not in KEYS else f"write {key!r}"
            raise _bad_batch(f"the batch has no {key!r}", batch, hint)
    for key, shape, dtype in _expected(batch, network):
        tensor = batch.get(key, None)
        if tensor is None:
            continue
        if tuple(tensor.shape) != shape or (dtype is not None and tensor.dtype != dtype):
            wants = f"{list(shape)}" + (f" of {dtype}" if dtype is not None else "")
            has = f"{list(tensor.shape)} of {tensor.dtype}"
            raise _bad_batch(f"{key!r} is {has}, not {wants}", batch, "lay it out as listed")
    _check_ends(batch)


def network_keys(network: ImpalaNet) -> list[str]:
    """The keys that this network needs beside the required ones."""
    keys = [] if network.lstm is None else [RECURRENT_STATE]
    keys += [LAST_ACTION] if network.takes_last_action else []
    return keys + ([LAST_REWARD] if network.takes_last_reward else [])


def concatenate(batches: Sequence[TensorDictBase]) -> TensorDict:
    """One batch of the unrolls of several, for example of single unrolls, or of new and replayed ones.

    Args:
        batches: with the same keys, but for final observations, and the same T.

    Raises:
        ConfigError: keys differ, or a key is not in the table.

    Example:
        >>> one = TensorDict({"reward": torch.zeros(5, 1), "replayed": torch.tensor([True])})
        >>> concatenate([one, one])["reward"].shape
        torch.Size([5, 2])
    """
    keys = sorted({str(key) for batch in batches for key in batch.keys()})  # noqa: SIM118 - not a dict
    out = {}
    for key in keys:
        if key not in KEYS:
            near = nearest_name(key, KEYS)
            raise _bad_batch(
                f"no batch has {key!r}", batches[0], f"did you mean {near!r}?" if near else "drop it"
            )
        if key in FINAL:
            continue
        parts = [batch.get(key, None) for batch in batches]
        lacking = [number for number, part in enumerate(parts) if part is None]
        if lacking:
            raise _bad_batch(f"batch {lacking[0]} has no {key!r}, others have", batches[lacking[0]], "add it")
        out[key] = torch.cat(parts, 1 if key in TIMED else 0)
    finals = [batch.get(FINAL_OBSERVATION) for batch in batches if FINAL_INDEX in batch]
    if finals:
        out[FINAL_OBSERVATION] = torch.cat(finals)
        out[FINAL_INDEX] = torch.cat(list(_shifted_indices(batches)))
    return TensorDict(out)


def _shifted_indices(batches: Sequence[TensorDictBase]) -> Iterator[Tensor]:
    before = 0
    for batch in batches:
        if FINAL_INDEX in batch:
            index = batch.get(FINAL_INDEX)
            yield index + index.new_tensor([0, before])
        before += batch.get(REWARD).shape[1]


def _expected(
    batch: TensorDictBase, network: ImpalaNet
) -> Iterator[tuple[str, tuple[int, ...], torch.dtype | None]]:
    steps = tuple(batch.get(REWARD).shape[:2])
    if len(steps) != 2 or 0 in steps:
        raise _bad_batch(
            f"'reward' is {list(batch.get(REWARD).shape)}, not [T, B]", batch, "lay it out as listed"
        )
    seen, (_, envs), head = (steps[0] + 1, steps[1]), steps, network.head
    finals = batch.get(FINAL_INDEX).shape[:1] if FINAL_INDEX in batch else (0,)
    return iter(
        [
            (OBSERVATION, (*seen, *network.observation_shape), None),
            (IS_INIT, seen, torch.bool),
            (ACTION, (*steps, *head.action_shape), head.action_dtype),
            (REWARD, steps, None),
            (TERMINATED, steps, torch.bool),
            (TRUNCATED, steps, torch.bool),
            (BEHAVIOUR_LOG_PROB, steps, None),
            (BEHAVIOUR_PARAMS, (*steps, head.width), None),
            (RECURRENT_STATE, (envs, *network.state_shape), None),
            (LAST_ACTION, (envs, *head.action_shape), head.action_dtype),
            (LAST_REWARD, (envs,), None),
            (REPLAYED, (envs,), torch.bool),
            (FINAL_OBSERVATION, (*finals, *network.observation_shape), None),
            (FINAL_INDEX, (*finals, 2), torch.int64),
        ]
    )


def _check_ends(batch: TensorDictBase) -> None:
    terminated, truncated = batch.get(TERMINATED), batch.get(TRUNCATED)
    odd = (batch.get(IS_INIT)[1:] != (terminated | truncated)).nonzero()
    if len(odd):
        t, b = odd[0].tolist()
        cure = "write is_init[t+1] = terminated[t] | truncated[t], and reset at once after an episode"
        raise _bad_batch(f"step {t} of unroll {b} and 'is_init' of what follows do not agree", batch, cure)
    given = torch.zeros_like(truncated)
    if FINAL_INDEX in batch:
        index = batch.get(FINAL_INDEX)
        given[index[:, 0], index[:, 1]] = True
    lacking = (truncated & ~terminated & ~given).nonzero()
    if len(lacking):
        t, b = lacking[0].tolist()
        cure = "keep the last observation of an episode that is truncated, in 'final_observation'"
        raise _bad_batch(f"the truncated step {t} of unroll {b} has no final observation", batch, cure)


def _bad_batch(what: str, batch: TensorDictBase, cure: str) -> ConfigError:
    has = ", ".join(sorted(map(str, batch.keys()))) or "nothing"
    return ConfigError(what, f"batch; it has: {has}", f"{cure}; rlsync.recipes.impala.batch lists the keys")
