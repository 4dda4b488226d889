"""The workers of all nodes of a Ray cluster, and the learner's end of their rollouts."""

from __future__ import annotations

import os
import time
from collections import Counter
from dataclasses import replace
from multiprocessing.process import BaseProcess
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from tensordict import TensorDict

from rlsync import AdoptionTimeout
from rlsync.runs.actors.cluster.agent import NodeAgent, has_version
from rlsync.runs.actors.cluster.arrivals import Arrivals, Origin
from rlsync.runs.actors.cluster.job import NodeJob
from rlsync.runs.actors.cluster.node import Machine, Node
from rlsync.runs.actors.cluster.nodes import NodeCounts, Nodes, Placement
from rlsync.runs.actors.cluster.session import ClusterStatus, NodeStatus, Session
from rlsync.runs.actors.envs.specs import EnvSpec
from rlsync.runs.actors.player import Playable, Player, player_of
from rlsync.runs.actors.ring.format import RingCounters
from rlsync.runs.actors.rollout_collector import RolloutCollector, crew_of
from rlsync.runs.actors.settings import CollectSettings
from rlsync.seams import BoardHandle, BoardWriter, Leaves, NodeReceiver, RayTransport, user_input

#: the seeds of a node's next agent lie this far from those of the agent before
_SEEDS_APART = 15_485_863

#: How long a batch may wait until every node says that it has the newest version, seconds. Rollouts of older
#: ones are left out in any case.
_ARRIVAL_S = 2.0
_LOOK_S = 0.005

_THREADS_BESIDE = 4  #: threads of an agent, besides those of open calls for rollouts


class ClusterCollector(RolloutCollector):
    """Collects rollouts as UnrollCollector does, on the nodes of a cluster.

    One agent on each node keeps a board, a ring and workers. Versions reach it through Ray's object store;
    slots come back as flat objects, at most ``placement.credits`` ahead of the learner. Nodes may join later;
    rollouts lost with one are counted in :attr:`tally`. ``session`` is closed at the end. With
    ``newest_only`` a batch has rollouts of the newest version alone, others are dropped, and no worker begins
    one meanwhile.
    """

    def __init__(
        self,
        network: Player | Playable,
        env: EnvSpec,
        settings: CollectSettings,
        *,
        workers_per_node: int = 2,
        placement: Placement | None = None,
        session: Session | None = None,
        newest_only: bool = False,
    ) -> None:
        where = f"ClusterCollector(workers_per_node={workers_per_node!r})"
        user_input.check_count("workers_per_node", workers_per_node, 1, where, "")
        slots = settings.slots
        if slots is None:
            slots = workers_per_node + 2
        user_input.check_count("slots", slots, 1, f"CollectSettings(slots={slots!r})", "")
        crew = crew_of(player_of(network), env, settings, workers=workers_per_node, slots=slots)
        self._session = session
        self._newest_only = newest_only
        self._began = False
        self._here: BoardHere | None = None
        self._transport = RayTransport()
        super().__init__(crew, self._transport)  # num_workers grows with each node
        self.publisher.leaves_at = lambda name: Leaves(
            self.worker_player.modules[name], name
        ).specs()
        self.workers_per_node = workers_per_node
        self._placement = placement or Placement()
        self._starts: Counter[int] = Counter()  # by seat
        self._envs_per_node = workers_per_node * settings.envs_per_worker
        self._template = NodeJob(
            mailbox=self._transport.mailbox,
            node="",
            numbers=(),
            crew=self.crew,
            seed=0,
            seeds=0,
        )
        self._nodes = Nodes(self._start_agent, self._placement, self._joined)
        self._arrivals = Arrivals(
            self._nodes,
            crew.layout(),
            workers_per_node=workers_per_node,
            envs_per_node=self._envs_per_node,
            seed=self._first_seed(),
        )
        self._take_from(self._arrivals, self._nodes)
        try:
            self._nodes.await_start()
        except BaseException:
            self.shutdown()
            raise

    @property
    def procs(self) -> list[BaseProcess]:
        """None: worker processes belong to the agents."""
        return []

    @property
    def nodes(self) -> tuple[Machine, ...]:
        return tuple(node.machine for node in self._nodes.acting)

    @property
    def tally(self) -> NodeCounts:
        return self._nodes.tally

    @property
    def last_origins(self) -> tuple[Origin, ...]:
        return tuple(self._arrivals.origins)

    def status(self) -> ClusterStatus:
        """The nodes and their workers, as they said last."""
        reports = self._transport.nodes
        nodes = []
        for name in map(str, self.nodes):
            if name in reports:
                report = reports[name]
                nodes.append(NodeStatus(name, report.stamp.version, tuple(report.readers)))
            else:
                nodes.append(NodeStatus(name, 0, ()))
        return ClusterStatus(
            pid=os.getpid(),
            at_s=time.time(),
            version=self.policy_version,
            nodes=tuple(nodes),
            lost=self.tally.lost,
            rollouts_lost=self.tally.rollouts_lost,
        )

    def board_here(self) -> BoardHandle:
        """A board of this machine that gets every version as a node does; see :class:`BoardHere`."""
        if self._here is None:
            self._here = BoardHere(self._transport.mailbox)
        return self._here.handle

    def counters(self) -> RingCounters:
        """All rings together, as their nodes said with the last rollout; ``taken`` are those that arrived."""
        return self._arrivals.counters()

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Reset all with new seeds; returns the first that no node uses, or with ``static_seed`` the same."""
        self._arrivals.seed(seed)
        if static_seed:
            return seed
        return seed + self._nodes.seats * self._envs_per_node

    def shutdown(
        self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True
    ) -> None:
        closes = not self.closed
        super().shutdown(timeout)
        if closes and self.closed:
            self._transport.end_mailbox()  # no agent is left that it could tell anything
        if self._session is not None and self.closed:
            self._session.close()

    def _end(self, timeout_s: float) -> None:
        self._arrivals.closed = True
        if self._here is not None:
            self._here.close()
        self._nodes.end(timeout_s)

    def _next_batch(self) -> TensorDict:
        self._arrivals.origins = []
        if self._newest_only or not self._began:
            self._await_nodes()
        self._began = True
        if not self._newest_only:
            return super()._next_batch()
        self._arrivals.oldest_version = self.policy_version
        self._arrivals.run()
        batch = super()._next_batch()
        self._arrivals.pause()
        return batch

    def _await_nodes(self) -> None:
        """Wait until the nodes say that they have the newest version; not for long."""
        until_s = time.monotonic() + _ARRIVAL_S
        newest = self._transport.newest_stamp
        while time.monotonic() < until_s:
            reports = self._transport.nodes
            arrived = {name for name, report in reports.items() if report.stamp >= newest}
            if arrived.issuperset(map(str, self.nodes)):
                return
            time.sleep(_LOOK_S)

    def _joined(self, node: Node) -> None:
        self.num_workers = self._nodes.seats * self.workers_per_node
        self._arrivals.order(node)

    def _start_agent(self, machine: Machine, seat: int) -> Node:
        life = self._starts[seat]
        orders = self._arrivals.orders
        placement = self._placement
        self._starts[seat] += 1
        first = seat * self.workers_per_node
        job = replace(
            self._template,
            node=str(machine),
            numbers=tuple(range(first, first + self.workers_per_node)),
            seed=orders.seed + seat * self._envs_per_node + life * _SEEDS_APART,
            seeds=orders.seeds,
        )
        options = {
            "num_cpus": 0,
            "resources": dict(placement.resources),
            "max_concurrency": placement.credits + _THREADS_BESIDE,
            "max_restarts": 0,
            "max_task_retries": 0,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(machine.node_id, soft=False),
        }
        agent = ray.remote(NodeAgent).options(**options).remote(job)
        return Node(machine, seat, agent, placement.credits, placement.start_timeout_s)


class BoardHere:
    """A board here with every version that nodes get, for readers whom the learner does not wait for."""

    def __init__(self, mailbox: Any, timeout_s: float = 60.0) -> None:
        self._board = BoardWriter()
        self.handle = self._board.handle
        self._receiver = NodeReceiver(mailbox, "the learner's machine", self._board, numbers=())
        if not has_version(self._receiver, timeout_s):
            self.close()
            problem = f"no version of the weights came to the learner's own machine within {timeout_s:g} s"
            where = "starting the evaluating process of a run on a cluster"
            cure = "look whether Ray's object store has room, or evaluate after the run: rlsync eval RUN"
            raise AdoptionTimeout(problem, where, cure) from self._receiver.failure

    def close(self) -> None:
        self._receiver.close()
        self._board.close()
