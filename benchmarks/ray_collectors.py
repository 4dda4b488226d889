"""TorchRL's RayCollector on three Ray nodes of this machine: torn and misnamed steps.

    python benchmarks/ray_collectors.py [--steps 100000] [--inner none sync async] [--adopt alias]

Every weight of the policy holds the number of the version, and the learner publishes without a pause, through
a RayBoardScheme. Each step reports the smallest and the largest weight that it was made with, and its stamp.
Different weights are a torn read, another stamp is a misnamed one. One actor is on each node. **inner** says
who acts: the actor itself, or two worker processes of a MultiSyncCollector or MultiAsyncCollector in it.

The exit status is 1 if a count under ``bad`` is not zero. Ray opens ports:
``unshare -n sh -c 'ip link set lo up; exec python benchmarks/ray_collectors.py'`` keeps them to itself.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch
from ray_parts import cluster_of, objects_left
from servers import Canary, Publishing, StillEnv
from torchrl.collectors.distributed import RayCollector

from rlsync import NodeBoardScheme, RayBoardScheme

NODES, WORKERS, ENVS, FRAMES = 3, 2, 16, 640
STORE_MB = 100
LEAST_VERSIONS = 5
GONE_WITHIN_S = 60.0


def canary(steps: int, inner: str, adopt: str) -> dict[str, Any]:
    """One row; a cluster is there."""
    policy, bad = Canary().fill(1), {"torn": 0, "misnamed": 0, "not_published": 0}
    arguments: dict[str, Any] = {"track_policy_version": True}
    crowd: dict[str, Any] = {}
    if inner != "none":
        arguments["weight_sync_schemes"] = {"policy": NodeBoardScheme(adopt)}
        crowd = {"collector_class": inner, "num_workers_per_collector": WORKERS}
    scheme = RayBoardScheme(adopt)
    collector = RayCollector(
        [partial(StillEnv, (ENVS,))] * NODES,
        policy,
        frames_per_batch=FRAMES,
        total_frames=1 << 40,
        collector_kwargs=arguments,
        remote_configs={"num_cpus": 2, "memory": 1},  # one actor on each node
        weight_sync_schemes={"policy": scheme},
        **crowd,
    )

    def publish() -> None:
        policy.fill(scheme.publisher.version + 1)
        collector.update_policy_weights_(policy)

    seen: set[int] = set()
    done, batches, began = 0, iter(collector), time.monotonic()
    try:
        with Publishing(publish):
            while done < steps or len(seen) < LEAST_VERSIONS:
                batch = next(batches)
                newest = scheme.publisher.version
                stamps, low, high = batch["policy_version"], batch["low"], batch["high"]
                bad["torn"] += int((low != high).sum())
                bad["misnamed"] += int((stamps.reshape(low.shape) != low).sum())
                bad["not_published"] += int((stamps > newest).sum())
                seen |= set(stamps.unique().tolist())
                done += stamps.numel()
        seconds = time.monotonic() - began
        workers = scheme.publisher.transport.status()
        nodes = len(_nodes_of_actors())
    finally:
        collector.shutdown(shutdown_ray=False)
    bad["objects_left"] = objects_left(GONE_WITHIN_S)
    return {
        "inner": inner,
        "adopt": adopt,
        "nodes": nodes,
        "workers": len(workers),
        "steps": done,
        "publishes": scheme.publisher.version,
        "versions_that_acted": len(seen),
        "seconds": round(seconds, 1),
        "bad": bad,
    }


def _nodes_of_actors() -> set[str]:
    """The nodes on which collectors live."""
    actors = ray._private.state.actors().values()
    return {
        actor["Address"]["NodeID"]
        for actor in actors
        if actor["State"] == "ALIVE" and "Collector" in actor["ActorClassName"]
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100_000, help="of environments, for each row")
    parser.add_argument("--inner", nargs="+", default=["none", "sync", "async"])
    parser.add_argument("--adopt", default="alias", choices=["alias", "copy"])
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found = []
    with cluster_of(NODES, STORE_MB):
        for inner in given.inner:
            found.append(canary(given.steps, inner, given.adopt))
            print(json.dumps(found[-1]), flush=True)
    if given.out is not None:
        given.out.write_text(json.dumps(found, indent=2) + "\n")
    return int(any(any(row["bad"].values()) for row in found))


if __name__ == "__main__":
    raise SystemExit(main())
