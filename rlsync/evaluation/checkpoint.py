"""What a recipe hands to ``rlsync eval``: what acts, where its weights go, and the environments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from rlsync.workers.envs.specs import EnvSpec
    from rlsync.workers.player import Player


@dataclass(frozen=True, slots=True)
class CheckpointPlayer:
    """A policy that can play once its weights are loaded.

    Args:
        weights: the module into which the component ``policy`` of a checkpoint is loaded. TorchRL's Trainer
            fills that component from the loss module's ``actor_network``, else from its ``value_network``.
        player: acts with these weights.
        env: the environments that the policy was trained in.
    """

    weights: nn.Module
    player: Player
    env: EnvSpec
