"""Agents that outlive their learner, on three nodes of one Ray: test_crew.py runs these tests.

They share one Ray, and run in this order.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util import list_named_actors

from rlsync.core.errors import ConfigError
from rlsync.runs.actors.cluster.collector import ClusterCollector
from rlsync.runs.actors.cluster.crew import Crew
from rlsync.runs.cli.main import main
from tests.tools.crew_learner import ENVS, NODES, STEPS, collector_of, publish
from tests.tools.parts.ray_cluster import add_node, cluster_of
from tests.tools.processes import descendant_pids, is_alive, wait_until
from tests.torchrl_plugin.test_stop import saved_frames

pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.timeout(400)]

#: How long anything may take. A loaded machine takes half a minute to start an agent and its workers.
WAIT_S = 200.0
ROOT = Path(__file__).parents[2]
OPTIONS = {"object_store_memory": 80 * 2**20, "num_cpus": 1}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A head, where learners are, and two nodes for workers."""
    with cluster_of(1, **OPTIONS, _system_config={"worker_niceness": 0}) as made:
        for _ in range(NODES):
            add_node(made, **OPTIONS, resources={"rollouts": 1})
        made.wait_for_nodes()
        yield made


def connect(cluster: Cluster) -> None:
    if not ray.is_initialized():
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")


def vanish(collector: ClusterCollector) -> None:
    """Lose a learner of this process as if it had been killed: it says nothing, and its actors end."""
    thread = collector.transport.thread
    with thread._wake:
        thread._closed = True
        thread._wake.notify()
    thread._thread.join(WAIT_S)
    assert not thread._thread.is_alive()
    collector._closed = True  # and it does nothing when it is deleted
    ray.shutdown()


def agents() -> list[str]:
    """The names of the agents that live."""
    return [it["name"] for it in list_named_actors(all_namespaces=True) if it["namespace"] == "rlsync"]


def heard() -> int:
    """The newest version that an agent has heard of."""
    cards = [ray.get_actor(name, "rlsync").state.remote() for name in agents()]
    return max(card.stamp.version for card in ray.get(cards, timeout=WAIT_S))


def pids_of(collector: ClusterCollector) -> set[int]:
    """The agents and their workers."""
    found = {node.pid for node in collector._nodes if node.pid is not None}
    assert len(found) == NODES
    return found.union(*map(descendant_pids, found))


def all_gone(pids: set[int]) -> bool:
    return wait_until(lambda: not any(map(is_alive, pids)), WAIT_S, 0.1)


@pytest.fixture(scope="module")
def killed(cluster: Cluster) -> int:
    """The newest version that a learner is known to have published before it was killed."""
    command = [sys.executable, "-m", "tests.tools.crew_learner", cluster.address, "crew a"]
    started = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert started.stdout is not None
    newest = 0
    for line in started.stdout:
        newest = int(line)
        if newest >= 20:
            break
    assert newest >= 20, "it ended by itself"
    assert wait_until(lambda: heard() >= newest, WAIT_S, 0.1)
    with pytest.raises(ConfigError, match="belong to a learner that lives"):
        Crew("crew a", keep_s=600.0).left(alone_within_s=0.0)
    started.kill()
    started.wait(WAIT_S)
    started.stdout.close()
    return newest


@pytest.fixture(scope="module")
def follower(killed: int) -> ClusterCollector:
    """The learner that resumes. The next test loses its connection."""
    return collector_of(Crew("crew a", keep_s=600.0))


@pytest.mark.thorough
def test_the_next_learner_takes_the_living_agents_over_with_exact_stamps(
    killed: int, follower: ClusterCollector
) -> None:
    pids, first = pids_of(follower), follower.policy_version
    assert follower.tally.followed == follower.tally.joined == NODES
    assert follower.publisher.ledger.generation == 2
    assert first > killed, "no number is given again"
    heard: dict[str, int] = {}
    old = 0
    deadline, batches = time.monotonic() + WAIT_S, iter(follower)
    publish(follower)
    while len(heard) < NODES:
        assert time.monotonic() < deadline, heard
        batch = next(batches)
        (origin,) = follower.last_origins
        stamps, low, high = batch["policy_version"], batch["canary_min"], batch["canary_max"]
        assert (low == high).all(), "a torn read"
        assert ((stamps == low) | ((stamps == first) & (low == 1.0))).all(), "a stamp that lies"
        (version,) = stamps.unique().tolist()
        assert version <= follower.policy_version
        assert origin.number > 0, "the same workers count on"
        if version < first:
            old += 1
            assert origin.node not in heard, "versions never fall"
        if version > first:
            heard[origin.node] = version
        publish(follower)
    assert old > 0, "what the rings held is good"
    assert pids_of(follower) == pids
    assert follower.tally.lost == follower.tally.rollouts_lost == 0
    assert all(node.counters.worker_wait_s >= 0 for node in follower._nodes if node.counters is not None)


@pytest.mark.thorough
def test_agents_that_do_other_work_are_replaced_and_those_that_nobody_takes_over_end(
    cluster: Cluster, follower: ClusterCollector, caplog: pytest.LogCaptureFixture
) -> None:
    before, version = pids_of(follower), follower.policy_version
    assert wait_until(lambda: heard() >= version, WAIT_S, 0.1)
    vanish(follower)
    connect(cluster)
    with caplog.at_level(logging.WARNING):
        third = collector_of(Crew("crew a", keep_s=2.0), steps=STEPS + 1)
    assert caplog.text.count("it has another layout, shape") == NODES
    pids = pids_of(third)
    assert not pids & before
    assert all_gone(before), "those that were replaced have ended"
    assert third.publisher.ledger.generation == 3
    assert third.policy_version > version
    assert next(iter(third))["policy_version"].numel() == (STEPS + 1) * ENVS
    assert len(agents()) == NODES

    vanish(third)
    assert all_gone(pids), "they end when their time is up"
    connect(cluster)
    assert wait_until(lambda: agents() == [], WAIT_S, 0.1)


@pytest.mark.thorough
def test_a_run_is_killed_and_resumed_with_its_agents_and_then_without(
    cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["recipe=impala", "env=cartpole", "cluster=ray", f"cluster.address={cluster.address}"]
    words += ["+cluster.resources.rollouts=1", "cluster.workers_per_node=1", "cluster.min_nodes=2"]
    words += ["logger=none", "recipe.target_return=null", "checkpoint_every_frames=500"]
    endless = "recipe.total_frames=100000000"
    first = Run(tmp_path / "first", *words, endless, "cluster.keep_agents=true")
    try:
        first.wait_until(
            lambda: (first.folder / "checkpoint").is_dir() and len(first.workers(capsys)) == NODES
        )
        workers = first.workers(capsys)
    finally:
        first.kill()

    second = Run(tmp_path / "second", f"resume={first.folder}")
    try:
        second.wait_until(lambda: len(second.workers(capsys)) == NODES)
        assert second.workers(capsys) == workers, "the same processes"
    finally:
        second.kill()

    goal = saved_frames(first.folder) + 1000  # how far the first one came is not known
    third = Run(
        tmp_path / "third",
        f"resume={first.folder}",
        "cluster.keep_agents=false",
        f"recipe.total_frames={goal}",
    )
    try:
        assert third.process.wait(WAIT_S) == 0, third.output
    finally:
        third.kill()
    assert third.output.count("agents are not to be kept") == NODES
    assert all_gone(workers)
    assert wait_until(lambda: agents() == [], WAIT_S, 0.1)


class Run:
    """One ``rlsync train`` on the cluster that runs."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.folder = folder
        self._said = folder.with_suffix(".log")
        with self._said.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "rlsync", "train", f"run_dir={folder}", *words],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    @property
    def output(self) -> str:
        return self._said.read_text()

    def workers(self, capsys: pytest.CaptureFixture[str]) -> set[int]:
        """The processes of the workers, as ``rlsync status`` lists them."""
        main(["status", str(self.folder)])
        return {
            int(pid) for pid in re.findall(r"^  worker .*pid (\d+)", capsys.readouterr().out, re.MULTILINE)
        }

    def wait_until(self, reached: Callable[[], bool]) -> None:
        """Wait for something while the run lasts."""
        came = wait_until(lambda: self.process.poll() is not None or reached(), WAIT_S, 0.5)
        assert came, self.output
        assert self.process.poll() is None, self.output

    def kill(self) -> None:
        if self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait(WAIT_S)
