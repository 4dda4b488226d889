"""The workers of a recipe on the nodes of a Ray cluster, and what is registered because they are there."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tensordict.nn import TensorDictModuleBase
from torchrl.collectors import BaseCollector
from torchrl.trainers import Trainer

from rlsync.recipes.crew import crew_of
from rlsync.recipes.hooks import TellNodes
from rlsync.recipes.impala.network import ImpalaNet
from rlsync.recipes.run_files import CLUSTER
from rlsync.recipes.settings import Config
from rlsync.recipes.spaces import Spaces
from rlsync.workers.cluster.collector import ClusterCollector
from rlsync.workers.cluster.nodes import Placement
from rlsync.workers.cluster.session import Session
from rlsync.workers.cluster.transition_collector import TransitionCollector
from rlsync.workers.devices import CPU, device_of_each
from rlsync.workers.envs.specs import EnvSpec, GymnasiumEnvs
from rlsync.workers.players.q import EpsilonLadder
from rlsync.workers.players.torchrl_policy import PREFILL, ActingPolicy, Prefill
from rlsync.workers.supervision import Restarts


def cluster_collector(
    config: Config, spec: EnvSpec, network: ImpalaNet, shared: Mapping[str, Any]
) -> ClusterCollector:
    """Workers that make unrolls, on the nodes of the cluster that a config names, or of one started here.

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
    with _settings(config) as settings:
        return ClusterCollector(network, spec, **settings, **shared)


def transition_collector(
    config: Config,
    policy: TensorDictModuleBase,
    spaces: Spaces,
    *,
    random_frames: int = 0,
    ladder_alpha: float = 0.0,
) -> TransitionCollector:
    """Workers that make the transitions of a stock collector, on the nodes of a cluster.

    With ``collector=sync`` a batch is one rollout for each worker of ``cluster.min_nodes`` nodes, all of the
    newest version. With ``collector=async`` it is one rollout of one worker.

    Args:
        config: of the run.
        policy: what the workers act with, in the dtype of the map.
        spaces: of the environment.
        random_frames: they take random actions in so many frames first.
        ladder_alpha: of each node's workers; see :class:`~rlsync.workers.players.q.EpsilonLadder`.

    Raises:
        ConfigError, WorkerLost, AdoptionTimeout: as of :func:`cluster_collector`.
    """
    settings, num_envs = config.collector, config.env.num_envs
    waits = settings.kind == "sync"
    rollouts = config.workers_per_node * config.cluster.min_nodes if waits else 1
    acting = ActingPolicy(
        copy.deepcopy(policy).to(CPU),  # the specs that it draws from are on the device of its weights
        spaces.player_actions(),
        (spaces.features,),
        ladder=EpsilonLadder(alpha=ladder_alpha) if ladder_alpha else None,
        prefill=Prefill() if random_frames else None,
    )
    with _settings(config) as places:
        return TransitionCollector(
            acting,
            GymnasiumEnvs(config.env.id, config.env.kwargs),
            waits=waits,
            random_frames=random_frames,
            steps=math.ceil(settings.frames_per_batch / (rollouts * num_envs)),
            envs_per_worker=num_envs,
            rollouts_per_batch=rollouts,
            adopt=settings.adopt,
            seed=config.seed,
            silent_timeout_s=settings.silent_timeout_s or float("inf"),
            **places,
        )


@contextmanager
def _settings(config: Config) -> Iterator[dict[str, Any]]:
    """Connect to the cluster, and say where workers act; inside, a collector is made of it."""
    cluster, workers = config.cluster, config.workers_per_node
    placement = Placement(
        beside_learner=cluster.placement == "all",
        resources=cluster.resources,
        min_nodes=cluster.min_nodes,
        credits=cluster.credits,
        restarts=Restarts(),
        node_timeout_s=cluster.node_timeout_s,
        start_timeout_s=cluster.start_timeout_s,
    )
    devices = device_of_each(config.collector.device, workers, "collector.device")
    session = Session(cluster.address)
    try:
        yield {
            "workers_per_node": workers,
            "placement": placement,
            "crew": crew_of(config),
            "session": session,
            "policy_device": devices,
        }
    except BaseException:
        session.close()
        raise


def own_routes(collector: BaseCollector) -> dict[str, str]:
    """What is published besides the map of the config: whether the workers take random actions.

    Args:
        collector: of the run.
    """
    if isinstance(collector, TransitionCollector) and collector.prefill is not None:
        return {PREFILL: "collector.prefill"}
    return {}


def tell_nodes(trainer: Trainer, config: Config, collector: ClusterCollector) -> None:
    """Let a run tell of its nodes in its folder, if it has one.

    Args:
        trainer: of the run.
        config: of the run.
        collector: of the trainer.
    """
    if config.run_dir is not None:
        TellNodes(collector.status, Path(config.run_dir) / CLUSTER).register(trainer)
