"""Random actions until enough frames were collected: when they end is a part of a version, like weights."""

from __future__ import annotations

import torch
from torch import Generator, Tensor, nn

from rlsync.runs.actors.player import Acted, Player, State
from rlsync.runs.actors.players.uniform import UniformPlayer

PREFILL = "prefill"  #: the destination of what says whether actions are random


class Prefill(nn.Module):
    """Whether workers draw every action uniformly: a buffer, published like weights, as part of a version."""

    random: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("random", torch.tensor(True, device="cpu"))


class PrefilledPlayer(Player):
    """Acts as another player does, but for its actions, which are random while :attr:`prefill` says so.

    Publish ``prefill`` as the destination ``"prefill"``, with the other player's weights. Boxes of actions
    must have finite bounds.

    Args:
        player: whose records and state are kept; its actions are replaced.

    Example:
        >>> from rlsync.runs.actors.envs.actions import DiscreteActions
        >>> from rlsync.runs.actors.players.q import EpsilonGreedyPlayer, EpsilonLadder
        >>> greedy = EpsilonLadder(0.0)
        >>> inner = EpsilonGreedyPlayer(nn.Identity(), DiscreteActions(3), (3,), ladder=greedy)
        >>> player = PrefilledPlayer(inner)
        >>> sorted(player.modules)
        ['policy', 'prefill']
    """

    def __init__(self, player: Player) -> None:
        self.player = player
        self.prefill = Prefill()
        self.keeps_last = player.keeps_last
        row = player._observations or player.observation_shape
        self._uniform = UniformPlayer(player.actions, row, player.observation_dtype)
        super().__init__(
            {**player.modules, PREFILL: self.prefill},
            player.actions,
            row,
            player.observation_dtype,
            player.records,
        )

    def begin(
        self, num_envs: int, generator: Generator, worker: int = 0, num_workers: int = 1
    ) -> State:
        return self.player.begin(num_envs, generator, worker, num_workers)

    def adopted(self, state: State, version: int) -> State:
        return self.player.adopted(state, version)

    def by_weights(self) -> Player:
        return self.player.by_weights()

    def act(
        self,
        observation: Tensor,
        is_init: Tensor,
        reward: Tensor,
        state: State,
        generator: Generator,
    ) -> Acted:
        acted = self.player.act(observation, is_init, reward, state, generator)
        if not self.prefill.random:
            return acted
        random = self._uniform.act(observation, is_init, reward, {}, generator).action
        return self.player.instead(acted, random)
