"""CollectSettings: what all collectors of unrolls are told, wherever their workers run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

import torch

from rlsync import ConfigError
from rlsync.runs.actors.devices import device_named, device_of_each
from rlsync.runs.actors.frames import RolloutShape
from rlsync.runs.actors.supervision import Restarts
from rlsync.seams import Adopt, user_input

_CALL = "CollectSettings"  #: as errors name it


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectSettings:
    """How workers act, what a batch is made of, and how workers are kept running.

    The same for the workers of one machine (``UnrollCollector``) and for those of a cluster
    (``ClusterCollector``), which have a few arguments of their own besides.

    Raises:
        ConfigError: a number is out of range, ``adopt`` is neither of the two, or a device is not there.

    Example:
        >>> settings = CollectSettings(steps=20, envs_per_worker=8)
        >>> settings.rollouts_per_batch, settings.adopt, settings.silent_timeout_s
        (1, 'alias', 300.0)
    """

    #: T, of one unroll.
    steps: int
    #: Environments that one worker steps.
    envs_per_worker: int
    #: Whether a worker's environments are split in two groups: one steps while the player acts in the other.
    #: It helps where stepping does not need the interpreter (``AtariEnvs``).
    overlap: bool = False
    #: Rollouts in one batch, each from one slot.
    rollouts_per_batch: int = 1
    #: Slots of a machine's ring. When all are full, workers wait. More slots even out the load, and make frames
    #: older. None: one for each worker, and two for each rollout of a batch; on the nodes of a cluster two.
    slots: int | None = None
    #: Iteration ends after so many frames; -1 never ends.
    total_frames: int = -1
    #: The dtype in which workers hold and receive the weights, for example ``torch.bfloat16``; ``None`` for
    #: the player's own. Declare it in the sync map: ``Source("loss_module.actor_network", dtype=...)``.
    dtype: torch.dtype | None = None
    #: ``"alias"`` points the workers' parameters at the board; ``"copy"`` copies each version out of it, for
    #: code that keeps the address of a parameter. Compiled modules, and workers that act on an accelerator,
    #: copy in any case.
    adopt: Adopt = "alias"
    #: Where the workers' players act: one device for all of them, or one for each worker of a machine. Their
    #: environments and slots are in host memory.
    policy_device: str | torch.device | Sequence[str | torch.device] = "cpu"
    #: Where the batches are: the learner's device. What lies under ``"collector"`` stays in host memory. On an
    #: accelerator a batch is a copy.
    storing_device: str | torch.device = "cpu"
    #: Seed of environments and actions; ``None`` draws one.
    seed: int | None = None
    #: Rollouts of each worker in a life. After so many its environments are made anew, with seeds that follow from
    #: ``seed`` and the frames of the run so far; episodes go on if they can be saved. None: one life.
    life_rollouts: int | None = None
    #: How often a worker that ended is started again.
    restarts: Restarts = field(default_factory=Restarts)
    #: Whether batches are TorchRL's transitions, ``[B, T]``; see :mod:`rlsync.runs.actors.transitions`.
    transitions: bool = False
    #: Whether the rewards in batches are clipped to [-1, 1]. Returns of episodes are those of the environment.
    clip_reward: bool = False
    #: Frames whose actions are random, if the player is a
    #: :class:`~rlsync.runs.actors.players.prefill.PrefilledPlayer`; the next publish after them ends it.
    random_frames: int = 0
    #: ``"forkserver"``, ``"spawn"`` or ``"fork"``. With the first two the program needs
    #: ``if __name__ == "__main__"``, and the parts of player and environment must be picklable.
    start_method: str = "forkserver"
    #: How long a worker may take for a rollout, or to begin after a restart, seconds. If it takes longer it is
    #: killed and started again; if all do, the run ends.
    silent_timeout_s: float = 300.0
    #: File in which version numbers are reserved; see :class:`rlsync.SyncWeights`.
    versions_file: str | Path | None = None

    def __post_init__(self) -> None:
        user_input.check_timeouts(_CALL, may_be_none=False, silent_timeout_s=self.silent_timeout_s)
        counts = {
            "steps": self.steps,
            "envs_per_worker": self.envs_per_worker,
            "rollouts_per_batch": self.rollouts_per_batch,
        }
        if self.life_rollouts is not None:
            counts["life_rollouts"] = self.life_rollouts
        for name, count in counts.items():
            user_input.check_count(name, count, 1, f"{_CALL}({name}={count!r})", "")
        if self.overlap and self.envs_per_worker < 2:
            problem = "one environment cannot be split in two"
            where = f"{_CALL}(overlap=True, envs_per_worker={self.envs_per_worker})"
            raise ConfigError(problem, where, "give two or more, or overlap=False")
        where = f"{_CALL}(adopt={self.adopt!r})"
        user_input.check_choice("adoption mode", self.adopt, get_args(Adopt), where)
        self.learner_device()

    @property
    def shape(self) -> RolloutShape:
        """The shape of a rollout."""
        return RolloutShape(self.steps, self.envs_per_worker)

    def learner_device(self) -> torch.device:
        """The device of ``storing_device``, with its number."""
        return device_named(self.storing_device, f"{_CALL}(storing_device=...)")

    def worker_devices(self, workers: int) -> tuple[torch.device, ...]:
        """The device of each worker, as ``policy_device`` says.

        Args:
            workers: how many workers a machine has.
        """
        return device_of_each(self.policy_device, workers, f"{_CALL}(policy_device=...)")
