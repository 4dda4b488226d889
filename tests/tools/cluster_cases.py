"""The actor-learner on several nodes of one Ray, in a network of its own: test_cluster.py runs these tests.

They share one Ray and one collector, and run in this order: each leaves the collector as healthy as it was,
and the last one ends its nodes.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster
from tensordict import TensorDictBase

from rlsync.core.errors import WorkerLost
from rlsync.runs.actors.cluster.collector import ClusterCollector
from rlsync.runs.actors.cluster.node import Node
from rlsync.runs.actors.cluster.nodes import Placement
from rlsync.runs.actors.cluster.session import ClusterStatus
from rlsync.runs.actors.envs.specs import GymnasiumEnvs
from rlsync.runs.actors.settings import CollectSettings
from rlsync.runs.actors.supervision import Restarts
from tests.tools.broken_player import BrokenPlayer
from tests.tools.cluster_player import CanaryPlayer
from tests.tools.parts.ray_cluster import add_node
from tests.tools.processes import descendant_pids, is_alive, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.timeout(300)]

#: How long anything may take. A loaded machine takes half a minute to start an agent and its workers.
WAIT_S = 200.0
#: How long an agent may give no answer: longer than a loaded machine keeps it from answering.
SILENT_S = 30.0
WORKERS, STEPS, ENVS, CREDITS, SLOTS = 2, 5, 2, 2, 4
NODE = {"num_cpus": 1, "resources": {"rollouts": 1}, "object_store_memory": 80 * 2**20}
QUICK = Restarts(at_most=5, first_pause_s=0.1, longest_pause_s=0.5)


@pytest.fixture(scope="module")
def cluster(one_node: Cluster) -> Iterator[Cluster]:
    """A head, where the learner is, and two nodes for workers."""
    for _ in range(2):
        add_node(one_node, **NODE)
    one_node.wait_for_nodes()
    yield one_node
    for node in one_node.list_all_nodes()[1:]:
        one_node.remove_node(node, allow_graceful=False)


@pytest.fixture(scope="module")
def third_node(cluster: Cluster) -> object:
    """A node that the first test that asks for it adds; its Ray does not count as left by that test."""
    return add_node(cluster, **NODE)


@pytest.fixture(scope="module")
def collector(cluster: Cluster) -> Iterator[ClusterCollector]:
    made = collector_of(CanaryPlayer())
    try:
        yield made
    finally:
        made.shutdown()


def collector_of(player: CanaryPlayer) -> ClusterCollector:
    return ClusterCollector(
        player,
        GymnasiumEnvs("CartPole-v1"),
        CollectSettings(steps=STEPS, envs_per_worker=ENVS, slots=SLOTS, seed=5, restarts=QUICK),
        workers_per_node=WORKERS,
        placement=Placement(
            resources={"rollouts": 1.0}, min_nodes=2, credits=CREDITS, restarts=QUICK, node_timeout_s=SILENT_S
        ),
    )


TORN, MISNAMED = "a torn read", "a stamp that lies"


class Learner:
    """Takes batches and publishes, and holds every frame to the laws."""

    def __init__(self, collector: ClusterCollector) -> None:
        self.collector = collector
        self.last: dict[tuple[str, int, int], int] = {}
        self.newest: dict[tuple[str, int, int], int] = {}
        self.frames = 0
        self._batches = iter(collector)

    def step(self) -> TensorDictBase:
        batch = next(self._batches)
        stamps = batch["policy_version"]
        assert (batch["canary_min"] == batch["canary_max"]).all(), TORN
        assert (stamps == batch["canary_min"]).all(), MISNAMED
        (origin,) = self.collector.last_origins
        who = origin.node, origin.pid, origin.worker
        assert origin.number == self.last.get(who, origin.number - 1) + 1, (
            "a rollout is missing, or too early"
        )
        (version,) = stamps.unique().tolist()
        assert self.newest.get(who, 1) <= version <= self.collector.policy_version, "versions never fall"
        self.last[who], self.newest[who] = origin.number, version
        self.frames += stamps.numel()
        return batch

    def publish(self) -> int:
        player = self.collector.player
        assert isinstance(player, CanaryPlayer)
        player.weights.fill(self.collector.policy_version + 1)
        self.collector.update_policy_weights_()
        return self.collector.policy_version

    def go_on(self, until: Callable[[], bool], rest_s: float = 0.05) -> None:
        """Take and publish until something has happened; what is waited for needs the processors, too."""
        deadline = time.monotonic() + WAIT_S
        while not until():
            assert time.monotonic() < deadline, f"not in time; {self.collector.tally}"
            self.step()
            self.publish()
            time.sleep(rest_s)

    def hears_from(self, nodes: set[str]) -> Callable[[], bool]:
        """Whether each of the nodes has sent a frame of weights that are published now, or of newer ones."""
        heard: set[str] = set()
        version = self.publish()

        def heard_all() -> bool:
            for origin in self.collector.last_origins:
                if self.newest[origin.node, origin.pid, origin.worker] >= version:
                    heard.add(origin.node)
            return nodes <= heard

        return heard_all

    def acts_on(self, nodes: set[str]) -> None:
        """All go on, with new weights, on these nodes."""
        assert {place.node_id for place in self.collector.nodes} == nodes
        self.go_on(self.hears_from(nodes))


@pytest.fixture(scope="module")
def learner(collector: ClusterCollector) -> Learner:
    return Learner(collector)


def node_ids(collector: ClusterCollector) -> set[str]:
    return {place.node_id for place in collector.nodes}


def node_of(collector: ClusterCollector, seat: int) -> Node:
    (found,) = (node for node in collector._nodes if node.seat == seat)
    return found


def pid_of(node: Node) -> int:
    assert node.pid is not None, "its workers were ready"
    return node.pid


@pytest.mark.thorough
def test_the_canary_finds_versions_that_agents_tear_or_misname(cluster: Cluster) -> None:
    broken = collector_of(BrokenPlayer())
    try:
        learner, found = Learner(broken), set()
        deadline = time.monotonic() + WAIT_S
        while found < {TORN, MISNAMED}:
            assert time.monotonic() < deadline, found
            learner.publish()
            try:
                learner.step()
            except AssertionError as error:
                found.add(str(error).splitlines()[0])
                learner.last.clear()  # that rollout was not noted
    finally:
        broken.shutdown()
    assert found == {TORN, MISNAMED}


def test_every_frame_of_every_node_names_the_weights_that_made_it(learner: Learner) -> None:
    collector = learner.collector
    assert len(collector.nodes) == 2, "the learner's own node lacks the resource"
    for _ in range(3):
        learner.acts_on(node_ids(collector))
    assert collector.num_workers == 2 * WORKERS
    assert {worker for *_, worker in learner.last} == set(range(WORKERS))
    assert collector.tally.lost == 0


def test_a_learner_that_takes_nothing_stops_the_nodes(learner: Learner) -> None:
    collector = learner.collector
    learner.step()

    def written() -> int:
        """Rollouts that one node's workers have completed, as its agent counts them."""
        return sum(status.written for status in ray_counts(collector))

    deadline, before = time.monotonic() + WAIT_S, -1
    while (now := written()) != before:  # until workers are waiting
        assert time.monotonic() < deadline
        before = now
        time.sleep(1.0)
    for status in ray_counts(collector):
        assert status.full == SLOTS, "all slots wait for the learner"
        assert status.written - status.taken == SLOTS
    arrived = collector.counters().taken
    sent = sum(status.taken for status in ray_counts(collector))
    assert sent - arrived <= 2 * CREDITS, "no more is on its way than the credits of two nodes"
    learner.acts_on(node_ids(collector))


def ray_counts(collector: ClusterCollector) -> list:
    """What the ring of each node counts now, asked for in the way that Ray has for tests."""
    counts = [
        node.agent.__ray_call__.remote(lambda agent: agent._ring.counters()) for node in collector._nodes
    ]
    return ray.get(counts, timeout=WAIT_S)


def test_a_pause_lets_workers_complete_what_they_began_and_no_more(learner: Learner) -> None:
    collector = learner.collector
    with collector.pause():
        assert wait_until(lambda: all(status.writing == 0 for status in ray_counts(collector)), WAIT_S, 0.1)
        counted = [status.written for status in ray_counts(collector)]
        time.sleep(0.5)
        assert [status.written for status in ray_counts(collector)] == counted
    learner.acts_on(node_ids(collector))


def test_a_run_tells_of_its_nodes_and_their_workers(learner: Learner, tmp_path: Path) -> None:
    collector = learner.collector
    assert wait_until(lambda: len(collector.status().workers) == 2 * WORKERS, WAIT_S, 0.1)
    collector.status().write(tmp_path / "told.json")
    told = ClusterStatus.read(tmp_path / "told.json")
    assert told.pid == os.getpid()
    assert sorted(worker.reader for worker in told.workers) == list(range(2 * WORKERS))
    assert "2 nodes act, 0 lost so far" in str(told)


def test_a_worker_that_is_killed_is_started_again_on_its_node(learner: Learner) -> None:
    collector = learner.collector
    victim = collector.status().workers[0]
    os.kill(victim.pid, signal.SIGKILL)
    learner.go_on(
        lambda: any(
            worker.reader == victim.reader and worker.pid != victim.pid and worker.state == "running"
            for worker in collector.status().workers
        )
    )
    learner.acts_on(node_ids(collector))
    assert collector.tally.lost == 0


@pytest.mark.thorough  # in `make test` an agent is killed in stop_cluster_cases.py
def test_an_agent_that_is_killed_is_started_again_and_its_workers_end(learner: Learner) -> None:
    collector, node = learner.collector, node_of(learner.collector, 0)
    nodes, lost = node_ids(collector), collector.tally.lost
    workers = descendant_pids(pid_of(node))
    assert len(workers) >= WORKERS
    os.kill(pid_of(node), signal.SIGKILL)
    learner.go_on(lambda: collector.tally.lost > lost)
    learner.go_on(lambda: node_ids(collector) == nodes)
    learner.acts_on(nodes)
    assert wait_until(lambda: not any(map(is_alive, workers)), WAIT_S), "workers outlived their agent"


@pytest.mark.thorough
def test_an_agent_that_is_stopped_is_given_up_and_replaced(learner: Learner) -> None:
    collector, node = learner.collector, node_of(learner.collector, 1)
    nodes, lost, pid = node_ids(collector), collector.tally.lost, pid_of(node)
    workers = descendant_pids(pid)
    os.kill(pid, signal.SIGSTOP)
    learner.go_on(lambda: collector.tally.lost > lost, rest_s=0.5)
    assert f"gave no answer for {SILENT_S:g} s" in str(collector._nodes._causes)
    learner.go_on(lambda: node_ids(collector) == nodes)
    learner.acts_on(nodes)
    assert wait_until(lambda: not any(map(is_alive, {pid, *workers})), WAIT_S), "the stopped agent was killed"


@pytest.mark.thorough
def test_a_node_that_joins_begins_with_the_newest_weights(learner: Learner, third_node: object) -> None:
    collector, before = learner.collector, node_ids(learner.collector)
    version = learner.publish()
    learner.go_on(lambda: len(collector.nodes) == 3)
    (new,) = node_ids(collector) - before
    learner.acts_on(node_ids(collector))
    firsts = [seen for (node, *_), seen in learner.newest.items() if node == new]
    assert min(firsts) >= version


@pytest.mark.thorough
def test_the_others_go_on_when_a_node_is_lost(learner: Learner, cluster: Cluster, third_node: object) -> None:
    collector, lost = learner.collector, learner.collector.tally.lost
    pid = pid_of(node_of(collector, 2))
    workers = descendant_pids(pid)
    cluster.remove_node(third_node, allow_graceful=False)
    learner.go_on(lambda: collector.tally.lost > lost)
    learner.go_on(lambda: len(collector.nodes) == 2)
    learner.acts_on(node_ids(collector))
    assert wait_until(lambda: not any(map(is_alive, {pid, *workers})), WAIT_S)


def test_the_run_ends_when_all_nodes_are_lost_and_says_where_and_why(
    learner: Learner, cluster: Cluster
) -> None:
    collector = learner.collector
    places = [str(place) for place in collector.nodes]
    for node in cluster.list_all_nodes()[1:]:
        cluster.remove_node(node, allow_graceful=False)
    with pytest.raises(WorkerLost) as lost:
        learner.go_on(lambda: False)
    assert "no node is left" in lost.value.what
    assert all(place in lost.value.what for place in places)
    assert collector.tally.rollouts_written >= collector.counters().taken
    collector.shutdown()
    assert collector.closed
