"""The workers of a run on the nodes of a Ray cluster, and what is registered because they are there."""

from __future__ import annotations

import time
from typing import Any

from tensordict import TensorDictBase
from torchrl.trainers import Trainer

from rlsync.runs.actors.cluster.collector import ClusterCollector
from rlsync.runs.actors.cluster.nodes import Placement
from rlsync.runs.actors.cluster.session import Session
from rlsync.runs.actors.player import Player
from rlsync.runs.actors.settings import CollectSettings
from rlsync.runs.recipes.run import Run
from rlsync.runs.recipes.run_files import CLUSTER

_TELL_EVERY_S = 2.0


class Cluster:
    """Workers on the nodes of the cluster that a config names, or of one started here; see ``Here``."""

    def __init__(self, run: Run[Any]) -> None:
        self._run = run
        self.workers = run.config.workers_per_node

    def collector(self, player: Player, settings: CollectSettings) -> ClusterCollector:
        """Start workers that act with a player; see ``Here``. Those of a cluster drop nothing themselves."""
        config = self._run.config
        cluster = config.cluster
        placement = Placement(
            beside_learner=cluster.placement == "all",
            resources=cluster.resources,
            min_nodes=cluster.min_nodes,
            credits=cluster.credits,
            node_timeout_s=cluster.node_timeout_s,
            start_timeout_s=cluster.start_timeout_s,
        )
        session = Session(cluster.address)
        try:
            return ClusterCollector(
                player,
                config.env.spec(),
                settings,
                workers_per_node=self.workers,
                placement=placement,
                session=session,
                newest_only=config.collector.lag == 0,
            )
        except BaseException:
            session.close()
            raise

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
