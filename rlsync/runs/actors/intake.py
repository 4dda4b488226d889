"""Batches of rollouts, on the learner's device; while it waits for them, it looks after the workers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from tensordict import TensorDict

from rlsync import AdoptionTimeout, RlsyncError
from rlsync.runs.actors import frames as keys
from rlsync.runs.actors.ring.reader import TakenRollout
from rlsync.seams import device, processes, trace


class Rollouts(Protocol):
    """The learner's end of where rollouts come from: a ring, or the nodes of a cluster."""

    dropped: Callable[[TakenRollout], object] | None  #: is told of each that is dropped

    @property
    def closed(self) -> bool: ...

    def run(self) -> None:
        """Let workers begin rollouts."""

    def pause(self) -> None:
        """Let workers begin no other rollout."""

    def take(self, timeout_s: float) -> TakenRollout | None:
        """The next rollout; ``None`` if there was none in time."""

    def give_back(self, taken: TakenRollout) -> None:
        """Let the memory of a rollout be used again."""


class RolloutMakers(Protocol):
    """Whoever makes the rollouts."""

    def look(self) -> bool:
        """Look after them; whether that took or gave time, so that the patience with them begins anew."""

    def silent(self, timeout_s: float) -> AdoptionTimeout | None:
        """The error to raise when no rollout has come from anybody for that long.

        None: something has become of one of them, which the next :meth:`look` tells.
        """


class Form(Protocol):
    """What a batch looks like: unrolls, or transitions."""

    def batch(self, rollouts: Sequence[TakenRollout], device: torch.device) -> TensorDict:
        """The batch of these rollouts, on a device."""


class RolloutId(NamedTuple):
    """Which rollout it is. Those of a worker's life follow each other if their numbers do."""

    worker: int
    life: int  #: how often the worker had been started before
    number: int  #: of the worker's rollouts, over all its lives


@dataclass(eq=False)
class Intake:
    """Makes batches of rollouts in the order of their completion.

    On the CPU a single one is not copied; copies are given back when they are done. ``silent_timeout_s`` is
    how long to wait for a rollout while no worker ends or is started.
    """

    ring: Rollouts
    workers: RolloutMakers
    rollouts: int  # in a batch
    form: Form
    silent_timeout_s: float
    device: torch.device

    def __post_init__(self) -> None:
        self._held: list[TakenRollout] = []
        self._copied = device.NOTHING_QUEUED  # from then on no copy reads the held slots
        self._running = False
        self._look_next_s = 0.0  # when to look after the workers, although there are rollouts
        self._stopped: RlsyncError | None = None
        self.last: tuple[RolloutId, ...] = ()  # of the last batch
        self._tell: Callable[[TakenRollout, bool], object] | None = None

    def batch(self) -> TensorDict:
        """Wait for the next batch, and give the one before back. It raises what the makers raise."""
        self.release()
        if not self._running:
            self._running = True
            self.ring.run()
        for _ in range(self.rollouts):
            rollout = self._wait()
            if trace.ON:
                _trace(rollout)
            if self._tell is not None:
                self._tell(rollout, False)
            if device.is_queued(self.device):
                arrays = [v for name, v in rollout.views.items() if name not in keys.FINAL]
                device.pin(device.shared_memory(arrays), self.device)
            self._held.append(rollout)
        self.last = tuple(RolloutId(each.writer, each.life, each.number) for each in self._held)
        batch = self.form.batch(self._held, self.device)
        if device.is_queued(self.device):
            self._copied = device.Moment.now([self.device])
        elif self.rollouts > 1:
            self.release()
        return batch

    def tell_of_rollouts(self, tell: Callable[[TakenRollout, bool], object]) -> None:
        """Call ``tell(rollout, dropped)`` for each rollout that is taken, or dropped, when it is."""
        self._tell = tell
        self.ring.dropped = lambda rollout: tell(rollout, True)

    def stop_waiting(self, error: RlsyncError) -> None:
        self._stopped = error

    def close(self) -> None:
        self.release()

    def release(self) -> None:
        """Give back the slots that are held, as soon as no copy reads them."""
        self._copied.wait()
        for rollout in self._held:
            self.ring.give_back(rollout)
        self._held = []

    @contextmanager
    def paused(self) -> Iterator[None]:
        self.ring.pause()
        try:
            yield
        finally:
            if self._running and not self.ring.closed:
                self.ring.run()

    def _wait(self) -> TakenRollout:
        now_s = time.monotonic()
        deadline = now_s + self.silent_timeout_s
        # A look costs as much as a small batch: where rollouts are there, it is made every now and then.
        looks = now_s >= self._look_next_s
        while True:
            if self._stopped is not None:
                raise self._stopped
            if not looks and (rollout := self.ring.take(0.0)) is not None:
                return rollout
            looks = True
            if self.workers.look():
                deadline = time.monotonic() + self.silent_timeout_s
            self._look_next_s = time.monotonic() + processes.LOOK_EVERY_S
            rollout = self.ring.take(processes.LOOK_EVERY_S)
            if rollout is not None:
                return rollout
            if time.monotonic() >= deadline:
                error = self.workers.silent(self.silent_timeout_s)
                if error is not None:
                    raise error


def _trace(rollout: TakenRollout) -> None:
    version = int(rollout.views[keys.POLICY_VERSION][0, 0])
    facts = {"worker": rollout.writer, "life": rollout.life, "number": rollout.number}
    trace.write(trace.LEARNER, "take", version, **facts)
