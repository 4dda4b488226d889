"""A node's agent, an actor of Ray: an ordinary board, ring and workers, which do not know that Ray exists."""

from __future__ import annotations

import os
import threading
import time

import torch

from rlsync import AdoptionTimeout, PublishError, RlsyncError
from rlsync.runs.actors.cluster.job import Flat, NodeJob, Orders, Turns, pack
from rlsync.runs.actors.ring.reader import RolloutRing
from rlsync.runs.actors.supervision import Supervisor
from rlsync.runs.actors.worker import WorkerJob, start_workers
from rlsync.seams import BoardWriter, NodeReceiver, ledger, processes, starting

#: How long a call may wait for the calls before it. They answer far sooner, or the agent is ended.
_TURN_TIMEOUT_S = 60.0

_LOOK_FOR_THE_LEARNER_S = 1.0
_LOOK_FOR_A_VERSION_S = 0.01


def has_version(receiver: NodeReceiver, timeout_s: float) -> bool:
    """Wait for the first version; whether it came before the receiver failed, and in time."""
    deadline = time.monotonic() + timeout_s
    while receiver.stamp == ledger.NOTHING:
        if time.monotonic() >= deadline or receiver.failure is not None:
            return False
        time.sleep(_LOOK_FOR_A_VERSION_S)
    return True


class NodeAgent:
    """Starts and keeps a node's workers, and hands rollouts out in order. Several threads of Ray call it."""

    def __init__(self, job: NodeJob) -> None:
        torch.set_num_threads(1)
        self._job = job
        self._layout = job.crew.layout()
        self._board = BoardWriter()
        self._ring = RolloutRing(self._layout, job.crew.slots, len(job.numbers))
        self._receiver = NodeReceiver(job.mailbox, job.node, self._board, numbers=job.numbers)
        self._workers: Supervisor | None = None
        self._turns = Turns()
        self._ordering = threading.Lock()
        # supervisor and ring are used from one thread at a time
        self._supervising = threading.Lock()
        self._orders = Orders(0, False, job.seeds, job.seed)
        self._ending = threading.Event()
        self._failed = False
        threading.Thread(
            target=self._end_with_the_learner, name="rlsync-learner-watch", daemon=True
        ).start()

    def start(self, timeout_s: float) -> int:
        """Wait for a version, then start the workers; returns the process id. AdoptionTimeout, WorkerLost."""
        deadline = time.monotonic() + timeout_s
        job = self._job
        # A player without weights publishes no version.
        if job.crew.player.modules and not has_version(self._receiver, timeout_s):
            problem = f"no version of the weights came to this node within {timeout_s:g} s"
            cure = "look whether the node reaches the learner's node on all of Ray's ports"
            raise AdoptionTimeout(problem, f"node {job.node}", cure) from self._receiver.failure
        logs = starting.StartLogs(len(job.numbers), max(0.0, deadline - time.monotonic()))
        workers = WorkerJob(
            crew=job.crew,
            ring=self._ring.handle,
            board=self._board.handle,
            seed=job.seed,
            logs=tuple(logs.each),
        )
        self._workers = start_workers(workers, self._ring)
        self._workers.await_start(max(0.0, deadline - time.monotonic()), logs)
        return os.getpid()

    def order(self, orders: Orders) -> None:
        """Take orders; older ones than those it has are ignored."""
        with self._ordering:
            if orders.number <= self._orders.number or self._ring.closed:
                return
            if orders.seeds > self._orders.seeds:
                self._ring.seed(orders.seed)
            if orders.running:
                self._ring.run()
            else:
                self._ring.pause()
            self._orders = orders

    def take(self, number: int, timeout_s: float) -> Flat | None:
        """The oldest rollout, in the order of calls, or ``None``. PublishError: no weights come any more."""
        with self._turns.turn(number, _TURN_TIMEOUT_S):
            if self._failed:
                return None  # an earlier call has told why
            try:
                return self._packed(timeout_s)
            except RlsyncError:
                self._failed = True
                raise

    def _packed(self, timeout_s: float) -> Flat | None:
        assert self._workers is not None, "the learner takes after start() has returned"
        deadline = time.monotonic() + timeout_s
        while not self._ending.is_set():
            if self._receiver.failure is not None:
                problem = f"this node receives no weights any more: {self._receiver.failure!r}"
                cure = "nothing to do: its agent is ended"
                raise PublishError(
                    problem, f"node {self._job.node}", cure
                ) from self._receiver.failure
            with self._supervising:
                if self._ending.is_set() or self._receiver.learner_died:
                    return None  # the ring is closed, or nobody would get the rollout
                self._workers.look()
                rollout = self._ring.take(min(processes.LOOK_EVERY_S, timeout_s))
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

    def _end_with_the_learner(self) -> None:
        """End when the learner is gone, which Ray does not always see."""
        while not self._ending.wait(_LOOK_FOR_THE_LEARNER_S):
            if self._receiver.learner_died:
                os._exit(1)  # workers see that the owner of their board is gone
