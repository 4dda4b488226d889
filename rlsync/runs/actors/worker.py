"""A worker process: adopt, fill a slot with a rollout, and again, until the learner is gone."""

from __future__ import annotations

import random
import signal
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import set_forkserver_preload
from multiprocessing.process import BaseProcess

import numpy as np
import torch
from torch import nn

from rlsync import BoardClosed, RlsyncError
from rlsync.runs.actors.envs.specs import EnvSpec, make_venv
from rlsync.runs.actors.envs.vectors import Envs
from rlsync.runs.actors.player import Player, Seat, check_fits, materialised, player_call
from rlsync.runs.actors.ring.format import RingHandle
from rlsync.runs.actors.ring.reader import RolloutRing
from rlsync.runs.actors.ring.writer import RingWriter
from rlsync.runs.actors.roller import Roller
from rlsync.runs.actors.settings import CollectSettings
from rlsync.runs.actors.supervision import Supervisor
from rlsync.seams import (
    Adopt,
    Adopter,
    BoardHandle,
    Destination,
    Layout,
    Shadow,
    acts,
    families,
    planned,
    starting,
    trace,
)

#: the seeds of a worker's next life lie this far from those of the life before
_SEEDS_APART = 1_000_003


@dataclass(frozen=True, slots=True)
class Crew:
    """The workers of one machine: with what, where and how they act; picklable if the player has no memory."""

    player: Player
    env: EnvSpec
    devices: tuple[torch.device, ...]  # where the player acts, one for each worker
    slots: int  # of their ring
    settings: CollectSettings

    def layout(self) -> Layout:
        """What a slot of their ring holds."""
        return self.settings.shape.layout(self.player)


@dataclass(frozen=True, slots=True)
class WorkerJob:
    crew: Crew
    ring: RingHandle  # where rollouts go
    board: BoardHandle | planned.PlannedHandle  # where weights come from
    seed: int  # of the first environment of the first worker
    # where each worker leaves what it prints while it makes its environments
    logs: tuple[starting.StartLog, ...]


def start_workers(job: WorkerJob, ring: RolloutRing) -> Supervisor:
    """Start the worker processes of this host; wait for them with :meth:`Supervisor.await_start`."""
    return supervised(partial(start_worker, job), job.crew, ring)


def supervised(
    start: Callable[[int, int], BaseProcess], crew: Crew, ring: RolloutRing
) -> Supervisor:
    """Start each worker of a crew, by ``start(worker, life)``, and start it again as its settings say."""
    settings = crew.settings
    workers = len(crew.devices)
    return Supervisor(start, workers, ring, settings.restarts, settings.silent_timeout_s)


def start_worker(job: WorkerJob, worker: int, life: int) -> BaseProcess:
    crew = job.crew
    method = crew.settings.start_method
    # imports take seconds: the fork server does them once, for restarts too
    if method == "forkserver":
        set_forkserver_preload(["__main__", __name__, type(crew.player).__module__])
    return families.start_process(
        method, run_worker, (job, worker, life), f"rlsync worker {worker}"
    )


def run_worker(job: WorkerJob, worker: int, life: int) -> None:
    """What the process runs; a worker of this number was started ``life`` times before."""
    prepare_process()
    try:
        writer = RingWriter(job.ring, worker, life)
    except BoardClosed:  # the learner has left in the meantime
        return
    try:
        acting = Worker(job, worker, life, writer)
        acting.adopter.end_with_the_learner()
        with job.logs[worker].making():
            acting.make_envs()
        try:
            while acting.step():
                pass
        finally:
            acting.close()
    except BoardClosed:  # the learner ends, or a rerun lets this life end where it was recorded to
        return
    except Exception as error:
        problem = str(error)
        if isinstance(error, RlsyncError):
            problem = error.what
        headline = f"{type(error).__name__}: {problem.strip()}".splitlines()[0]
        writer.leave_last_words(
            "\n".join([headline, "".join(traceback.format_exception(error)).rstrip()])
        )
        raise
    finally:
        writer.close()


def seed_all(seed: int) -> None:
    """Seed what environments and players may draw from besides the numbers that they are given."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def prepare_process() -> None:
    """One thread, its own process group, no signal handlers of a learner that forked it, and no Ctrl-C."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    families.lead_group()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)


def adopting(
    board: BoardHandle | planned.PlannedHandle,
    reader: int,
    player: Player,
    adopt: Adopt,
    device: torch.device,
    *,
    prove: bool = False,
) -> Adopter:
    """Give a player memory on a device, and attach it to the board with the newest version.

    Only the CPU aliases. BoardClosed: the publisher has closed, or died.
    """
    materialised(player, device)
    places = {
        name: Destination(lambda module=module: module, adopt)  # type: ignore[misc]
        for name, module in player.modules.items()
    }
    adopter = Adopter(board, reader)
    if prove:
        # Weights that are there, in memory of this process: what is aliased cannot be written to.
        adopter.place({name: replace(place, adopt="copy") for name, place in places.items()})
        adopter.adopt()
        if adopt == "alias":
            aliased = set(player.modules)
        else:
            aliased = set()
        adopter.note_acting(
            acts.examined(player.modules, player_call(player, device), alias=aliased)
        )
    adopter.place(places)
    adopter.tell()
    adopter.adopt()
    return adopter


class Worker:
    """Adopts, fills a slot of the ring with a rollout, and again; in its own process, or in the learner's.

    It begins with the player's memory, on the board; :meth:`make_envs` comes next. BoardClosed: the learner
    has closed the board, or died.
    """

    def __init__(self, job: WorkerJob, worker: int, life: int, writer: RingWriter) -> None:
        crew = job.crew
        player = crew.player
        device = crew.devices[worker]
        self._crew = crew
        self._writer = writer
        self.adopter = adopting(job.board, worker, player, crew.settings.adopt, device, prove=True)
        if isinstance(self.adopter.reader, planned.PlannedReader):
            self.adopter.reader.waiting = writer.count_wait
        #: What is added to the seed of a run, or to a new one, for the first environment of this worker.
        self._offset = worker * crew.settings.envs_per_worker + life * _SEEDS_APART
        seed = writer.new_seed()
        if seed is None:
            seed = job.seed
        self._first_seed = seed + self._offset
        seed_all(self._first_seed)
        self._seat = Seat.taken(player, self._first_seed, device, worker, len(crew.devices))
        self._roller: Roller | None = None

    def make_envs(self) -> None:
        """Make the environments, and begin an episode in each; then this worker is ready."""
        env = self._crew.env
        player = self._crew.player
        settings = self._crew.settings

        def make(count: int) -> Envs:
            envs = make_venv(env, count)
            check_fits(player, envs, str(env))
            if player.keeps_last:
                envs.keep_last()
            return envs

        roller = Roller(
            self._seat,
            make,
            settings.shape,
            overlap=settings.overlap,
            clip_reward=settings.clip_reward,
        )
        self._roller = roller
        roller.reset(self._first_seed)
        policy = nn.ModuleList(player.modules.values())
        self.adopter.answers.shadow = lambda: Shadow(
            policy, player.modules, roller.act_once_more, roller.before_acts
        )
        self._writer.announce_ready()

    def step(self) -> bool:
        """Make a rollout, once a slot is free; False: the learner is gone."""
        roller = self._roller
        writer = self._writer
        assert roller is not None, "its environments were made"
        views = writer.take()
        if views is None or writer.slot is None:
            return False
        if (seed := writer.new_seed()) is not None:
            seed_all(seed + self._offset)
            self._seat.generator.manual_seed(seed + self._offset)
            roller.reset(seed + self._offset)
        with self.adopter.acting() as version:
            complete = roller.roll(writer.slot, views, version, lambda: writer.closing)
            if trace.ON:
                trace.write(trace.worker(self._seat.worker), "stamp", version)
        if complete:
            writer.commit()
        return complete

    def close(self) -> None:
        self.adopter.close()
        if self._roller is not None:
            self._roller.close()
