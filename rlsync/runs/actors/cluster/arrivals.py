"""Rollouts as they arrive from the nodes of a cluster: the learner's end, in place of a ring."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass, replace

import ray
import torch
from torch import Tensor

from rlsync.runs.actors import frames as keys
from rlsync.runs.actors.cluster.job import Flat, Orders, unpack
from rlsync.runs.actors.cluster.node import ANSWER_WITHIN_S, Node
from rlsync.runs.actors.cluster.nodes import Nodes
from rlsync.runs.actors.ring.format import RingCounters
from rlsync.runs.actors.ring.reader import TakenRollout
from rlsync.seams import Layout


@dataclass(frozen=True, slots=True)
class Origin:
    node: str  # Ray's id
    pid: int  # of the agent: another one after a restart
    worker: int  # its number on that node
    number: int  # which of that worker's rollouts it is, from 0


class Arrivals:
    """Takes the rollouts of all nodes in turn, each node's in order, into memory that is used again."""

    def __init__(
        self, nodes: Nodes, layout: Layout, workers_per_node: int, envs_per_node: int, seed: int
    ) -> None:
        self._nodes = nodes
        self._layout = layout
        self._workers_per_node = workers_per_node
        self._envs_per_node = envs_per_node
        #: The orders that hold now, for the first node.
        self.orders = Orders(0, False, 0, seed)
        self._buffers: list[Tensor] = []
        self._free: list[int] = []
        self._held: set[int] = set()
        self._arrived = 0
        self._served: dict[str, int] = {}  # by node, which of all arrived rollouts was its last one
        #: By worker: its agent's process and its life there, and how many others it had before.
        self._lives: dict[int, tuple[tuple[int | None, int], int]] = {}
        self._taken = self._dropped = 0
        self._waited_s = 0.0
        #: Where the rollouts come from that were taken since a batch began, in order.
        self.origins: list[Origin] = []
        self.closed = False
        # nodes drop nothing that was recorded
        self.dropped: Callable[[TakenRollout], object] | None = None
        #: Rollouts of older versions are left out.
        self.oldest_version = 0

    def run(self) -> None:
        self._give(running=True)

    def pause(self) -> None:
        """Let workers begin no other rollout, as soon as their node hears of it; see :class:`Rollouts`."""
        refs = self._give(running=False)
        if refs:
            ray.wait(refs, num_returns=len(refs), timeout=ANSWER_WITHIN_S)

    def seed(self, seed: int) -> None:
        """Give a seed to all workers; each sees it when it begins its next rollout."""
        self.orders = replace(self.orders, seeds=self.orders.seeds + 1, seed=seed)
        self._give(running=self.orders.running)

    def order(self, node: Node) -> ray.ObjectRef:
        seed = self.orders.seed + node.seat * self._envs_per_node
        ref: ray.ObjectRef = node.agent.order.remote(replace(self.orders, seed=seed))
        return ref

    def take(self, timeout_s: float) -> TakenRollout | None:
        started = time.monotonic()
        try:
            while True:
                left_s = max(0.0, started + timeout_s - time.monotonic())
                for node in self._answering(left_s):
                    flat: Flat | None = self._nodes.read(node)
                    if flat is None:
                        continue
                    rollout = self._unpacked(node, flat)
                    if rollout is not None:
                        return rollout
                if left_s == 0.0:
                    return None
        finally:
            self._waited_s += time.monotonic() - started

    def give_back(self, taken: TakenRollout) -> None:
        """Let the memory of a rollout be used again; a second call does nothing."""
        if taken.slot in self._held:
            self._held.remove(taken.slot)
            self._free.append(taken.slot)

    def counters(self) -> RingCounters:
        """The counters of all nodes together, as they said with their last rollouts.

        The learner's waiting and what was left out are this learner's own.
        """
        gone = self._nodes.tally
        free = 0
        writing = 0
        full = 0
        written = 0
        worker_wait_s = 0.0
        for node in self._nodes:
            if node.counters is not None:
                free += node.counters.free
                writing += node.counters.writing
                full += node.counters.full
                written += node.counters.written
                worker_wait_s += node.counters.worker_wait_s
        return RingCounters(
            free=free,
            writing=writing,
            full=full,
            reading=len(self._held),
            written=gone.rollouts_written + written,
            taken=self._taken,
            worker_wait_s=gone.worker_wait_s + worker_wait_s,
            learner_wait_s=self._waited_s,
            dropped=self._dropped,
        )

    def _give(self, running: bool) -> list[ray.ObjectRef]:
        self.orders = replace(self.orders, number=self.orders.number + 1, running=running)
        return list(map(self.order, self._nodes.acting))

    def _answering(self, timeout_s: float) -> list[Node]:
        """The nodes that have answered; the one that was served last is the last one."""
        heads = {node.head: node for node in self._nodes}
        if not heads:
            time.sleep(timeout_s)
            return []
        answered, _ = wait(heads, timeout_s, FIRST_COMPLETED)
        answering = [heads[head] for head in answered]
        return sorted(answering, key=lambda node: self._served.get(node.machine.node_id, 0))

    def _unpacked(self, node: Node, flat: Flat) -> TakenRollout | None:
        """It, in this process's memory; ``None`` if its version is too old."""
        if self._free:
            slot = self._free.pop()
        else:
            slot = len(self._buffers)
            self._buffers.append(
                torch.empty(self._layout.image_bytes, dtype=torch.uint8, device="cpu")
            )
        views = unpack(flat, self._layout, self._buffers[slot])
        node_id = node.machine.node_id
        self._arrived += 1
        self._served[node_id] = self._arrived
        node.arrived += 1
        node.counters = flat.counters
        if int(views[keys.POLICY_VERSION].min()) < self.oldest_version:
            self._dropped += 1
            self._free.append(slot)
            return None
        self._taken += 1
        self._held.add(slot)
        self.origins.append(Origin(node_id, node.pid or 0, flat.writer, flat.number))
        worker = node.seat * self._workers_per_node + flat.writer
        life = self._life_of(worker, (node.pid, flat.life))
        return TakenRollout(slot, worker, flat.number, views, self._buffers[slot], life)

    def _life_of(self, worker: int, began: tuple[int | None, int]) -> int:
        """How often a worker was started before: by its agent, or with another agent in its place."""
        known, before = self._lives.get(worker, (began, 0))
        life = before + int(known != began)
        self._lives[worker] = began, life
        return life
