"""A learner whose agents outlive it: crew_cases.py starts it as a program, kills it, and follows it."""

from __future__ import annotations

import sys
import time

import ray

from rlsync.runs.actors.cluster.collector import ClusterCollector
from rlsync.runs.actors.cluster.crew import Crew
from rlsync.runs.actors.cluster.nodes import Placement
from rlsync.runs.actors.envs.specs import GymnasiumEnvs
from tests.tools.cluster_player import CanaryPlayer

STEPS, ENVS, SLOTS, NODES = 5, 2, 3, 2


def collector_of(crew: Crew, *, steps: int = STEPS) -> ClusterCollector:
    """A canary with one worker on each of two nodes.

    Args:
        crew: of the agents.
        steps: of a rollout.
    """
    return ClusterCollector(
        CanaryPlayer(),
        GymnasiumEnvs("CartPole-v1"),
        steps=steps,
        envs_per_worker=ENVS,
        workers_per_node=1,
        slots=SLOTS,
        seed=5,
        placement=Placement(resources={"rollouts": 1.0}, min_nodes=NODES),
        crew=crew,
    )


def publish(collector: ClusterCollector) -> int:
    """Publish weights that hold the number of their version."""
    assert isinstance(collector.player, CanaryPlayer)
    collector.player.weights.fill(collector.policy_version + 1)
    collector.update_policy_weights_()
    return collector.policy_version


def main(address: str, crew: str) -> None:
    """Take batches and publish until this process is killed; says what it has published."""
    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    collector = collector_of(Crew(crew, keep_s=600.0))
    heard: set[str] = set()
    for _ in collector:
        heard |= {origin.node for origin in collector.last_origins}
        version = publish(collector)
        time.sleep(0.05)  # what is waited for needs the processors, too
        if len(heard) == NODES:
            sys.stdout.write(f"{version}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
