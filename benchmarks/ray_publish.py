"""How long a publish holds the learner of a RayCollector whose actors roll out, and when weights arrive.

    python benchmarks/ray_publish.py [schemes] [--models mlp resnet 100mb] [--trials 20] [--out schemes.json]
    python benchmarks/ray_publish.py nodes [--nodes 1 2 3] [--models resnet] [--trials 20] [--out nodes.json]
    python benchmarks/ray_publish.py limits [--receivers 1 2 4 8 16] [--trials 20] [--out limits.json]

**schemes**: for each model, in one run on one Ray node with two actors that collect all the time:

- how long ``SyncWeights.publish`` holds the learner, with a RayBoardScheme and with TorchRL's own
  RayWeightSyncScheme, which waits until the actors have applied the weights;
- one contiguous copy of the same bytes, timed in turn with it;
- with a RayBoardScheme, how long it takes from the end of the publish until the version has come to the
  boards of both actors, which adopt it at their next rollout.

**nodes**: for each number of nodes, one worker on each, which looks for a newer version every millisecond:

- from the end of a publish until the last worker has adopted the version;
- the bytes that came to the stores of the other nodes for each version, as these stores count them. They left
  the learner's node, or another node that had them already;
- how long a worker that joins late takes until it has the newest version, its process having been started.

**limits**: for each number of receivers on one Ray node, each in a process of its own with a board and a
worker, for a model of 0.08 MB, so that only calls count:

- processor time of the mailbox, of the learner's process and of all receivers, for each version: the least of
  some groups of trials;
- from the end of a publish until the last worker has adopted the version.

``per_receiver`` is the slope of a line through these: what one more node costs. Then the mailbox's processor
time for one call of each kind, of many in a row; and for each size of an image, how long its put takes, a get on
the same node, and the check of its digest: the fastest of all trials.

The figures are medians if nothing else is said. Compare ratios, not seconds: machines are shared and noisy.
Ray opens ports: ``unshare -n sh -c 'ip link set lo up; exec python benchmarks/ray_publish.py'`` keeps them
to itself.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import shutil
import statistics
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import closing
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray
import torch
from publish_parts import MAP, MODELS, WARM_UP, BulkPolicy, make_trainer, timed
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from ray_parts import cluster_of, stores
from torchrl.collectors.distributed import RayCollector
from torchrl.envs import GymEnv
from torchrl.weight_update import RayWeightSyncScheme, WeightSyncScheme

from rlsync import RayBoardScheme, SyncWeights
from rlsync.core.ledger import Stamp
from rlsync.tensors.layout import Layout
from rlsync.tensors.leaves import Leaves
from rlsync.transport.contract import ReaderStatus
from rlsync.transport.ray.learner import RayTransport
from rlsync.transport.ray.mailbox_actor import Question, start_mailbox
from rlsync.transport.ray.receiver import BoardReport, RayHandle
from rlsync.transport.relay.image import digest_of
from rlsync.transport.relay.mailbox import Message, Request

SCHEMES: dict[str, Callable[[], WeightSyncScheme]] = {
    "RayBoardScheme": partial(RayBoardScheme, prove=False),
    "RayWeightSyncScheme": RayWeightSyncScheme,
}
ACTORS = 2
ARRIVES_WITHIN_S = 60.0
LATE = 3
IMAGES_MB = (0.1, 1.0, 6.3, 64.0)
SETTLES_S = 1.0
ROUNDS = 5


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
                    arrivals.append(
                        timed(partial(transport.await_arrival, ARRIVES_WITHIN_S, range(ACTORS)))
                    )
    finally:
        collector.shutdown()
    hold_s, copy_s = statistics.median(holds[WARM_UP:]), statistics.median(copies[WARM_UP:])
    found = {"hold_ms": 1e3 * hold_s, "memcpy_ms": 1e3 * copy_s, "hold_per_memcpy": hold_s / copy_s}
    if arrivals:
        found["arrived_ms"] = 1e3 * statistics.median(arrivals[WARM_UP:])
    return found


class Worker:
    """An actor with a board of its own, on a node. It adopts as soon as it can.

    Args:
        handle: of the learner's transport.
        number: the learner's number of it.
    """

    def __init__(self, handle: RayHandle, number: int) -> None:
        torch.set_num_threads(1)
        began = time.monotonic()
        self._adopted: dict[int, float] = {}
        self._acts: object = None
        self._subscriber = handle.subscribe(self._apply, number)
        self._subscriber.adopt()
        self.joined_s = time.monotonic() - began
        threading.Thread(target=self._run, daemon=True).start()

    def _apply(self, version: int, layout: Layout, views: Sequence[torch.Tensor]) -> bool:
        self._acts = views
        self._adopted[version] = time.monotonic()
        return True

    def _run(self) -> None:
        while not self._subscriber.closed_by_learner:
            self._subscriber.adopt()
            time.sleep(1e-3)

    def pid(self) -> int:
        return os.getpid()

    def joined(self) -> float:
        """How long it took until it had the newest version, seconds."""
        return self.joined_s

    def adopted(self, version: int) -> float:
        """When it adopted a version: all processes of a machine have the same monotonic clock."""
        return self._adopted[version]


def start_worker(handle: RayHandle, number: int, node_id: str) -> Any:
    """A :class:`Worker` on one node."""
    there = NodeAffinitySchedulingStrategy(node_id, soft=False)
    return ray.remote(Worker).options(num_cpus=0, scheduling_strategy=there).remote(handle, number)


def measure_nodes(count: int, policy: BulkPolicy, trials: int, store_mb: int) -> dict[str, float]:
    """One number of nodes, one model."""
    layout = Layout.build({"policy": Leaves(policy, "policy").specs()})
    tensors = [parameter.detach() for parameter in policy.parameters()]
    adopted, came = [], []
    with cluster_of(count, store_mb):
        here = ray.get_runtime_context().get_node_id()
        transport = RayTransport()
        try:
            transport.lay_out(layout)
            transport.publish(tensors, stamp=Stamp(1, 1))
            places = [node["NodeID"] for node in ray.nodes()]
            workers = [
                start_worker(transport.handle, n, node_id) for n, node_id in enumerate(places)
            ]
            ray.get([worker.joined.remote() for worker in workers])
            for version in range(2, 2 + WARM_UP + trials):
                before = _bytes_elsewhere(here)
                transport.publish(tensors, stamp=Stamp(1, version))
                published = time.monotonic()
                transport.wait(version, ARRIVES_WITHIN_S, range(count))
                last = max(ray.get([worker.adopted.remote(version) for worker in workers]))
                adopted.append(last - published)
                came.append(_bytes_elsewhere(here) - before)
            late = [start_worker(transport.handle, count + n, places[-1]) for n in range(LATE)]
            joined = ray.get([worker.joined.remote() for worker in late])
        finally:
            transport.close()
    return {
        "image_mb": layout.image_bytes / 1e6,
        "adopted_ms": 1e3 * statistics.median(adopted[WARM_UP:]),
        "came_elsewhere_mb": statistics.median(came[WARM_UP:]) / 1e6,
        "late_ms": 1e3 * statistics.median(joined),
    }


def measure_limits(receivers: list[int], trials: int, store_mb: int) -> dict[str, Any]:
    """What calls and copies cost on one node."""
    policy = BulkPolicy(*MODELS["mlp"])
    with cluster_of(1, store_mb):
        rows = {str(count): measure_calls(count, policy, trials) for count in receivers}
        calls = measure_mailbox(1000)
        images = {str(mb): measure_copies(mb, trials) for mb in IMAGES_MB}
    slopes = {}
    for name in rows[str(receivers[0])]:
        slope, _ = np.polyfit(receivers, [row[name] for row in rows.values()], 1)
        slopes[name] = float(slope)
    return {
        "seconds_each": SETTLES_S,
        "receivers": rows,
        "per_receiver": slopes,
        "calls": calls,
        "images_mb": images,
    }


def measure_calls(count: int, policy: BulkPolicy, trials: int) -> dict[str, float]:
    """So many receivers, a version after the other."""
    layout = Layout.build({"policy": Leaves(policy, "policy").specs()})
    tensors = [parameter.detach() for parameter in policy.parameters()]
    transport = RayTransport()
    try:
        transport.lay_out(layout)
        transport.publish(tensors, stamp=Stamp(1, 1))
        (place,) = ray.nodes()
        workers = [start_worker(transport.handle, n, place["NodeID"]) for n in range(count)]
        ray.get([worker.joined.remote() for worker in workers])
        mailbox = psutil.Process(ray.get(transport.mailbox.__ray_call__.remote(pid_of)))
        receivers = [psutil.Process(ray.get(worker.pid.remote())) for worker in workers]
        rows = []
        for version in range(2, 2 + WARM_UP + trials):
            before = [_cpu_s([mailbox]), _cpu_s([psutil.Process()]), _cpu_s(receivers)]
            transport.publish(tensors, stamp=Stamp(1, version))
            published = time.monotonic()
            time.sleep(SETTLES_S)  # all is reported then, and no call of this program is in between
            after = [_cpu_s([mailbox]), _cpu_s([psutil.Process()]), _cpu_s(receivers)]
            last = max(ray.get([worker.adopted.remote(version) for worker in workers]))
            spent = [1e3 * (b - a) for a, b in zip(before, after, strict=True)]
            rows.append([*spent, 1e3 * (last - published)])
    finally:
        transport.close()
        transport.end_mailbox()
    names = ("mailbox_cpu_ms", "learner_cpu_ms", "receivers_cpu_ms", "adopted_ms")
    rows = rows[WARM_UP:]
    # The clock of processor time ticks every 10 ms, so a few trials together; and the least of these.
    groups = [np.mean(each, axis=0) for each in np.array_split(rows, max(1, trials // 5))]
    figures = dict(zip(names, np.min(groups, axis=0).tolist(), strict=True))
    return figures | {"adopted_ms": float(np.median(rows, axis=0)[-1])}


def measure_mailbox(calls: int) -> dict[str, float]:
    """Processor time of a mailbox for one call: a report of a worker, and an ask that gets a message."""
    mailbox = start_mailbox()
    process = psutil.Process(ray.get(mailbox.__ray_call__.remote(pid_of)))
    image = ray.put(torch.ones(1000).numpy())
    status = ReaderStatus(0, os.getpid(), True, "running", 1, 0, 0.1)
    report = pickle.dumps(BoardReport("node", Stamp(1, 1), (status,), {}))
    message = Message(Stamp(1, 1), digest=0, image_bytes=1000, address=image)
    ray.get(mailbox.post.remote(message, Question()))
    figures = {}
    for name, call in (
        ("report_ms", lambda number: mailbox.report.remote(f"node {number}", report)),
        # one node: others would wait until it has the version
        ("ask_ms", lambda number: mailbox.ask.remote(Request("node"), 0)),
    ):
        each_s = []
        for _ in range(ROUNDS):
            spent_s = _cpu_s([process])
            for _ in range(0, calls, 100):  # of a hundred nodes
                ray.get([call(number) for number in range(100)])
            each_s.append((_cpu_s([process]) - spent_s) / calls)
        figures[name] = 1e3 * min(each_s)
    ray.kill(mailbox, no_restart=True)
    return figures


def pid_of(_: object) -> int:
    """The process of an actor."""
    return os.getpid()


def _cpu_s(processes: Sequence[psutil.Process]) -> float:
    times = [process.cpu_times() for process in processes]
    return sum(each.user + each.system for each in times)


def measure_copies(mb: float, trials: int) -> dict[str, float]:
    """One size of an image: the fastest of all trials, ms."""
    image = torch.ones(int(mb * 1e6 / 8), dtype=torch.int64).view(torch.uint8)
    times: dict[str, list[float]] = {"put_ms": [], "get_ms": [], "digest_ms": []}
    for _ in range(max(3, min(trials, int(1000 / mb)))):
        began = time.monotonic()
        address = ray.put(image.numpy())
        put = time.monotonic()
        array = ray.get(address)
        got = time.monotonic()
        digest_of(torch.from_numpy(array.copy()))
        ended = time.monotonic()
        del array, address
        times["put_ms"].append(1e3 * (put - began))
        times["get_ms"].append(1e3 * (got - put))
        times["digest_ms"].append(1e3 * (ended - got))
    return {name: min(each) for name, each in times.items()}


def _bytes_elsewhere(here: str) -> int:
    """Bytes that were ever put into the stores of other nodes."""
    return sum(store.cumulative_created_bytes for node, store in stores().items() if node != here)


def compare_schemes(given: argparse.Namespace) -> dict[str, Any]:
    """All models, with both schemes."""
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
                print(
                    model,
                    name,
                    " ".join(f"{key}={value:.3f}" for key, value in row.items()),
                    flush=True,
                )
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
    return found


def compare_nodes(given: argparse.Namespace) -> dict[str, Any]:
    """All models, on clusters of each size."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for model in given.models:
        for count in given.nodes:
            row = measure_nodes(count, BulkPolicy(*MODELS[model]), given.trials, given.store_mb)
            found.setdefault(model, {})[str(count)] = row
            print(
                model,
                count,
                " ".join(f"{key}={value:.3f}" for key, value in row.items()),
                flush=True,
            )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "what", nargs="?", choices=["schemes", "nodes", "limits"], default="schemes"
    )
    parser.add_argument("--nodes", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--receivers", nargs="+", type=int, default=[1, 2, 4, 8, 16])
    parser.add_argument(
        "--models", nargs="+", choices=list(MODELS), default=["mlp", "resnet", "100mb"]
    )
    parser.add_argument("--schemes", nargs="+", choices=list(SCHEMES), default=list(SCHEMES))
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--frames", type=int, default=500, help="of each rollout")
    parser.add_argument("--store-mb", type=int, default=800, help="the size of Ray's object store")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    if given.what == "limits":
        found = measure_limits(given.receivers, given.trials, given.store_mb)
        print(json.dumps(found, indent=2))
    elif given.what == "nodes":
        found = compare_nodes(given)
    else:
        found = compare_schemes(given)
    if given.out is not None:
        given.out.write_text(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
