"""What an agent is told when it is started, and while it works."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from rlsync.sync.adopter import Adopt
from rlsync.workers.cluster.card import likeness
from rlsync.workers.envs.specs import EnvSpec
from rlsync.workers.frames import RolloutShape
from rlsync.workers.player import Player
from rlsync.workers.supervision import Restarts


@dataclass(frozen=True, slots=True)
class NodeJob:
    """What an agent is told.

    Args:
        mailbox: where it hears of versions; see :class:`NodeReceiver`.
        node: the name of the node.
        numbers: the learner's number of each worker of this node.
        player: what acts, without memory.
        env: what it acts in.
        shape: of a rollout.
        slots: of the node's ring.
        adopt, overlap, devices: of the workers; see :class:`WorkerJob`.
        seed: of the first environment of the first worker of this node.
        seeds: how often the learner had given a seed by then.
        restarts: how often a worker is started again.
        start_method: of the worker processes.
        silent_timeout_s: how long a worker may give no sign of life, seconds.
        likeness: digests of what another learner must have alike to take the agent over.
        keep_s: how long the agent waits for the next learner when its own is gone, seconds.
    """

    mailbox: Any
    node: str
    numbers: tuple[int, ...]
    player: Player
    env: EnvSpec
    shape: RolloutShape
    slots: int
    adopt: Adopt
    overlap: bool
    devices: tuple[torch.device, ...]
    seed: int
    seeds: int
    restarts: Restarts
    start_method: str
    silent_timeout_s: float
    likeness: Mapping[str, str] = field(default_factory=dict)
    keep_s: float = 0.0

    def alike(self, workers: int) -> dict[str, str]:
        """The digests of what two agents must have alike for one to take the place of the other.

        Args:
            workers: of a node.
        """
        return likeness(
            player=self.player,
            environment=self.env,
            rollout=(self.shape, self.shape.layout(self.player).to_json()),
            workers=workers,
            slots=self.slots,
            adopt=self.adopt,
            overlap=self.overlap,
            devices=self.devices,
            restarts=self.restarts,
            start_method=self.start_method,
            silent_timeout_s=self.silent_timeout_s,
        )


@dataclass(frozen=True, slots=True)
class Orders:
    """What the learner wants of all nodes; the newest orders hold.

    Args:
        number: which orders these are, from 1.
        running: whether workers may begin rollouts.
        seeds: how often the learner has given a seed.
        seed: the last one, of the first environment of this node.
    """

    number: int
    running: bool
    seeds: int
    seed: int
