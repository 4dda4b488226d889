"""How an IMPALA network acts in a worker, and what it records for the loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Generator, Tensor

from rlsync.core.plan import POLICY
from rlsync.recipes.impala.heads import PolicyHead
from rlsync.workers import frames as keys
from rlsync.workers.envs.actions import ActionSpec, BoxActions, DiscreteActions
from rlsync.workers.frames import VALUE
from rlsync.workers.player import Acted, FixedPlayer, Record, State

if TYPE_CHECKING:  # the network makes its player
    from rlsync.recipes.impala.network import ImpalaNet


class ImpalaPlayer(FixedPlayer):
    """Acts with an :class:`ImpalaNet`: one step of the network for all environments, one draw of the actions.

    It records ``behaviour_log_prob``; where an unroll begins ``recurrent_state``, ``last_action`` and
    ``last_reward``, if the network takes them; and what the options say. Its destination is ``"policy"``.

    Args:
        network: what acts.
        store_params: record the policy's outputs as ``behaviour_params``, which a trust region reads.
        store_value: record the value as ``("collector", "value")``.
        deterministic: take the likeliest action; otherwise draw one.

    Example:
        >>> from rlsync.recipes.impala import Categorical, ImpalaNet
        >>> player = ImpalaPlayer(ImpalaNet((4,), Categorical(2), lstm=8), deterministic=True)
        >>> [record.name for record in player.records]
        ['behaviour_log_prob', 'recurrent_state']
        >>> generator = torch.Generator().manual_seed(0)
        >>> state = player.begin(3, generator)
        >>> seen = torch.zeros(3, 4), torch.ones(3, dtype=torch.bool), torch.zeros(3)
        >>> player.act(*seen, state, generator).action.shape
        torch.Size([3])
    """

    def __init__(
        self,
        network: ImpalaNet,
        *,
        store_params: bool = False,
        store_value: bool = False,
        deterministic: bool = False,
    ) -> None:
        self.network = network
        self._deterministic = deterministic
        head, shape = network.head, network.observation_shape
        records = [Record(keys.BEHAVIOUR_LOG_PROB, (), torch.float32)]
        if store_params:
            records.append(Record(keys.BEHAVIOUR_PARAMS, (head.width,), torch.float32))
        if store_value:
            records.append(Record(VALUE, (), torch.float32, beside=True))
        if network.lstm is not None:
            records.append(Record(keys.RECURRENT_STATE, network.state_shape, torch.float32, "unroll"))
        if network.takes_last_action:
            records.append(Record(keys.LAST_ACTION, head.action_shape, head.action_dtype, "unroll"))
        if network.takes_last_reward:
            records.append(Record(keys.LAST_REWARD, (), torch.float32, "unroll"))
        pixels_or_vectors = torch.uint8 if len(shape) == 3 else torch.float32
        super().__init__({POLICY: network}, actions_of(head), shape, pixels_or_vectors, records)

    def begin(self, num_envs: int, generator: Generator, worker: int = 0, num_workers: int = 1) -> State:
        network, head = self.network, self.network.head
        return {
            keys.RECURRENT_STATE: network.initial_state(num_envs),
            keys.LAST_ACTION: torch.zeros(num_envs, *head.action_shape, dtype=head.action_dtype),
        }

    def act(
        self, observation: Tensor, is_init: Tensor, reward: Tensor, state: State, generator: Generator
    ) -> Acted:
        network, head = self.network, self.network.head
        seen = network.step(
            observation, is_init, state[keys.RECURRENT_STATE], state[keys.LAST_ACTION], reward
        )
        if self._deterministic:
            action = head.mode(seen.params)
            log_prob = head.score(seen.params, action)[0]
        else:
            action, log_prob = head.act(seen.params, generator)
        records = {
            keys.BEHAVIOUR_LOG_PROB: log_prob,
            keys.BEHAVIOUR_PARAMS: seen.params,
            VALUE: seen.value,
        }
        return Acted(action, records, {keys.RECURRENT_STATE: seen.state, keys.LAST_ACTION: action})


def actions_of(head: PolicyHead) -> ActionSpec:
    """The actions that a policy head chooses from.

    Example:
        >>> from rlsync.recipes.impala import Categorical, DiagonalGaussian
        >>> actions_of(Categorical(3)), actions_of(DiagonalGaussian(2))
        (DiscreteActions(n=3), BoxActions(size=2, low=(), high=()))
    """
    if head.action_shape:
        return BoxActions(head.action_shape[0])
    return DiscreteActions(head.features)
