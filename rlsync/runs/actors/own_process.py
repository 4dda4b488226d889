"""A worker in the learner's own process, for debuggers and notebooks: the same code, and the same run."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess

import numpy as np
import torch

from rlsync import AdoptionTimeout
from rlsync.runs.actors.ring.writer import RingWriter
from rlsync.runs.actors.worker import Worker, WorkerJob
from rlsync.seams import starting


class OwnProcess:
    """Takes the place of a :class:`~rlsync.runs.actors.supervision.Supervisor`.

    Its one worker makes a rollout whenever the learner waits for one, so it acts with what the learner has
    published by then. What an environment raises is raised to the learner.
    """

    procs: list[BaseProcess] = []  # noqa: RUF012 - it never has one
    restarts = 0

    def __init__(self, job: WorkerJob) -> None:
        self._writer = RingWriter(job.ring, 0)
        self._randomness = Randomness()
        with self._randomness.used():
            self._worker = Worker(job, worker=0, life=0, writer=self._writer)

    def await_start(self, timeout_s: float, logs: starting.StartLogs) -> None:
        """Make the environments; nobody else is there who could be late."""
        logs.close()
        with self._randomness.used():
            self._worker.make_envs()

    def look(self) -> bool:
        """Make the rollout that the learner waits for."""
        with self._randomness.used():
            self._worker.step()
        return True

    def silent(self, timeout_s: float) -> AdoptionTimeout:
        problem = f"no rollout was completed for {timeout_s:g} s"
        return AdoptionTimeout(
            problem, "acting in the learner's own process", "look at the environment"
        )

    def end(self, timeout_s: float) -> None:
        self._worker.close()
        self._writer.close()


class Randomness:
    """The states of the random numbers that belong to no generator: those of Python, numpy and torch.

    What is seeded or drawn inside :meth:`used` goes on from where the last use ended, and those who draw
    outside do not notice it. So a worker in the learner's process draws what one in its own process draws.
    """

    def __init__(self) -> None:
        self._state = self._now()

    @contextmanager
    def used(self) -> Iterator[None]:
        """Use these states inside."""
        outside = self._now()
        self._put(self._state)
        try:
            yield
        finally:
            self._state = self._now()
            self._put(outside)

    @staticmethod
    def _now() -> tuple[object, ...]:
        return random.getstate(), np.random.get_state(), torch.get_rng_state()

    @staticmethod
    def _put(state: tuple[object, ...]) -> None:
        of_python, of_numpy, of_torch = state
        random.setstate(of_python)  # type: ignore[arg-type]
        np.random.set_state(of_numpy)  # type: ignore[arg-type]
        torch.set_rng_state(of_torch)  # type: ignore[arg-type]
