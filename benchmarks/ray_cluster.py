"""The actor-learner on three Ray nodes of this machine: torn and misnamed steps, and ten minutes of faults.

    python benchmarks/ray_cluster.py canary [--steps 1000000] [--destinations 1 3] [--adopt alias copy]
    python benchmarks/ray_cluster.py storm  [--seconds 600] [--seed 0] [--out storm.json]

Every weight of the player holds the number of the version. The learner publishes without a pause. Each step
of each environment reports the smallest and the largest weight that it was made with, and its stamp.
Different weights are a torn read, another stamp is a misnamed one. Each worker's rollouts are counted: none
may be missing or out of order, and versions never fall.

**canary**: one row for each number of destinations and each way to adopt, with so many environment steps.

**storm**: at random moments, processes are killed (SIGKILL) or stopped and continued (SIGSTOP, SIGCONT):
workers, agents, the mailbox, and the raylets of all nodes but the learner's. A node that was lost is replaced
by a new one. The seed decides what happens when, and to which of the processes that there are then.
``--plan`` prints that and runs nothing. In the end every node must send frames of the newest version
within a deadline, and no process, object or memory file may be left.

The exit status is 1 if a count under ``bad`` is not zero. Ray opens ports:
``unshare -n sh -c 'ip link set lo up; exec python benchmarks/ray_cluster.py canary'`` keeps them to itself.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch
from canary_player import CanaryPlayer
from ray._private import ray_constants
from ray.cluster_utils import Cluster
from ray_parts import Leftovers, add_node, cluster_of, objects_left
from soak import board_mappings, descriptors

from rlsync.core.errors import RlsyncError, WorkerLost
from rlsync.runs.actors.cluster.collector import ClusterCollector
from rlsync.runs.actors.cluster.nodes import Placement
from rlsync.runs.actors.envs.specs import GymnasiumEnvs
from rlsync.runs.actors.settings import CollectSettings
from rlsync.runs.actors.supervision import Restarts
from rlsync.transport.relay.ends import KEPT_IMAGES

NODES, WORKERS, ENVS, STEPS = 3, 2, 16, 20
STORE_MB = 100
ARRIVES_WITHIN_S = 120.0
PUBLISH_EVERY_S = 2e-3
LEAST_VERSIONS = 5  # that must have acted, however few steps are asked for

#: A storm kills more often than the defaults allow.
ENDLESS = Restarts(at_most=10_000, first_pause_s=0.2, longest_pause_s=1.0)

#: How long an agent, and a worker, may be silent. Long stops are longer than both.
NODE_SILENT_S, WORKER_SILENT_S = 20.0, 60.0
SHORT_STOP_S, LONG_STOP_S, LONG_STOPS = 10.0, 75.0, 0.15

#: How often each kind of process is struck, on average, seconds.
EVERY_S = {
    ("kill", "worker"): 8.0,
    ("stop", "worker"): 8.0,
    ("kill", "agent"): 40.0,
    ("stop", "agent"): 40.0,
    ("kill", "mailbox"): 50.0,
    ("stop", "mailbox"): 50.0,
    ("kill", "raylet"): 60.0,
    ("stop", "raylet"): 60.0,
}
LONGEST_ABSENCE_S = 10.0


# ------------------------------------------------------------------------------------------ the learner


class Census:
    """Counts what is wrong with frames and with the order of rollouts."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.bad: Counter[str] = Counter(
            dict.fromkeys(("torn", "misnamed", "fell", "not_published", "missing", "doubled"), 0)
        )
        self.versions: set[int] = set()
        self._last: dict[tuple[str, int, int], tuple[int, int]] = {}

    def take(self, collector: ClusterCollector) -> None:
        """Count the next batch, which is one rollout."""
        batch = next(collector.batches)
        newest = collector.policy_version
        stamps, low, high = batch["policy_version"], batch["low"], batch["high"]
        (origin,) = collector.last_origins
        self.bad["torn"] += int((low != high).sum())
        self.bad["misnamed"] += int((stamps != low).sum())
        self.bad["not_published"] += int((stamps > newest).sum())
        who = origin.node, origin.pid, origin.worker
        number, version = self._last.get(who, (origin.number - 1, 1))
        self.bad["missing"] += origin.number > number + 1
        self.bad["doubled"] += origin.number <= number
        self.bad["fell"] += int(stamps.min()) < version
        self._last[who] = origin.number, int(stamps.max())
        self.versions |= set(stamps.unique().tolist())
        self.counts["steps"] += stamps.numel()
        self.counts["rollouts"] += 1

    def newest_of(self, collector: ClusterCollector) -> dict[str, int]:
        """The newest version that has come back from each node that acts."""
        acting = {place.node_id for place in collector.nodes}
        found = dict.fromkeys(acting, 0)
        for (node, *_), (_, version) in self._last.items():
            if node in acting:
                found[node] = max(found[node], version)
        return found


class Collector(ClusterCollector):
    """With one iterator, and with a player to fill."""

    def __init__(self, destinations: int, settings: CollectSettings, placement: Placement) -> None:
        self.canary = CanaryPlayer(destinations)
        super().__init__(
            self.canary,
            GymnasiumEnvs("CartPole-v1"),
            settings,
            workers_per_node=WORKERS,
            placement=placement,
        )
        self.batches = iter(self)

    def publish(self) -> None:
        """Publish weights that hold the number of their version."""
        self.canary.fill(self.policy_version + 1)
        self.update_policy_weights_()


@contextmanager
def publishing(collector: Collector) -> Iterator[Counter[str]]:
    """Publish in a thread while the block runs."""
    counts: Counter[str] = Counter()
    stop = threading.Event()

    def run() -> None:
        while not stop.wait(PUBLISH_EVERY_S):
            collector.publish()
            counts["publishes"] += 1
            counts["kept_peak"] = max(
                counts["kept_peak"], len(collector.transport.thread.sender.kept)
            )

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield counts
    finally:
        stop.set()
        thread.join()


# ------------------------------------------------------------------------------------------- the canary


def canary(steps: int, destinations: int, adopt: str) -> dict[str, Any]:
    """One row; a cluster is there."""
    census = Census()
    settings = CollectSettings(steps=STEPS, envs_per_worker=ENVS, adopt=adopt, seed=0)
    collector = Collector(destinations, settings, Placement(min_nodes=NODES))
    try:
        began = time.monotonic()
        with publishing(collector) as published:
            while census.counts["steps"] < steps or len(census.versions) < LEAST_VERSIONS:
                census.take(collector)
        seconds = time.monotonic() - began
        nodes = len(census.newest_of(collector))
    finally:
        collector.shutdown()
    return {
        "nodes": nodes,
        "destinations": destinations,
        "adopt": adopt,
        **census.counts,
        "publishes": published["publishes"],
        "versions_that_acted": len(census.versions),
        "seconds": round(seconds, 1),
        "bad": {
            **census.bad,
            "images_above_bound": max(0, published["kept_peak"] - KEPT_IMAGES),
            "objects_left": objects_left(ARRIVES_WITHIN_S),
        },
    }


def canaries(steps: int, destinations: list[int], ways: list[str]) -> list[dict[str, Any]]:
    """All rows, on one cluster."""
    rows = []
    with cluster_of(NODES, STORE_MB):
        for count in destinations:
            for adopt in ways:
                rows.append(canary(steps, count, adopt))
                print(json.dumps(rows[-1]), flush=True)
    return rows


# -------------------------------------------------------------------------------------------- the storm


@dataclass(frozen=True, slots=True)
class Strike:
    """What happens to one process.

    Args:
        at_s: when, seconds after the beginning.
        how: "kill" or "stop".
        whom: the kind of process.
        pick: which of those that there are then, from 0 to 1.
        for_s: how long it is stopped, or how long a killed node is missing, seconds.
    """

    at_s: float
    how: str
    whom: str
    pick: float
    for_s: float


def plan(seconds: float, seed: int) -> list[Strike]:
    """What happens when; the same for the same arguments."""
    found = []
    for (how, whom), every_s in EVERY_S.items():
        chance = random.Random(f"{seed} {how} {whom}")
        at_s = chance.expovariate(1 / every_s)
        while at_s < seconds:
            longest = LONGEST_ABSENCE_S if how == "kill" else SHORT_STOP_S
            for_s = chance.uniform(0, longest)
            if how == "stop" and chance.random() < LONG_STOPS:
                for_s = LONG_STOP_S
            found.append(
                Strike(round(at_s, 3), how, whom, round(chance.random(), 3), round(for_s, 3))
            )
            at_s += chance.expovariate(1 / every_s)
    return sorted(found, key=lambda strike: strike.at_s)


class Storm:
    """Strikes in a thread, while the learner learns in its own.

    Args:
        cluster: the nodes. The head is spared.
        ours: which processes belong to this program.
        strikes: what happens when.
    """

    def __init__(self, cluster: Cluster, ours: Leftovers, strikes: list[Strike]) -> None:
        self.counts: Counter[str] = Counter()
        self.failure: BaseException | None = None
        self._cluster = cluster
        self._ours = ours
        self._strikes = strikes
        self._goes_on: dict[int, float] = {}
        self._comes_back = 0.0  # when the next node may join
        self._thread = threading.Thread(target=self._run)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def over(self) -> bool:
        """Replace nodes that were lost, which only the main thread may do.

        Returns:
            Whether all has happened, all processes go on, and all nodes were replaced.
        """
        ended = not self._thread.is_alive()
        nodes = self._cluster.list_all_nodes()[1:]
        for node in [node for node in nodes if _raylet(node).poll() is not None]:
            self._cluster.remove_node(node, allow_graceful=False)
        if len(self._cluster.list_all_nodes()) < NODES and (
            ended or time.monotonic() >= self._comes_back
        ):
            add_node(self._cluster, STORE_MB)
            self.counts["nodes added"] += 1
        return ended and len(self._cluster.list_all_nodes()) == NODES

    def join(self) -> None:
        """Wait until it is over."""
        self._thread.join()

    def _run(self) -> None:
        try:
            began = time.monotonic()
            for strike in self._strikes:
                while (now := time.monotonic()) < began + strike.at_s:
                    self._tend(now)
                    time.sleep(0.05)
                self._strike(strike)
            self._tend(float("inf"))
        except BaseException as failure:  # noqa: BLE001  # the learner's thread raises it
            self.failure = failure

    def _strike(self, strike: Strike) -> None:
        pids = {"raylet": self._raylets, "worker": self._workers}.get(
            strike.whom, partial(self._actors, strike.whom)
        )()
        if not pids:
            self.counts["nobody there"] += 1
            return
        pid = pids[int(strike.pick * len(pids))]
        if strike.how == "stop" and pid in self._goes_on:
            return
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL if strike.how == "kill" else signal.SIGSTOP)
            self.counts[f"{strike.whom} {strike.how}s"] += 1
            if strike.how == "stop":
                self._goes_on[pid] = time.monotonic() + strike.for_s
            elif strike.whom == "raylet":
                self._comes_back = time.monotonic() + strike.for_s

    def _tend(self, now: float) -> None:
        """Continue processes that are due."""
        for pid in [pid for pid, due in self._goes_on.items() if due <= now]:
            del self._goes_on[pid]
            if self._ours.has(pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def _raylets(self) -> list[int]:
        nodes = self._cluster.list_all_nodes()[1:]
        return [_raylet(node).pid for node in nodes if _raylet(node).poll() is None]

    def _actors(self, kind: str) -> list[int]:
        title = {"agent": "ray::NodeAgent", "mailbox": "ray::MailboxActor"}[kind]
        return sorted(
            pid for pid, command in self._ours.processes().items() if command.startswith(title)
        )

    def _workers(self) -> list[int]:
        found = self._ours.processes()
        servers = {pid for pid, command in found.items() if "multiprocessing.forkserver" in command}
        return sorted(pid for pid in servers if _parent(pid) in servers)


def _raylet(node: Any) -> Any:
    return node.all_processes[ray_constants.PROCESS_TYPE_RAYLET][0].process


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


class Training:
    """A learner that goes on through everything. When its run ends, the next one begins."""

    def __init__(self) -> None:
        self.census = Census()
        self.counts: Counter[str] = Counter()
        self.bad: Counter[str] = Counter({"ended_without_a_reason": 0})
        self.endings: list[str] = []
        self._collector: Collector | None = None

    def until(self, over: Callable[[Collector], bool], timeout_s: float = float("inf")) -> bool:
        """Take and publish until something holds. Returns whether it does in time."""
        until_s = time.monotonic() + timeout_s
        while time.monotonic() < until_s:
            try:
                if self._collector is None:
                    placement = Placement(restarts=ENDLESS, node_timeout_s=NODE_SILENT_S)
                    settings = CollectSettings(
                        steps=STEPS,
                        envs_per_worker=ENVS,
                        restarts=ENDLESS,
                        silent_timeout_s=WORKER_SILENT_S,
                    )
                    self._collector = Collector(2, settings, placement)
                self._collector.publish()
                self.census.take(self._collector)
                self.counts["kept_peak"] = max(
                    self.counts["kept_peak"], len(self._collector.transport.thread.sender.kept)
                )
                if over(self._collector):
                    return True
            except RlsyncError as ended:
                self.endings.append(str(ended))
                self.bad["ended_without_a_reason"] += not (
                    isinstance(ended, WorkerLost) and "node" in ended.what
                )
                print(ended, flush=True)
                self.end()
        return False

    def end(self) -> None:
        """End the run that there is."""
        collector, self._collector = self._collector, None
        if collector is not None:
            self.counts.update(
                published=collector.policy_version,
                agents_joined=collector.tally.joined,
                agents_lost=collector.tally.lost,
                rollouts_lost=collector.tally.rollouts_lost,
            )
            collector.shutdown()


def storm(seconds: float, seed: int) -> dict[str, Any]:
    """One run; see the top of this file."""
    ours = Leftovers()
    training, strikes = Training(), plan(seconds, seed)
    print(f"seed {seed}, {len(strikes)} strikes in {seconds:g} s", flush=True)
    began = time.monotonic()
    with cluster_of(NODES, STORE_MB) as cluster:
        training.until(lambda collector: len(collector.nodes) == NODES, ARRIVES_WITHIN_S)
        faults = Storm(cluster, ours, strikes)
        faults.start()
        try:
            training.until(lambda _: faults.over())
        finally:
            faults.join()
        if faults.failure is not None:
            raise faults.failure
        settled = training.until(
            lambda c: faults.over() and len(c.nodes) == NODES, ARRIVES_WITHIN_S
        )
        goal = 0 if training._collector is None else training._collector.policy_version
        settled &= training.until(
            lambda c: len(c.nodes) == NODES and min(training.census.newest_of(c).values()) > goal,
            ARRIVES_WITHIN_S,
        )
        training.end()
        left_objects = objects_left(ARRIVES_WITHIN_S)
    left = ours.await_none(ARRIVES_WITHIN_S)
    counts = {**training.census.counts, **training.counts}
    kept_peak = counts.pop("kept_peak")
    return {
        "seconds": round(time.monotonic() - began, 1),
        "seed": seed,
        "struck": dict(sorted(faults.counts.items())),
        "counts": {
            **counts,
            "versions_that_acted": len(training.census.versions),
            "runs_that_ended": len(training.endings),
        },
        "bad": {
            **training.census.bad,
            **training.bad,
            "not_arrived": int(not settled),
            "images_above_bound": max(0, kept_peak - KEPT_IMAGES),
            "objects_left": left_objects,
            "processes_and_files_left": len(left),
            "leaked_mappings": board_mappings(),
            "leaked_memory_files": sum("/memfd:" in target for target in descriptors()),
        },
        "left": left,
        "endings": training.endings,
        "host": {
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "ray": ray.__version__,
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["canary", "storm"])
    parser.add_argument(
        "--steps", type=int, default=1_000_000, help="of environments, for each row"
    )
    parser.add_argument("--destinations", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--adopt", nargs="+", default=["alias", "copy"], choices=["alias", "copy"])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--plan", action="store_true", help="print what a storm would do, and run nothing"
    )
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if given.what == "storm" and given.plan:
        print(*plan(given.seconds, given.seed), sep="\n")
        return 0
    if given.what == "storm":
        found = [storm(given.seconds, given.seed)]
        print(json.dumps(found[0], indent=2))
    else:
        found = canaries(given.steps, given.destinations, given.adopt)
    if given.out is not None:
        given.out.write_text(json.dumps(found, indent=2) + "\n")
    return int(any(any(row["bad"].values()) for row in found))


if __name__ == "__main__":
    raise SystemExit(main())
