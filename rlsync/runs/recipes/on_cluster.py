"""The workers of a run on the nodes of a Ray cluster, and what is registered because they are there."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tensordict import TensorDictBase
from torchrl.trainers import Trainer

from rlsync.runs.actors.cluster.collector import ClusterCollector
from rlsync.runs.actors.cluster.nodes import Placement
from rlsync.runs.actors.cluster.session import Session
from rlsync.runs.actors.player import Player
from rlsync.runs.recipes.bounds import values_for
from rlsync.runs.recipes.run import Run
from rlsync.runs.recipes.run_files import CLUSTER, VERSIONS

_TELL_EVERY_S = 2.0


class Cluster:
    """Workers on the nodes of the cluster that a config names, or of one started here; see ``Here``."""

    def __init__(self, run: Run[Any]) -> None:
        self._run = run
        self.workers = run.config.workers_per_node

    def collector(
        self, player: Player, *, when_full: Any = "block", **settings: Any
    ) -> ClusterCollector:
        """Start workers that act with a player; see ``Here``. Those of a cluster drop nothing themselves."""
        config = self._run.config
        with self._connected() as places:
            return ClusterCollector(
                player,
                config.env.spec(),
                newest_only=config.collector.lag == 0,
                **places,
                **settings,
            )

    def watch(self, trainer: Trainer) -> None:
        """Write what is known of the nodes into the run's folder: now, and then every few seconds."""
        file = self._run.file(CLUSTER)
        next_s = 0.0

        def tell(batch: TensorDictBase | None = None) -> None:
            nonlocal next_s
            if file is not None and time.monotonic() >= next_s:
                trainer.collector.status().write(file)
                next_s = time.monotonic() + _TELL_EVERY_S

        tell()
        trainer.register_op("post_steps_log", tell)

    @contextmanager
    def _connected(self) -> Iterator[dict[str, Any]]:
        """Connect to the cluster, and say where workers act; inside, a collector is made of it."""
        run = self._run
        cluster = self._run.config.cluster
        placement = Placement(cluster.placement == "all", **values_for(Placement, cluster))
        devices = run.worker_devices  # before there is a session to close
        session = Session(cluster.address)
        try:
            yield {
                "workers_per_node": self.workers,
                "placement": placement,
                "session": session,
                "policy_device": devices,
                "versions_file": run.file(VERSIONS),
            }
        except BaseException:
            session.close()
            raise
