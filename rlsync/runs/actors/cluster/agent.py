"""A node's agent, an actor of Ray: an ordinary board, ring and workers, which do not know that Ray exists."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import ray
import torch

from rlsync import AdoptionTimeout, PublishError, RlsyncError
from rlsync.core.ledger import NOTHING
from rlsync.runs.actors.cluster.job import AgentState, Flat, NodeJob, Orders, Turns, pack
from rlsync.runs.actors.ring.reader import RolloutRing
from rlsync.runs.actors.supervision import LEAVE_TIMEOUT_S, Supervisor
from rlsync.runs.actors.worker import WorkerJob, start_workers
from rlsync.sync.processes import LOOK_EVERY_S
from rlsync.sync.starting import StartLogs
from rlsync.transport.board.writer import BoardWriter
from rlsync.transport.ray.receiver import NodeReceiver

#: How long a call may wait for the calls before it. They answer far sooner, or the agent is ended.
_TURN_TIMEOUT_S = 60.0

_LOOK_FOR_THE_LEARNER_S = 1.0
_LOOK_FOR_A_VERSION_S = 0.01

_CALLS_OF_A_LEARNER = 1 << 40  #: numbers of calls that one learner may use


def has_version(receiver: NodeReceiver, timeout_s: float) -> bool:
    """Wait for the first version; whether it came before the receiver failed, and in time."""
    deadline = time.monotonic() + timeout_s
    while receiver.stamp == NOTHING:
        if time.monotonic() >= deadline or receiver.failure is not None:
            return False
        time.sleep(_LOOK_FOR_A_VERSION_S)
    return True


class NodeAgent:
    """Starts and keeps a node's workers, and hands rollouts out in order. Several threads of Ray call it."""

    def __init__(self, job: NodeJob) -> None:
        torch.set_num_threads(1)
        self._job = job
        settings = job.settings
        self._layout = settings.shape.layout(settings.player)
        self._board = BoardWriter()
        self._ring = RolloutRing(self._layout, settings.slots, len(job.numbers))
        self._keep_s = job.keep_s
        self._receiver = self._receiver_of(job.mailbox)
        self._workers: Supervisor | None = None
        self._turns = Turns()
        self._ordering = threading.Lock()
        self._supervising = threading.Lock()  # supervisor and ring are used from one thread at a time
        self._orders = Orders(0, False, job.seeds, job.seed)
        self._ending = threading.Event()
        self._started = self._failed = False
        threading.Thread(target=self._end_with_the_learner, name="rlsync-learner-watch", daemon=True).start()

    def start(self, timeout_s: float) -> int:
        """Wait for a version, then start the workers; returns the process id. AdoptionTimeout, WorkerLost."""
        deadline = time.monotonic() + timeout_s
        job = self._job
        # A player without weights publishes no version.
        if job.settings.player.modules and not has_version(self._receiver, timeout_s):
            what = f"no version of the weights came to this node within {timeout_s:g} s"
            cure = "look whether the node reaches the learner's node on all of Ray's ports"
            raise AdoptionTimeout(what, f"node {job.node}", cure) from self._receiver.failure
        logs = StartLogs(len(job.numbers), max(0.0, deadline - time.monotonic()))
        workers = WorkerJob(job.settings, self._ring.handle, self._board.handle, job.seed, tuple(logs.each))
        self._workers = start_workers(workers, self._ring)
        self._workers.await_start(max(0.0, deadline - time.monotonic()), logs)
        self._started = True
        return os.getpid()

    def order(self, orders: Orders) -> None:
        """Take orders; older ones than those it has are ignored."""
        with self._ordering:
            if orders.number <= self._orders.number or self._ring.closed:
                return
            if orders.seeds > self._orders.seeds:
                self._ring.seed(orders.seed)
            (self._ring.run if orders.running else self._ring.pause)()
            self._orders = orders

    def take(self, number: int, timeout_s: float) -> Flat | None:
        """The oldest rollout, in the order of calls, or ``None``. PublishError: no weights come any more."""
        turns = self._turns
        if number < turns.first:
            return None  # a call of a learner that is gone
        with turns.turn(number, _TURN_TIMEOUT_S):
            if self._failed:
                return None  # an earlier call has told why
            try:
                return self._packed(timeout_s, turns)
            except RlsyncError:
                self._failed = True
                raise

    def state(self) -> AgentState:
        """What the next learner must know of this agent."""
        return AgentState(
            ray.get_runtime_context().get_node_id(),
            self._job.numbers[0] // len(self._job.numbers),
            os.getpid(),
            self._job.likeness,
            self._board.newest_stamp,
            self._ring.counters(),
            ready=self._started and not self._failed,
            alone=self._receiver.learner_died,
            first_call=self._turns.first + _CALLS_OF_A_LEARNER,
        )

    def follow(self, mailbox: Any, keep_s: float) -> AgentState:
        """Follow the next learner, and await orders. PublishError: the one before lives, or this one ends."""
        with self._supervising, self._ordering:
            if self._ending.is_set() or not self._receiver.learner_died:
                if self._ending.is_set():
                    why = "this agent is about to end"
                else:
                    why = "its learner lives"
                raise PublishError(why, f"node {self._job.node}", "start another agent")
            self._ring.pause()
            self._orders = Orders(0, False, 0, self._job.seed)
            state = self.state()
            self._turns = Turns(state.first_call)  # and calls of the learner before are not served any more
            self._receiver.close()
            self._receiver = self._receiver_of(mailbox)
            self._keep_s = keep_s
        return state

    def _packed(self, timeout_s: float, turns: Turns) -> Flat | None:
        assert self._workers is not None, "the learner takes after start() has returned"
        deadline = time.monotonic() + timeout_s
        while not self._ending.is_set():
            if self._receiver.failure is not None:
                what = f"this node receives no weights any more: {self._receiver.failure!r}"
                cure = "nothing to do: its agent is ended"
                raise PublishError(what, f"node {self._job.node}", cure) from self._receiver.failure
            with self._supervising:
                if self._ending.is_set() or turns is not self._turns or self._receiver.learner_died:
                    return None  # the ring is closed, or nobody would get the rollout
                self._workers.look()
                rollout = self._ring.take(min(LOOK_EVERY_S, timeout_s))
                if rollout is not None:
                    flat = pack(rollout, self._layout, self._ring.counters())
                    self._ring.give_back(rollout)
                    return flat
            if time.monotonic() >= deadline:
                return None
        return None

    def end(self, timeout_s: float) -> None:
        """End the workers, which may take ``timeout_s`` to leave, and let go of everything."""
        self._ending.set()
        with self._supervising:  # no call takes a rollout now
            with self._ordering:
                self._ring.close()
            if self._workers is not None:
                self._workers.end(timeout_s)
        self._receiver.close()
        self._board.close()

    def _is_left(self) -> bool:
        """Whether no learner can reach this agent. One that lives would have ended it soon."""
        receiver = self._receiver
        deaf = receiver.closed_by_learner or receiver.failure is not None
        return receiver.learner_died or (deaf and self._keep_s > 0.0)

    def _receiver_of(self, mailbox: Any) -> NodeReceiver:
        return NodeReceiver(mailbox, self._job.node, self._board, numbers=self._job.numbers)

    def _end_with_the_learner(self) -> None:
        """End when no learner has come in time; Ray itself ends only agents that are not to be kept."""
        gone_since_s: float | None = None
        while not self._ending.wait(_LOOK_FOR_THE_LEARNER_S):
            if not self._is_left():
                gone_since_s = None
                continue
            gone_since_s = gone_since_s or time.monotonic()
            if time.monotonic() - gone_since_s >= self._keep_s:
                if self._keep_s:
                    self.end(LEAVE_TIMEOUT_S)
                os._exit(1)  # workers see that the owner of their board is gone
