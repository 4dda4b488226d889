"""One run: its config, and what follows from it, each derived once."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from rlsync.runs.actors.devices import device_named, device_of_each
from rlsync.runs.recipes.settings import Config, RecipeConfig
from rlsync.seams import schedule

if TYPE_CHECKING:
    from rlsync.runs.actors.replay.shared import SharedReplayHandle
    from rlsync.runs.recipes.on_cluster import Cluster
    from rlsync.runs.recipes.place import Here

S = TypeVar("S", bound=RecipeConfig, covariant=True)


class Run(Generic[S]):
    """A checked config, the ``spaces`` that the recipe's probe found, and what follows from the two.

    What is derived is derived when it is asked for first: a machine that only evaluates needs no device of
    the learner. ConfigError when a device is asked for that this machine does not have.

    Example:
        >>> run = Run(Config(run_dir="runs/a"))
        >>> run.recipe.name, run.device, run.worker_devices[0], run.file("best.pt").name
        ('ppo', device(type='cpu'), device(type='cpu'), 'best.pt')
    """

    def __init__(
        self,
        config: Config,
        spaces: Any = None,
        again: schedule.Life | None = None,
        shared: SharedReplayHandle | None = None,
    ) -> None:
        self.config = config
        self.recipe: S = config.recipe  # type: ignore[assignment]
        self.spaces = spaces
        self.again = again  #: the recorded life of a run that this one makes again
        self.shared = shared  #: the replay of the population that this agent belongs to
        self.folder: Path | None = None
        if config.run_dir is not None:
            self.folder = Path(config.run_dir)

    @property
    def life_length(self) -> int | None:
        """The frames of a life, as the run that is made again had them, or as the config says."""
        if self.again is not None:
            length: int | None = self.again.facts.get("life_length")
            return length
        return self.config.life_length

    def file(self, name: str) -> Path | None:
        """The file of this name in the run's folder; None where the run writes nothing."""
        if self.folder is None:
            return None
        return self.folder / name

    @cached_property
    def device(self) -> torch.device:
        """The learner's: where the networks, the loss, the optimizer and TorchRL's replay buffer are."""
        return device_named(self.config.learner.device, "learner.device")

    @cached_property
    def worker_devices(self) -> tuple[torch.device, ...]:
        """Where the policy of each worker of a machine acts."""
        return device_of_each(
            self.config.collector.device, self.config.workers_per_node, "collector.device"
        )

    @cached_property
    def evaluation_device(self) -> torch.device:
        """Where ``rlsync eval`` and the evaluating process play."""
        return device_named(self.config.evaluation.device, "evaluation.device")

    @cached_property
    def place(self) -> Here | Cluster:
        """Where the workers are: on this machine, or on the nodes of a cluster."""
        if self.config.cluster.here:
            from rlsync.runs.recipes.place import Here

            return Here(self)
        from rlsync.runs.recipes.on_cluster import Cluster  # which needs ray

        return Cluster(self)
