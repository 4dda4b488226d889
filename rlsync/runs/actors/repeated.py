"""A collector whose rollouts are decided beforehand: by the record of another run, or by a fixed lag."""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from multiprocessing.process import BaseProcess
from typing import Any

from rlsync import BoardClosed, ConfigError, WorkerLost
from rlsync.runs.actors import frames as keys
from rlsync.runs.actors.collector import UnrollCollector, ring_slots
from rlsync.runs.actors.envs.specs import EnvSpec
from rlsync.runs.actors.intake import Rollouts
from rlsync.runs.actors.player import Playable, Player
from rlsync.runs.actors.ring.format import MAX_SLOTS
from rlsync.runs.actors.ring.reader import RolloutRing, TakenRollout
from rlsync.runs.actors.settings import CollectSettings
from rlsync.runs.actors.supervision import Restarts, Supervisor
from rlsync.runs.actors.trail import TrailHandle, Trails
from rlsync.runs.actors.worker import start_worker, supervised
from rlsync.seams import BoardHandle, planned, schedule, starting


class InOrder:
    """Takes a ring's rollouts in a given order, dropped ones unseen. BoardClosed: the order is over."""

    def __init__(self, ring: RolloutRing, order: Iterable[schedule.Rollout]) -> None:
        self._ring = ring
        self._order = iter(order)
        self._next = next(self._order, None)
        self._early: defaultdict[int, deque[TakenRollout]] = defaultdict(deque)
        self.run = ring.run
        self.pause = ring.pause
        self.give_back = ring.give_back
        #: is told of each that was dropped
        self.dropped: Callable[[TakenRollout], object] | None = None

    @property
    def closed(self) -> bool:
        return self._ring.closed

    def take(self, timeout_s: float) -> TakenRollout | None:
        if self._next is None:
            raise BoardClosed(
                "the recorded rollouts are used up", "rerun", "it ends where the record ends"
            )
        while not self._early[self._next.worker]:
            rollout = self._ring.take(timeout_s)
            if rollout is None:
                return None
            self._early[rollout.writer].append(rollout)
        rollout = self._early[self._next.worker].popleft()
        dropped = self._next.dropped
        self._next = next(self._order, None)
        if not dropped:
            return rollout
        if self.dropped is not None:
            self.dropped(rollout)
        self.give_back(rollout)
        return self.take(timeout_s)


class RepeatedUnrolls(UnrollCollector):
    """An :class:`UnrollCollector` that makes the rollouts of a ``life``.

    Each worker waits for the version that its rollout has there, and lives as long. If one dies, a recorded
    life ends. With a :class:`FixedLag` another process takes its place, and makes the rollouts that it would
    have made, bit by bit.
    """

    def __init__(
        self,
        network: Player | Playable,
        env: EnvSpec,
        settings: CollectSettings,
        *,
        life: schedule.Life | schedule.FixedLag,
        lag: int,
        num_workers: int = 2,
        start_timeout_s: float = 300.0,
    ) -> None:
        workers = max(1, num_workers)
        plan: planned.Plan
        if isinstance(life, schedule.Life):
            plan = life.plan(workers)
        else:
            plan = dict.fromkeys(range(workers), life)
        self._planned = planned.PlannedBoard(plan, stays=True, timeout_s=settings.silent_timeout_s)
        self._life = life
        self._trails_of_all: Trails | None = None
        # Those of the run, and one with which each worker waits for its version.
        slots = ring_slots(settings, workers) + workers * (lag + 1) + settings.rollouts_per_batch
        restarts = settings.restarts
        if isinstance(life, schedule.Life):
            restarts = Restarts(10**9, first_pause_s=0.0)
            # All rollouts of a version may be made before the learner takes the first of them.
            slots += max(Counter(rollout.version for rollout in life.rollouts).values())
        if slots > MAX_SLOTS:
            problem = (
                f"{slots} rollouts may have to wait for the learner; a ring has {MAX_SLOTS} slots"
            )
            raise ConfigError(
                problem, "collector.lag, or a rerun", "give a smaller lag, or publish more often"
            )
        super().__init__(
            network,
            env,
            replace(settings, slots=slots, restarts=restarts),
            num_workers=num_workers,
            start_timeout_s=start_timeout_s,
        )

    def _made_board(self) -> planned.PlannedBoard:
        return self._planned

    def board_here(self) -> BoardHandle:
        return self._planned.handle.board  # readers that are no workers have no plan

    def _trails(self) -> TrailHandle | None:
        if isinstance(self._life, schedule.Life):
            return None
        shape, dtype = self.crew.settings.shape.arrays(self.player)[keys.ACTION]
        self._trails_of_all = Trails(self.num_workers, math.prod(shape) * dtype.itemsize)
        return self._trails_of_all.handle

    def saved_envs(self) -> list[bytes]:
        """What each worker goes on from if the run goes on from a checkpoint of now, in the order of workers.

        Empty: new episodes begin there, because no life ends now, or environments cannot be saved.
        """
        if self._trails_of_all is None or self._trails_of_all.closed:
            return []
        saved = []
        for worker in range(self.num_workers):
            of_worker = self._trails_of_all.of(worker).saved(self._frames)
            if of_worker is None:
                return []
            saved.append(of_worker)
        return saved

    def load_envs(self, saved: Sequence[bytes]) -> None:
        """Let the life that :meth:`set_seed` begins go on from there, after the frames of this collector.

        Args:
            saved: what :meth:`saved_envs` returned; of another number of workers nothing is loaded.
        """
        if self._trails_of_all is None or len(saved) != self.num_workers:
            return
        for worker, of_worker in enumerate(saved):
            self._trails_of_all.of(worker).save(0, self._frames, of_worker)

    def _started(self, seed: int, logs: starting.StartLogs) -> Supervisor:
        job = self._job(seed, logs)
        lives: dict[int, int | None] = {}  # by worker, the one in which it makes rollouts

        def start(worker: int, again: int) -> BaseProcess:
            rollout = self._planned.next(worker)
            life = None
            if rollout is not None:
                life = rollout.life
            if again and isinstance(self._life, schedule.FixedLag):
                self._planned.go_back(worker, self.ring.writer(worker).written)
            elif again and life in (None, lives[worker]):
                problem = f"worker {worker} ended before its recorded life did"
                raise WorkerLost(
                    problem, "rerun", "look for its own error above, and start the rerun anew"
                )
            lives[worker] = life
            return start_worker(job, worker, life or 0)

        workers = supervised(start, self.crew, self.ring)
        self._planned.look = workers.look
        return workers

    def _source(self) -> Rollouts:
        return InOrder(self.ring, self._life.rollouts)

    def _next_batch(self) -> Any:
        self._planned.turn()
        return super()._next_batch()

    def _end(self, timeout_s: float) -> None:
        self.board.close()  # workers may wait for versions that do not come
        super()._end(timeout_s)
        if self._trails_of_all is not None:
            self._trails_of_all.close()
