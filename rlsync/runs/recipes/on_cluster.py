"""The workers of a run on the nodes of a Ray cluster, and what is registered because they are there."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tensordict import TensorDictBase
from torchrl.trainers import Trainer

from rlsync.core.whole_file import write_whole
from rlsync.runs.actors.cluster.collector import ClusterCollector
from rlsync.runs.actors.cluster.crew import Crew
from rlsync.runs.actors.cluster.nodes import Placement
from rlsync.runs.actors.cluster.session import Session
from rlsync.runs.actors.player import Player
from rlsync.runs.recipes.bounds import values_for
from rlsync.runs.recipes.run import Run
from rlsync.runs.recipes.run_files import CLUSTER, CREW, VERSIONS

_TELL_EVERY_S = 2.0

_NAME = "crew"


class Cluster:
    """Workers on the nodes of the cluster that a config names, or of one started here; see ``Here``."""

    def __init__(self, run: Run[Any]) -> None:
        self._run = run
        self.workers = run.config.workers_per_node

    def collector(self, player: Player, *, when_full: Any = "block", **settings: Any) -> ClusterCollector:
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
                "crew": crew_of(run),
                "session": session,
                "policy_device": devices,
                "versions_file": run.file(VERSIONS),
            }
        except BaseException:
            session.close()
            raise


def crew_of(run: Run[Any]) -> Crew | None:
    """The crew named in this run's folder, or in that of the run it resumes; None if it keeps no agents."""
    cluster = run.config.cluster
    resume = run.config.resume
    file = run.file(CREW)
    if resume is None:
        before = []
    else:
        before = [Path(resume) / CREW, Path(resume).parent / CREW]
    written = next((crew for crew in before if crew.is_file()), None)
    if written is None:
        name = None
    else:
        name = str(json.loads(written.read_text())[_NAME])
    if not cluster.keep_agents:
        if name is None:
            return None
        return Crew(name)
    name = name or uuid.uuid4().hex[:12]
    if file is not None:
        write_whole(file, lambda beside: beside.write_text(json.dumps({_NAME: name})))
    return Crew(name, cluster.learner_timeout_s)
