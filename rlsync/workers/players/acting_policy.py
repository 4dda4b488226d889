"""A TorchRL policy as a player that explores, and records what a stock collector would; imports torchrl."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Generator, Tensor, nn
from torchrl.envs.utils import ExplorationType, set_exploration_type

from rlsync.core.plan import POLICY
from rlsync.workers.envs.actions import ActionSpec, BoxActions
from rlsync.workers.player import Acted, Player, Record, State
from rlsync.workers.players.q import EpsilonLadder
from rlsync.workers.players.uniform import UniformPlayer

#: The destination of what says whether actions are random.
PREFILL = "prefill"

#: What TorchRL's collectors and their environments call what is recorded.
REWARD_SUM = "reward_sum"
EXPONENT = "exploration_exponent"

_OBSERVATION, _ACTION = "observation", "action"


class Prefill(nn.Module):
    """One buffer, ``random``, bool: whether workers ignore their policy and draw every action uniformly.

    It is published like weights, so the version of a frame says whether its action was random.

    Example:
        >>> bool(Prefill().random)
        True
    """

    random: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("random", torch.tensor(True))


class ActingPolicy(Player):
    """Acts with a TorchRL policy that reads ``observation`` and writes ``action``, and explores as it does.

    It records what else the policy writes, ``reward_sum``, the return of the episode before the step, and
    with a ladder ``exploration_exponent``. Its destinations are ``"policy"`` and, with a prefill,
    ``"prefill"``.

    TorchRL's policies draw from torch's own random numbers, so :meth:`begin` seeds these.

    Args:
        policy: the policy, its exploration included.
        actions: what it chooses from; boxes have finite bounds.
        observation_shape: of one observation.
        ladder: each worker's ``exploration_exponent``, which the policy reads; ``None`` if it reads none.
        prefill: says when actions are random; ``None``: never.

    Source: torchrl.collectors.Collector; Ape-X, arXiv 1803.00933.

    Example:
        >>> from tensordict.nn import TensorDictModule
        >>> policy = TensorDictModule(nn.Linear(3, 1), in_keys=["observation"], out_keys=["action"])
        >>> player = ActingPolicy(policy, BoxActions(1, (-1.0,), (1.0,)), (3,))
        >>> [record.name for record in player.records]
        ['reward_sum']
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
        self._actions = actions
        self._observation_shape = tuple(observation_shape)
        self._ladder = ladder
        self._uniform = UniformPlayer(actions, self._observation_shape)
        self._written = _written(policy, self._seen(torch.zeros(1, *observation_shape), self._begun(1, 0, 1)))

    @property
    def modules(self) -> Mapping[str, nn.Module]:
        acting: dict[str, nn.Module] = {POLICY: self._policy}
        return acting if self.prefill is None else {**acting, PREFILL: self.prefill}

    @property
    def actions(self) -> ActionSpec:
        return self._actions

    @property
    def observation_shape(self) -> tuple[int, ...]:
        return self._observation_shape

    @property
    def observation_dtype(self) -> torch.dtype:
        return torch.float32

    @property
    def records(self) -> Sequence[Record]:
        said = [Record(REWARD_SUM, (), torch.float32)]
        if self._ladder is not None:
            said.append(Record(EXPONENT, (), torch.float32))
        return (*said, *self._written)

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
            action = out.get(_ACTION)
            if not isinstance(self._actions, BoxActions):
                action = action.to(torch.int64).argmax(-1)
        return Acted(action, records, state)

    def _begun(self, num_envs: int, worker: int, num_workers: int) -> State:
        state = {REWARD_SUM: torch.zeros(num_envs)}
        if self._ladder is not None:
            state[EXPONENT] = torch.full((num_envs,), self._ladder.exponent(worker, num_workers))
        return state

    def _seen(self, observation: Tensor, state: State) -> TensorDict:
        seen = {_OBSERVATION: observation}
        if self._ladder is not None:
            seen[EXPONENT] = state[EXPONENT].unsqueeze(-1)
        return TensorDict(seen, [len(observation)])


def _written(policy: TensorDictModuleBase, seen: TensorDictBase) -> tuple[Record, ...]:
    """What a policy writes besides the action: found by letting it act once, with one observation."""
    leaf = next(iter(policy.parameters()), torch.zeros(()))
    given = set(seen.keys())
    with torch.no_grad(), torch.random.fork_rng(), set_exploration_type(ExplorationType.RANDOM):
        out = policy(seen.to(leaf.device))
    return tuple(
        Record(str(key), tuple(tensor.shape[1:]), tensor.dtype)
        for key, tensor in sorted(out.items())
        if key != _ACTION and key not in given
    )
