"""A collector that makes the rollouts of another run again: the same workers, versions, lives and order."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.process import BaseProcess
from typing import Any

from rlsync.core.errors import BoardClosed, ConfigError, WorkerLost
from rlsync.core.schedule import Life, Rollout
from rlsync.sync.starting import StartLogs
from rlsync.transport.board.planned import PlannedBoard
from rlsync.transport.ring.format import MAX_SLOTS
from rlsync.transport.ring.reader import RolloutRing, TakenRollout
from rlsync.workers.collector import UnrollCollector
from rlsync.workers.intake import Rollouts
from rlsync.workers.supervision import Restarts, Supervisor
from rlsync.workers.worker import WorkerJob, start_worker


class InRecordedOrder:
    """Takes a ring's rollouts in a recorded order, dropped ones unseen. BoardClosed: the record is over."""

    def __init__(self, ring: RolloutRing, recorded: Iterator[Rollout]) -> None:
        self._ring, self._recorded = ring, recorded
        self._next = next(recorded, None)
        self._early: defaultdict[int, deque[TakenRollout]] = defaultdict(deque)
        self.run, self.pause, self.give_back = ring.run, ring.pause, ring.give_back
        self.dropped: Callable[[TakenRollout], object] | None = None  #: is told of each that was dropped

    @property
    def closed(self) -> bool:
        return self._ring.closed

    def take(self, timeout_s: float) -> TakenRollout | None:
        if self._next is None:
            raise BoardClosed("the recorded rollouts are used up", "rerun", "it ends where the record ends")
        while not self._early[self._next.worker]:
            taken = self._ring.take(timeout_s)
            if taken is None:
                return None
            self._early[taken.writer].append(taken)
        taken, dropped = self._early[self._next.worker].popleft(), self._next.dropped
        self._next = next(self._recorded, None)
        if not dropped:
            return taken
        if self.dropped is not None:
            self.dropped(taken)
        self.give_back(taken)
        return self.take(timeout_s)


class RepeatedUnrolls(UnrollCollector):
    """An :class:`UnrollCollector` that makes the rollouts of a recorded ``life`` again: each worker waits for
    the version that its rollout had, and lives as long. ConfigError if too many rollouts may have to wait.
    """

    def __init__(
        self, network: Any, env: Any, *, life: Life, rollouts_per_batch: int = 1, **given: Any
    ) -> None:
        self._life, self._plan = life, life.plan(given["num_workers"])
        self._timeout_s = given["silent_timeout_s"]
        # A worker waits for its version with a slot in its hands.
        slots = life.most_waiting() + given["num_workers"] + rollouts_per_batch
        if slots > MAX_SLOTS:
            raise ConfigError(
                f"{slots} rollouts may have to wait for the learner in a rerun; a ring has {MAX_SLOTS} slots",
                "rerun",
                "only runs that publish more often, or have fewer workers, can be made again",
            )
        given |= {"slots": slots, "when_full": "block", "restarts": Restarts(10**9, first_pause_s=0.0)}
        super().__init__(network, env, rollouts_per_batch=rollouts_per_batch, **given)

    def _made_board(self) -> PlannedBoard:
        self._planned = PlannedBoard(self._plan, stays=True, timeout_s=self._timeout_s)
        return self._planned

    def _started(self, seed: int, logs: StartLogs) -> Supervisor:
        # A worker that waits for its version is not silent.
        settings = replace(self.worker_settings, silent_timeout_s=float("inf"))
        job = WorkerJob(settings, self._ring.handle, self.board.handle, seed, tuple(logs))  # type: ignore[arg-type]
        lives = {w: list(dict.fromkeys(r.life for r in plan)) or [0] for w, plan in self._plan.items()}

        def start(worker: int, again: int) -> BaseProcess:
            life = lives[worker][again] if again < len(lives[worker]) else None
            if again and (life is None or self._planned.next_life(worker) != life):
                what = f"worker {worker} ended before its recorded life did"
                raise WorkerLost(what, "rerun", "look for its own error above, and start the rerun anew")
            return start_worker(job, worker, life or 0)

        workers = Supervisor(start, len(settings.devices), self._ring, settings.restarts, float("inf"))
        self._planned.look = workers.look
        return workers

    def _source(self) -> Rollouts:
        return InRecordedOrder(self._ring, iter(self._life.rollouts))

    def _end(self, timeout_s: float) -> None:
        self.board.close()  # workers may wait for versions that do not come
        super()._end(timeout_s)
