"""How long a publish holds the learner of a RayCollector whose actors roll out, and when weights arrive.

    python benchmarks/ray_publish.py [--models mlp resnet 100mb] [--trials 20] [--out ray_publish.json]

For each model, in one run on one local Ray node with two actors that collect all the time, it measures

- how long ``SyncWeights.publish`` holds the learner, with a RayBoardScheme and with TorchRL's own
  RayWeightSyncScheme, which waits until the actors have applied the weights;
- one contiguous copy of the same bytes, timed in turn with it;
- with a RayBoardScheme, how long it takes from the end of the publish until the version has come to the
  boards of both actors, which adopt it at their next rollout.

The figures are medians. Compare ratios, not seconds: machines are shared and noisy. Ray opens ports:
``unshare -n sh -c 'ip link set lo up; exec python benchmarks/ray_publish.py'`` keeps them to itself.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import warnings
from collections.abc import Callable
from contextlib import closing
from copy import deepcopy
from functools import partial
from pathlib import Path

import ray
import torch
from torchrl.collectors.distributed import RayCollector
from torchrl.envs import GymEnv
from torchrl.weight_update import RayWeightSyncScheme, WeightSyncScheme

from rlsync import RayBoardScheme, SyncWeights
from rlsync.cli.measure import MAP, MODELS, WARM_UP, BulkPolicy, make_trainer, timed

SCHEMES: dict[str, Callable[[], WeightSyncScheme]] = {
    "RayBoardScheme": RayBoardScheme,
    "RayWeightSyncScheme": RayWeightSyncScheme,
}
ACTORS = 2
ARRIVES_WITHIN_S = 60.0


def make_actors(policy: BulkPolicy, scheme: WeightSyncScheme, frames: int) -> RayCollector:
    """Actors that act with ``policy`` on CartPole, all the time."""
    return RayCollector(
        [partial(GymEnv, "CartPole-v1")] * ACTORS,
        policy,
        frames_per_batch=frames,
        total_frames=1_000_000_000,
        collector_kwargs={"track_policy_version": True},
        remote_configs={"num_cpus": 0.1, "memory": 1},
        weight_sync_schemes={"policy": scheme},
    )


def measure(name: str, policy: BulkPolicy, trials: int, frames: int) -> dict[str, float]:
    """One scheme, one model."""
    scheme = SCHEMES[name]()
    collector = make_actors(policy, scheme, frames)
    floats = sum(p.numel() for p in policy.parameters())
    source, target = torch.ones(floats), torch.zeros(floats)
    holds, copies, arrivals = [], [], []
    try:
        trainer = make_trainer(collector, deepcopy(policy))
        hook = SyncWeights(MAP)
        hook.register(trainer)
        batches = iter(collector)
        with closing(batches):
            for trial in range(WARM_UP + trials):
                next(batches)  # one actor is idle until the learner comes back, the other collects
                with torch.no_grad():
                    trainer.loss_module.actor_network.weights[0][0] = trial
                copies.append(timed(partial(target.copy_, source)))
                holds.append(timed(hook.publish))
                if isinstance(scheme, RayBoardScheme):
                    transport = scheme.publisher.transport
                    arrivals.append(timed(partial(transport.await_arrival, ARRIVES_WITHIN_S, range(ACTORS))))
    finally:
        collector.shutdown()
    hold_s, copy_s = statistics.median(holds[WARM_UP:]), statistics.median(copies[WARM_UP:])
    found = {"hold_ms": 1e3 * hold_s, "memcpy_ms": 1e3 * copy_s, "hold_per_memcpy": hold_s / copy_s}
    if arrivals:
        found["arrived_ms"] = 1e3 * statistics.median(arrivals[WARM_UP:])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=["mlp", "resnet", "100mb"])
    parser.add_argument("--schemes", nargs="+", choices=list(SCHEMES), default=list(SCHEMES))
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--frames", type=int, default=500, help="of each rollout")
    parser.add_argument("--store-mb", type=int, default=800, help="the size of Ray's object store")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    folder = tempfile.mkdtemp(prefix="ray")
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=given.store_mb * 2**20,
        _temp_dir=folder,
    )
    found: dict[str, dict[str, dict[str, float]]] = {}
    try:
        for model in given.models:
            for name in given.schemes:
                policy = BulkPolicy(*MODELS[model])
                row = measure(name, policy, given.trials, given.frames)
                found.setdefault(model, {})[name] = row
                print(model, name, " ".join(f"{key}={value:.3f}" for key, value in row.items()), flush=True)
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
    if given.out is not None:
        given.out.write_text(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
