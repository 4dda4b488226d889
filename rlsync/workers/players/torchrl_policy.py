"""TorchRL policies as players, and their unrolls as TorchRL's transitions; this file imports torchrl."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Generator, Tensor, nn
from torch.nn import functional
from torchrl.envs.utils import ExplorationType, set_exploration_type

from rlsync.core.plan import POLICY
from rlsync.workers import frames as keys
from rlsync.workers.envs.actions import ActionSpec, BoxActions, DiscreteActions
from rlsync.workers.player import Acted, Player, Record, State
from rlsync.workers.players.q import EpsilonLadder
from rlsync.workers.players.uniform import UniformPlayer

PREFILL = "prefill"  #: the destination of what says whether actions are random

REWARD_SUM = "reward_sum"  #: what TorchRL's collectors and their environments call what is recorded
EXPONENT = "exploration_exponent"

PIECES = "traj_ids"  #: key of the numbers of pieces of episodes, under ``"collector"``


class PolicyPlayer(Player):
    """Acts with a TorchRL policy that reads ``observation`` and writes ``action``, one-hot or numbers.
    TorchRL's policies draw from torch's own random numbers, so :meth:`begin` seeds these. ``begins`` has what
    a policy with a memory carries at first: it writes ``("next", key)``, and is given ``is_init``, too.
    """

    def __init__(
        self,
        policy: TensorDictModuleBase,
        actions: ActionSpec,
        observation_shape: tuple[int, ...],
        *,
        observation_dtype: torch.dtype = torch.float32,
        deterministic: bool = False,
        begins: Mapping[str, Tensor] | None = None,
    ) -> None:
        super().__init__({POLICY: policy}, actions, observation_shape, observation_dtype)
        self._policy = policy
        self._begins = dict(begins or {})
        self._exploration = ExplorationType.DETERMINISTIC if deterministic else ExplorationType.RANDOM

    def begin(self, num_envs: int, generator: Generator, worker: int = 0, num_workers: int = 1) -> State:
        torch.manual_seed(generator.initial_seed())
        return {key: value.expand(num_envs, *value.shape).clone() for key, value in self._begins.items()}

    def act(
        self, observation: Tensor, is_init: Tensor, reward: Tensor, state: State, generator: Generator
    ) -> Acted:
        # Not len(observation): torch.export would take the number of environments for a constant.
        seen = TensorDict({keys.OBSERVATION: observation}, observation.shape[:1])
        for key, value in self._begins.items():
            begins = is_init.reshape(-1, *[1] * value.ndim)
            seen[key] = torch.where(begins, value.to(observation.device), state[key])
        if self._begins:
            seen[keys.IS_INIT] = is_init.unsqueeze(-1)
        with set_exploration_type(self._exploration):
            action: Tensor = self._policy(seen).get(keys.ACTION)
        state = {key: seen["next", key] for key in self._begins}
        if isinstance(self.actions, BoxActions):
            return Acted(action, {}, state)
        return Acted(action.to(torch.int64).argmax(-1), {}, state)


class Prefill(nn.Module):
    """Whether workers draw every action uniformly: a buffer, published like weights, as part of a version."""

    random: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("random", torch.tensor(True))


class ActingPolicy(Player):
    """Acts with a TorchRL policy, and explores as it does. It records what else the policy writes,
    ``reward_sum``, the return before the step, and with a ``ladder`` each worker's exponent, which the policy
    reads. ``prefill`` says when actions are random. Boxes of actions must have finite bounds.
    """

    def __init__(
        self,
        policy: TensorDictModuleBase,
        actions: ActionSpec,
        observation_shape: tuple[int, ...],
        *,
        ladder: EpsilonLadder | None = None,
        prefill: Prefill | None = None,
    ) -> None:
        self.prefill = prefill
        self._policy = policy
        self._ladder = ladder
        self._uniform = UniformPlayer(actions, observation_shape)
        zeros = torch.zeros(1, *observation_shape, device="cpu")
        self._written = _written(policy, self._seen(zeros, self._begun(1, 0, 1)))
        modules = {POLICY: policy} if prefill is None else {POLICY: policy, PREFILL: prefill}
        known = [REWARD_SUM] if ladder is None else [REWARD_SUM, EXPONENT]
        records = [*(Record(name, (), torch.float32) for name in known), *self._written]
        super().__init__(modules, actions, observation_shape, records=records)

    def begin(self, num_envs: int, generator: Generator, worker: int = 0, num_workers: int = 1) -> State:
        torch.manual_seed(generator.initial_seed())
        return self._begun(num_envs, worker, num_workers)

    def act(
        self, observation: Tensor, is_init: Tensor, reward: Tensor, state: State, generator: Generator
    ) -> Acted:
        before = (state[REWARD_SUM] + reward).masked_fill(is_init, 0.0)
        with set_exploration_type(ExplorationType.RANDOM):
            out = self._policy(self._seen(observation, state))
        state = {**state, REWARD_SUM: before}
        records = {record.name: out.get(record.name) for record in self._written} | state
        if self.prefill is not None and self.prefill.random:
            action = self._uniform.act(observation, is_init, reward, {}, generator).action
        else:
            action = out.get(keys.ACTION)
            if not isinstance(self.actions, BoxActions):
                action = action.to(torch.int64).argmax(-1)
        return Acted(action, records, state)

    def _begun(self, num_envs: int, worker: int, num_workers: int) -> State:
        state = {REWARD_SUM: torch.zeros(num_envs, device="cpu")}
        if self._ladder is not None:
            exponent = self._ladder.exponent(worker, num_workers)
            state[EXPONENT] = torch.full((num_envs,), exponent, device="cpu")
        return state

    def _seen(self, observation: Tensor, state: State) -> TensorDict:
        seen = {keys.OBSERVATION: observation}
        if self._ladder is not None:
            seen[EXPONENT] = state[EXPONENT].unsqueeze(-1)
        return TensorDict(seen, [len(observation)])


def _written(policy: TensorDictModuleBase, seen: TensorDictBase) -> tuple[Record, ...]:
    """What a policy writes besides the action: found by letting it act once, with one observation."""
    leaf = next(iter(policy.parameters()), torch.zeros((), device="cpu"))
    inputs = set(seen.keys())
    with torch.no_grad(), torch.random.fork_rng(), set_exploration_type(ExplorationType.RANDOM):
        out = policy(seen.to(leaf.device))
    return tuple(
        Record(str(key), tuple(tensor.shape[1:]), tensor.dtype)
        for key, tensor in sorted(out.items())
        if key != keys.ACTION and key not in inputs
    )


def transitions(batch: TensorDictBase, actions: ActionSpec, first_piece: int = 0) -> TensorDict:
    """The steps of unrolls with TorchRL's keys, ``[B, T]``, copied: one-hot choices, and pieces of episodes
    numbered from ``first_piece``. What follows a terminated step is the next episode's first observation:
    nothing may be learned from its value.
    """
    observation, action = batch.get(keys.OBSERVATION), batch.get(keys.ACTION)
    after = observation[1:].clone()
    if keys.FINAL_INDEX in batch:
        step, env = batch.get(keys.FINAL_INDEX).unbind(-1)
        after[step, env] = batch.get(keys.FINAL_OBSERVATION)
    if isinstance(actions, DiscreteActions):
        action = functional.one_hot(action, actions.n)
    terminated, truncated = batch.get(keys.TERMINATED), batch.get(keys.TRUNCATED)
    reward, before = batch.get(keys.REWARD), batch.get(REWARD_SUM)
    version = _by_env(batch.get(keys.POLICY_VERSION))
    ends = {"terminated": terminated, "truncated": truncated, "done": terminated | truncated}
    following = {keys.REWARD: reward, REWARD_SUM: before + reward, **ends}
    none = torch.zeros_like(_number(terminated))
    root = {
        keys.OBSERVATION: _by_env(observation[:-1]),
        keys.ACTION: _by_env(action),
        REWARD_SUM: _number(before),
        keys.POLICY_VERSION: version,
        **{name: none.clone() for name in ends},
    }
    nested = {name: _number(tensor) for name, tensor in following.items()}
    nested |= {keys.OBSERVATION: _by_env(after), keys.POLICY_VERSION: version.clone()}
    if EXPONENT in batch:
        root[EXPONENT] = _number(batch.get(EXPONENT))
        nested[EXPONENT] = root[EXPONENT].clone()
    known = {*root, *keys.KEYS, keys.COLLECTOR}
    root |= {str(key): _by_env(tensor) for key, tensor in batch.items() if key not in known}
    begins = _by_env(batch.get(keys.IS_INIT)[:-1])
    begins[:, 0] = True
    pieces = begins.flatten().cumsum(0).reshape(begins.shape) - 1 + first_piece
    size = list(pieces.shape)
    beside = TensorDict({PIECES: pieces}, size)
    return TensorDict({**root, "next": TensorDict(nested, size), keys.COLLECTOR: beside}, size)


def _by_env(tensor: Tensor) -> Tensor:
    """``[T, B, *]`` as ``[B, T, *]``, copied."""
    return tensor.transpose(0, 1).clone(memory_format=torch.contiguous_format)


def _number(tensor: Tensor) -> Tensor:
    """``[T, B]`` as ``[B, T, 1]``, copied."""
    return _by_env(tensor).unsqueeze(-1)
