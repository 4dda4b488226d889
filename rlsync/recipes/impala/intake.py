"""What comes out of the ring, batch by batch, with an eye on the workers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from tensordict import TensorDict

from rlsync.recipes.impala.supervise import LOOK_EVERY_S, Workers
from rlsync.recipes.impala.unrolls import batch_of
from rlsync.transport.rollout_ring import RolloutRing, TakenRollout


class Intake:
    """Takes rollouts in the order in which they were completed, and makes batches of them.

    Args:
        ring: where they come from.
        workers: who brings them; looked at whenever a rollout is awaited.
        rollouts: in one batch. Those of one are not copied; several are, and given back at once.
        silent_timeout_s: how long to wait for a rollout while nothing happens to the workers, seconds.
    """

    def __init__(self, ring: RolloutRing, workers: Workers, rollouts: int, silent_timeout_s: float) -> None:
        self._ring = ring
        self._workers = workers
        self._rollouts = rollouts
        self._silent_timeout_s = silent_timeout_s
        self._held: list[TakenRollout] = []
        self._running = False
        self.writers: tuple[int, ...] = ()

    def batch(self) -> TensorDict:
        """The next one; the slot of the one before is given back.

        Raises:
            WorkerLost: a worker ended too often, or none is left.
            AdoptionTimeout: all workers are silent, or no rollout comes although they are not.
        """
        self.release()
        if not self._running:
            self._running = True
            self._ring.run()
        for _ in range(self._rollouts):
            self._held.append(self._wait())
        self.writers = tuple(taken.writer for taken in self._held)
        batch = batch_of([taken.views for taken in self._held])
        if self._rollouts > 1:
            self.release()
        return batch

    def release(self) -> None:
        """Give back what is held."""
        for taken in self._held:
            self._ring.give_back(taken)
        self._held = []

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Workers begin no further rollout inside the block."""
        self._ring.pause()
        try:
            yield
        finally:
            if self._running and not self._ring.closed:
                self._ring.run()

    def _wait(self) -> TakenRollout:
        deadline = time.monotonic() + self._silent_timeout_s
        while True:
            if self._workers.look():
                deadline = time.monotonic() + self._silent_timeout_s
            taken = self._ring.take(LOOK_EVERY_S)
            if taken is not None:
                return taken
            if time.monotonic() >= deadline:
                raise self._workers.silent()
