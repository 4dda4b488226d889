"""Who acts, on which device, and with which random numbers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from rlsync.workers.devices import CPU
from rlsync.workers.player import Acted, Player, State


@dataclass(frozen=True, slots=True)
class Seat:
    """A player on its device, for callers that step environments: their tensors are in host memory.

    What the player gets lies on its device, and so do its state and what it records. Only the action comes
    back to the host, where the environments are. On the CPU nothing is copied.

    Args:
        player: with memory of its own, on the device.
        generator: of random numbers, on the device.
        device: where the player acts.
        worker: the number of the worker that acts.
        num_workers: how many there are. An evaluation is worker 0 of 1.

    Example:
        >>> from rlsync.workers.envs.actions import DiscreteActions
        >>> from rlsync.workers.players.uniform import UniformPlayer
        >>> seat = Seat.taken(UniformPlayer(DiscreteActions(3), (4,)), seed=0)
        >>> is_init = torch.ones(5, dtype=torch.bool)
        >>> seat.act(torch.zeros(5, 4), is_init, torch.zeros(5), seat.begin(5)).action.shape
        torch.Size([5])
    """

    player: Player
    generator: Generator
    device: torch.device = CPU
    worker: int = 0
    num_workers: int = 1

    @classmethod
    def taken(
        cls, player: Player, seed: int, device: torch.device = CPU, worker: int = 0, num_workers: int = 1
    ) -> Seat:
        """Move a player to a device, and give it random numbers there.

        Args:
            player: its modules are moved.
            seed: of the random numbers.
            device: where it acts.
            worker, num_workers: as of the class.
        """
        for module in player.modules.values():
            module.to(device)
        return cls(player, torch.Generator(device).manual_seed(seed), device, worker, num_workers)

    def begin(self, num_envs: int) -> State:
        """The state before the first step of environments that were just reset.

        Args:
            num_envs: how many.
        """
        state = self.player.begin(num_envs, self.generator, self.worker, self.num_workers)
        return {name: tensor.to(self.device) for name, tensor in state.items()}

    def act(self, observation: Tensor, is_init: Tensor, reward: Tensor, state: State) -> Acted:
        """Choose the next action of every environment; see :meth:`Player.act`.

        Args:
            observation, is_init, reward: in host memory.
            state: what :meth:`begin` or the last call returned.
        """
        device = self.device
        acted = self.player.act(
            observation.to(device), is_init.to(device), reward.to(device), state, self.generator
        )
        return acted if acted.action.is_cpu else acted._replace(action=acted.action.cpu())
