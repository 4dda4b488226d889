"""The settings of what collects frames: worker processes, or the learner's own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlsync.core.errors import ConfigError, RlsyncError
from rlsync.recipes.bounds import above_zero, kept, one_of
from rlsync.recipes.cluster_config import THIS_MACHINE
from rlsync.recipes.device_config import DeviceOrList

if TYPE_CHECKING:
    from rlsync.recipes.config import Config

#: The kind of collector that acts in the learner's process.
IN_PROCESS = "in_process"


@dataclass
class CollectorConfig:
    """The worker processes, the devices on which they act, and how they adopt weights from the board.

    ``device`` is one device for all workers, or a list with one for each. With the kind ``in_process`` there
    is no worker process: the learner's own process acts, with the learner's own weights.
    """

    kind: str = one_of("sync", "async", IN_PROCESS)
    num_workers: int = above_zero(2)
    frames_per_batch: int = kept(above_zero(2048), "schedules and triggers count batches of that size")
    adopt: str = one_of("alias", "copy")
    start_timeout_s: float = above_zero(300.0)
    silent_timeout_s: float | None = above_zero(300.0)
    device: DeviceOrList = "cpu"


def in_process_errors(config: Config) -> Iterator[RlsyncError]:
    """What needs worker processes, and is asked for without any."""
    if config.collector.kind != IN_PROCESS:
        return
    asked = {
        "collector.num_workers=1": (config.collector.num_workers > 1, "more than one worker"),
        "cluster=none": (config.cluster.kind != THIS_MACHINE, "workers on a cluster"),
        "recipe.evaluation.every_frames=0": (
            config.recipe.evaluations().every_frames > 0,
            "an evaluating process, which reads the workers' board",
        ),
    }
    for other, (found, what) in asked.items():
        if found:
            yield ConfigError(
                f"collector.kind={IN_PROCESS} has no worker processes, so not {what}",
                other.partition("=")[0],
                f"give {other}, or collector=sync or async, which have worker processes",
            )
