"""What passes between learner and agents, without Ray: jobs, orders, numbered calls and rollouts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Condition
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rlsync import PublishError
from rlsync.runs.actors import frames as keys
from rlsync.runs.actors.ring.format import RingCounters
from rlsync.runs.actors.ring.reader import TakenRollout
from rlsync.runs.actors.worker import Crew
from rlsync.seams import Layout


class Flat(NamedTuple):
    """A rollout on its way to the learner: Ray copies the array of bytes once, and pickles nothing of it."""

    writer: int  # which worker of its node filled it
    life: int  # how often that worker had been started before
    number: int  # which of that worker's rollouts it is, from 0
    finals: int  # how many final observations there are
    counters: RingCounters  # of its node's ring when it left
    image: NDArray[np.uint8]  # without the room for final observations that nobody used


@dataclass(frozen=True, slots=True)
class NodeJob:
    mailbox: Any  # where it hears of versions; see NodeReceiver
    node: str  # the name of the node
    numbers: tuple[int, ...]  # the learner's number of each worker of this node
    crew: Crew
    seed: int  # of the first environment of the first worker of this node
    seeds: int  # how often the learner had given a seed by then


@dataclass(frozen=True, slots=True)
class Orders:
    """What the learner wants of all nodes; the newest orders hold."""

    number: int  # from 1
    running: bool  # whether workers may begin rollouts
    seeds: int  # how often the learner has given a seed
    seed: int  # the last one, of the first environment of this node


class Turns:
    """Serves calls one at a time in order of their numbers, all of which must be used: Ray promises none."""

    def __init__(self) -> None:
        self._next = 0
        self._changed = Condition()

    @contextmanager
    def turn(self, number: int, timeout_s: float) -> Iterator[None]:
        """Wait for a call's turn, which ends with the block; PublishError: not within ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while self._next != number:
                if (
                    not self._changed.wait(max(0.0, deadline - time.monotonic()))
                    and self._next != number
                ):
                    problem = f"call {number} waited {timeout_s:g} s for its turn; call {self._next} is next"
                    cure = "look what holds that call up; the learner ends this agent and starts another one"
                    raise PublishError(problem, "a node's agent", cure)
        try:
            yield
        finally:
            with self._changed:
                self._next = number + 1
                self._changed.notify_all()


def pack(rollout: TakenRollout, layout: Layout, counters: RingCounters) -> Flat:
    finals = int(rollout.views[keys.FINAL_COUNT])
    image = rollout.image[: _used_bytes(layout, finals)].clone().numpy()
    return Flat(rollout.writer, rollout.life, rollout.number, finals, counters, image)


def unpack(flat: Flat, layout: Layout, into: Tensor) -> dict[str, Tensor]:
    """Copy a rollout into memory, and return its arrays there; PublishError if it is of another layout."""
    used = flat.image.nbytes
    if used != _used_bytes(layout, flat.finals):
        problem = "what came from a node is not a rollout of this run"
        cure = "run the same version of rlsync, with the same environment, on all nodes"
        raise PublishError(problem, f"{used:,} bytes", cure)
    np.copyto(into.numpy()[:used], flat.image)
    names = [entry.leaf.name for entry in layout.entries]
    views = dict(zip(names, layout.views(into), strict=True))
    return views | {name: views[name][: flat.finals] for name in keys.FINAL}


def _used_bytes(layout: Layout, finals: int) -> int:
    last = layout.entries[-1]
    assert last.leaf.name == keys.FINAL_OBSERVATION, "RolloutShape lays them out last"
    return last.offset + (last.leaf.payload_bytes // last.leaf.shape[0]) * finals
