"""The workers of impala and laser on the nodes of a Ray cluster."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchrl.trainers import Trainer

from rlsync.recipes.cluster_config import workers_on_a_node
from rlsync.recipes.config import Config
from rlsync.recipes.crew import crew_of
from rlsync.recipes.hooks import TellNodes
from rlsync.recipes.impala.network import ImpalaNet
from rlsync.recipes.run_files import CLUSTER
from rlsync.workers.cluster.collector import ClusterCollector
from rlsync.workers.cluster.nodes import Placement
from rlsync.workers.cluster.session import Session
from rlsync.workers.devices import device_of_each
from rlsync.workers.envs.specs import EnvSpec
from rlsync.workers.supervision import Restarts


def cluster_collector(
    config: Config, spec: EnvSpec, network: ImpalaNet, shared: Mapping[str, Any]
) -> ClusterCollector:
    """Connect to the cluster that a config names, or start one, and start workers on its nodes.

    Args:
        config: of the run.
        spec: the environments.
        network: the learner's.
        shared: the arguments that it has in common with an ``UnrollCollector``.

    Raises:
        ConfigError: nothing answers at the address, or Ray refuses.
        WorkerLost: a node was lost before its workers were ready.
        AdoptionTimeout: nodes are not ready in time.
    """
    cluster, workers = config.cluster, workers_on_a_node(config)
    placement = Placement(
        beside_learner=cluster.placement == "all",
        resources=cluster.resources,
        min_nodes=cluster.min_nodes,
        credits=cluster.credits,
        restarts=Restarts(),
        node_timeout_s=cluster.node_timeout_s,
        start_timeout_s=cluster.start_timeout_s,
    )
    session = Session(cluster.address)
    try:
        return ClusterCollector(
            network,
            spec,
            workers_per_node=workers,
            placement=placement,
            crew=crew_of(config),
            session=session,
            policy_device=device_of_each(config.collector.device, workers, "collector.device"),
            **shared,
        )
    except BaseException:
        session.close()
        raise


def tell_nodes(trainer: Trainer, config: Config, collector: ClusterCollector) -> None:
    """Let a run tell of its nodes in its folder, if it has one.

    Args:
        trainer: of the run.
        config: of the run.
        collector: of the trainer.
    """
    if config.run_dir is not None:
        TellNodes(collector.status, Path(config.run_dir) / CLUSTER).register(trainer)
