"""TorchRL's RayCollector on Ray nodes of this machine: torn and misnamed steps, and speed beside node agents.

    python benchmarks/ray_collectors.py [--steps 100000] [--inner none sync async] [--adopt alias]
    python benchmarks/ray_collectors.py --recipes ppo sac [--seconds 20] [--rounds 2]

Every weight of the policy holds the number of the version, and the learner publishes without a pause, through
a RayBoardScheme. Each step reports the smallest and the largest weight that it was made with, and its stamp.
Different weights are a torn read, another stamp is a misnamed one. One actor is on each node. **inner** says
who acts: the actor itself, or two worker processes of a MultiSyncCollector or MultiAsyncCollector in it.

**--recipes** compares two ways in which a TorchRL policy can act on two nodes of two workers: the node
agents, which recipes use, and a RayCollector with a NodeBoardScheme in each actor. Both make the batches of
the recipe (``ppo`` waits for the newest version, ``sac`` does not), and the learner does nothing but publish
after each batch. Age is that of the frames, in versions, when a batch arrives. In the end one worker process
is killed: ``after_kill`` says what happened.

The exit status is 1 if a count under ``bad`` is not zero. Ray opens ports:
``unshare -n sh -c 'ip link set lo up; exec python benchmarks/ray_collectors.py'`` keeps them to itself.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import gymnasium
import ray
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from ray_parts import Leftovers, cluster_of, objects_left
from servers import Canary, Publishing, StillEnv
from torchrl.collectors import BaseCollector
from torchrl.collectors.distributed import RayCollector
from torchrl.envs import EnvBase, GymWrapper

from rlsync import NodeBoardScheme, RayBoardScheme
from rlsync.core.errors import first_line
from rlsync.runs.recipes.place import collect_settings
from rlsync.runs.recipes.registry import recipe_named
from rlsync.runs.recipes.run import Run
from rlsync.runs.recipes.settings import ClusterConfig, CollectorConfig, Config, EnvConfig

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


# ------------------------------------------------------------------ node agents beside RayCollector

#: The recipes: environment, kind of TorchRL's collector and the lag like it, frames of a batch.
COMPARED: dict[str, tuple[str, str, int | None, int]] = {
    "ppo": ("CartPole-v1", "sync", 0, 2048),
    "sac": ("Pendulum-v1", "async", None, 64),
}
PAIR = 2  # nodes, and workers on each
GOES_ON_WITHIN_S = 20.0


def make_env(name: str) -> EnvBase:
    envs = SyncVectorEnv([partial(gymnasium.make, name)] * 4, autoreset_mode=AutoresetMode.DISABLED)
    return GymWrapper(envs)


@contextmanager
def recipes_collector(
    way: str, recipe: str, address: str
) -> Iterator[tuple[BaseCollector, torch.nn.Module]]:
    """The collector of a recipe's policy on two nodes, and the policy that the learner has."""
    env, kind, lag, frames = COMPARED[recipe]
    entry = recipe_named(recipe)
    config = Config(
        env=EnvConfig(env, num_envs=4),
        collector=CollectorConfig(PAIR, frames, lag),
        cluster=ClusterConfig("ray", address, PAIR, min_nodes=PAIR),
        recipe=entry.settings(),
    )
    run = Run(config, entry.probe(config.env))
    policy, player = entry.acting(run, False)
    if way == "nodes":
        settings = replace(collect_settings(run), transitions=True)
        collector = run.place.collector(player, settings)
    else:
        scheme = {"policy": NodeBoardScheme()}
        collector = RayCollector(
            [partial(make_env, env)] * PAIR,
            policy,
            frames_per_batch=frames,
            total_frames=1 << 40,
            sync=kind == "sync",
            collector_class=kind,
            num_workers_per_collector=PAIR,
            collector_kwargs={"track_policy_version": True, "weight_sync_schemes": scheme},
            remote_configs={"num_cpus": 2, "memory": 1},
            weight_sync_schemes={"policy": RayBoardScheme()},
        )
    try:
        yield collector, policy
    finally:
        collector.shutdown(**({} if way == "nodes" else {"shutdown_ray": False}))


def compare(way: str, recipe: str, seconds: float, address: str, ours: Leftovers) -> dict[str, Any]:
    """One row: how fast frames arrive, how old they are, and what a killed worker does to the run."""
    with recipes_collector(way, recipe, address) as (collector, policy):
        batches = iter(collector)
        for _ in range(3):  # which do not count
            next(batches)
            collector.update_policy_weights_(policy)
        frames, ages, began, used = 0, [], time.monotonic(), _processor_s(ours)
        while time.monotonic() - began < seconds:
            batch = next(batches)
            ages.append((_newest(collector) - batch["policy_version"]).float().mean())
            frames += batch.numel()
            collector.update_policy_weights_(policy)
        took, used = time.monotonic() - began, _processor_s(ours) - used
        return {
            "way": way,
            "recipe": recipe,
            "frames_per_s": round(frames / took, 1),
            "frames_per_processor_s": round(frames / used, 1),
            "age_mean_versions": round(float(torch.stack(ages).mean()), 2),
            "after_kill": _after_kill(collector, batches, policy, _a_worker(ours)),
        }


def _newest(collector: BaseCollector) -> int:
    if isinstance(collector, RayCollector):
        return int(collector._weight_sync_schemes["policy"].publisher.version)
    return int(collector.policy_version)  # type: ignore[attr-defined]


def _after_kill(
    collector: BaseCollector, batches: Iterator[Any], policy: torch.nn.Module, pid: int
) -> str:
    os.kill(pid, signal.SIGKILL)
    began = time.monotonic()
    try:
        while time.monotonic() - began < GOES_ON_WITHIN_S:
            with deadline(2 * GOES_ON_WITHIN_S):
                next(batches)
            collector.update_policy_weights_(policy)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what the run would end with
        return (
            f"{type(error).__name__} after {time.monotonic() - began:.1f} s: {first_line(error)}"[
                :160
            ]
        )
    return "goes on"


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    def too_late(*_: Any) -> None:
        raise TimeoutError("no batch came")

    before = signal.signal(signal.SIGALRM, too_late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _a_worker(ours: Leftovers) -> int:
    """The worker process that has worked most."""
    times = {
        pid: _ticks(pid)
        for pid, command in ours.processes().items()
        if "multiprocessing" in command
    }
    return max(times, key=times.__getitem__)


def _processor_s(ours: Leftovers) -> float:
    """Processor time of this process and all that it started, Ray's included, seconds."""
    return sum(map(_ticks, [os.getpid(), *ours.processes()])) / os.sysconf("SC_CLK_TCK")


def _ticks(pid: int) -> int:
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])
    return 0  # it has ended


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100_000, help="of environments, for each row")
    parser.add_argument("--inner", nargs="+", default=["none", "sync", "async"])
    parser.add_argument("--adopt", default="alias", choices=["alias", "copy"])
    parser.add_argument(
        "--recipes", nargs="+", choices=COMPARED, default=[], help="compare, in place of counting"
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="of each turn of a comparison")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each way and recipe")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found: list[dict[str, Any]] = []
    if given.recipes:
        ours = Leftovers()
        with cluster_of(PAIR, STORE_MB) as cluster:
            for _ in range(given.rounds):
                for recipe, way in product(given.recipes, ("nodes", "RayCollector")):
                    found.append(
                        compare(way, recipe, given.seconds, cluster.address, ours) | {"bad": {}}
                    )
                    print(json.dumps(found[-1]), flush=True)
    else:
        with cluster_of(NODES, STORE_MB):
            for inner in given.inner:
                found.append(canary(given.steps, inner, given.adopt))
                print(json.dumps(found[-1]), flush=True)
    if given.out is not None:
        given.out.write_text(json.dumps(found, indent=2) + "\n")
    return int(any(any(row["bad"].values()) for row in found))


if __name__ == "__main__":
    raise SystemExit(main())
