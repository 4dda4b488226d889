"""How many frames a second one learner takes in from the nodes of a Ray cluster, and what that costs whom.

    python benchmarks/ray_intake.py [--nodes 0 1 2 4] [--link 1gbit] [--out intake.json]
    python benchmarks/ray_intake.py compression [--out compression.json]

**rollouts**: workers whose environments and player cost next to nothing, and a learner that takes batches and
does nothing with them. Rollouts are those of ``recipe=impala``: 20 steps of 16 environments, one in a batch.
For each kind of observation (pictures of 84 x 84 x 4 bytes, vectors of 17 floats) and each number of nodes
besides the learner's (0: an UnrollCollector, without Ray), each with one worker:

- frames and megabytes a second that the learner takes;
- processor time for each megabyte, of the learner's thread (all that it does for a rollout), of the rest of
  its process (Ray's threads), and of all other processes. On a machine with few cores the sum decides how
  many frames come; where the learner has cores to spare, its thread and its network do.

``--link`` limits what all nodes of this machine send each other, together, as ``tc`` of Linux does it. It
needs a network of its own: ``unshare -n sh -c 'ip link set lo up; exec python benchmarks/ray_intake.py'``.

**compression**: how small rollouts of Pong get, played at random, and how fast. It needs ``rlsync[atari]``,
and takes ``lz4`` and ``zstandard`` if they are installed, besides Python's own ``zlib``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
import warnings
import zlib
from collections.abc import Callable
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import torch
from blank_envs import BlankEnvs
from ray_parts import cluster_of, limited

from rlsync.runs.actors.cluster.collector import ClusterCollector
from rlsync.runs.actors.cluster.nodes import Placement
from rlsync.runs.actors.collector import UnrollCollector
from rlsync.runs.actors.envs.specs import AtariEnvs, make_venv
from rlsync.runs.actors.rollout_collector import RolloutCollector
from rlsync.runs.actors.settings import CollectSettings

STEPS, ENVS = 20, 16
OBSERVED = {
    "pictures": BlankEnvs((4, 84, 84), torch.uint8),
    "vectors": BlankEnvs((17,), torch.float32),
}
STORE_MB = 400
WARM_UP_S = 3.0
ROUNDS = 3


def collector_of(env: BlankEnvs, nodes: int) -> RolloutCollector:
    """Of so many nodes with a worker each; with none, a worker of this machine without Ray."""
    settings = CollectSettings(steps=STEPS, envs_per_worker=ENVS, seed=0)
    if nodes == 0:
        return UnrollCollector(env.player(), env, settings, num_workers=1)
    placement = Placement(beside_learner=False, min_nodes=nodes)
    return ClusterCollector(env.player(), env, settings, workers_per_node=1, placement=placement)


def measure(env: BlankEnvs, nodes: int, seconds: float) -> dict[str, float]:
    """One row; for more than no nodes a cluster is there."""
    collector = collector_of(env, nodes)
    rows = []
    try:
        batches = iter(collector)
        _take(batches, WARM_UP_S)
        for _ in range(ROUNDS):
            rows.append(_take(batches, seconds / ROUNDS))
    finally:
        collector.shutdown()
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def _take(batches: Any, seconds: float) -> dict[str, float]:
    """Take batches for so long."""
    frames = sent_bytes = 0
    began_s = time.monotonic()
    thread_s = time.thread_time()
    process_s = time.process_time()
    others_s = _others_s()
    while time.monotonic() - began_s < seconds:
        batch = next(batches)
        frames += batch["action"].numel()
        sent_bytes += sum(each.numel() * each.element_size() for each in batch.values(True, True))
    took_s = time.monotonic() - began_s
    thread_s = time.thread_time() - thread_s
    process_s = time.process_time() - process_s
    mb = sent_bytes / 1e6
    return {
        "frames_per_s": frames / took_s,
        "mb_per_s": mb / took_s,
        "learner_thread_us_per_frame": 1e6 * thread_s / frames,
        "learner_thread_ms_per_mb": 1e3 * thread_s / mb,
        "learner_rest_ms_per_mb": 1e3 * (process_s - thread_s) / mb,
        "others_ms_per_mb": 1e3 * (_others_s() - others_s) / mb,
    }


def _others_s() -> float:
    """Processor time of all processes that this one has started."""
    times = [each.cpu_times() for each in psutil.Process().children(recursive=True)]
    return sum(each.user + each.system for each in times)


def intake(
    kinds: list[str], nodes: list[int], seconds: float, link: str | None
) -> list[dict[str, Any]]:
    """All rows."""
    rows = []
    for count in nodes:
        there = cluster_of(1 + count, STORE_MB) if count else nullcontext()
        with there, limited(link) if link else nullcontext():
            for kind in kinds:
                row = {"observation": kind, "nodes": count, "link": link}
                rows.append(row | measure(OBSERVED[kind], count, seconds))
                print(json.dumps(rows[-1]), flush=True)
    return rows


def compression(steps: int = STEPS, rounds: int = 5) -> list[dict[str, Any]]:
    """How small the observations of rollouts get, and how many megabytes of them a second."""
    envs = make_venv(AtariEnvs("pong"), ENVS, seed=0)
    chance = torch.Generator().manual_seed(0)
    rollouts = []
    for _ in range(rounds):
        pictures = []
        for _ in range(steps):
            envs.send(torch.randint(6, (ENVS,), generator=chance))
            pictures.append(envs.recv().observation.clone())
        rollouts.append(torch.stack(pictures).numpy().tobytes())
    envs.close()
    rows = []
    for name, (pack, unpack) in packers().items():
        packed = [pack(rollout) for rollout in rollouts]
        assert [unpack(each) for each in packed] == rollouts
        row = {
            "packer": name,
            "times_smaller": sum(map(len, rollouts)) / sum(map(len, packed)),
            "pack_mb_per_s": _mb_per_s(pack, rollouts, rollouts),
            "unpack_mb_per_s": _mb_per_s(unpack, packed, rollouts),
        }
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


Pack = Callable[[bytes], bytes]


def packers() -> dict[str, tuple[Pack, Pack]]:
    """What packs and unpacks, by name."""
    each: dict[str, tuple[Pack, Pack]] = {
        "zlib 1": (lambda data: zlib.compress(data, 1), zlib.decompress)
    }
    if find_spec("lz4") is not None:
        import lz4.frame

        each["lz4"] = (lz4.frame.compress, lz4.frame.decompress)
    if find_spec("zstandard") is not None:
        import zstandard

        each["zstd 1"] = (
            zstandard.ZstdCompressor(1).compress,
            zstandard.ZstdDecompressor().decompress,
        )
    return each


def _mb_per_s(call: Pack, arguments: list[bytes], whole: list[bytes]) -> float:
    """Megabytes of what is packed that one core does in a second of its time; the best of all rollouts."""
    fastest = 0.0
    for argument, data in zip(arguments, whole, strict=True):
        began_s = time.thread_time()
        call(argument)
        fastest = max(fastest, len(data) / 1e6 / (time.thread_time() - began_s))
    return fastest


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", nargs="?", choices=["rollouts", "compression"], default="rollouts")
    parser.add_argument("--observed", nargs="+", choices=list(OBSERVED), default=list(OBSERVED))
    parser.add_argument("--nodes", nargs="+", type=int, default=[0, 1, 2, 4])
    parser.add_argument("--seconds", type=float, default=15.0, help="of each row")
    parser.add_argument("--link", help="what all nodes send each other a second, as 1gbit")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if options.what == "compression":
        rows = compression()
    else:
        rows = intake(options.observed, options.nodes, options.seconds, options.link)
    if options.out is not None:
        options.out.write_text(json.dumps({"cores": os.cpu_count(), "rows": rows}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
