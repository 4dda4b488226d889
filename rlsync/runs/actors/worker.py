"""A worker process: adopt, fill a slot with a rollout, and again, until the learner is gone."""

from __future__ import annotations

import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
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
from rlsync.runs.actors.trail import Trail, TrailHandle
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

#: the seeds of a process that takes the place of one that died, and acts otherwise, lie this far from its
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
    # what a process that died has done, to be done again; None: who takes its place acts otherwise
    trails: TrailHandle | None = None


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


def seed_after(seed: int, frames: int) -> int:
    """The seed of a life that begins after so many frames: with the run's own, workers would play them again."""
    return int(np.random.SeedSequence([seed, frames]).generate_state(1)[0]) % 2**30


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

    After so many rollouts as ``settings.life_rollouts`` says another life begins, as that of a run that goes on
    from a checkpoint: with environments made anew, and seeds of its own. Episodes go on in it where the
    environments can be saved, see :mod:`rlsync.runs.actors.envs.saving`.
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
        self._trail: Trail | None = None
        #: What is added to the seed of a life for the first environment of this worker.
        self._offset = worker * crew.settings.envs_per_worker
        if job.trails is not None:
            self._trail = job.trails.open(worker)
        else:
            self._offset += life * _SEEDS_APART
        self._run_seed = job.seed
        given_seed = writer.new_seed()
        #: That of the first life of this run.
        self._first_seed = job.seed if given_seed is None else given_seed
        self._seat = Seat.taken(player, self._life_seed(), device, worker, len(crew.devices))
        self._roller: Roller | None = None
        self._in_life = 0  # rollouts

    def make_envs(self) -> None:
        """Make the environments, and begin an episode in each; then this worker is ready."""
        self._begin_life()
        policy = nn.ModuleList(self._crew.player.modules.values())
        self.adopter.answers.shadow = lambda: Shadow(
            policy, self._crew.player.modules, self._here().act_once_more, self._here().before_acts
        )
        if self._trail is not None:
            self._catch_up(self._trail)
        self._writer.announce_ready()

    def _here(self) -> Roller:
        assert self._roller is not None, "its environments were made"
        return self._roller

    def _life_seed(self) -> int:
        """The seed of this worker's first environment in the life of its next rollout."""
        every = self._crew.settings.life_rollouts
        rollouts = self._writer.written
        if every is None or rollouts < every:
            return self._first_seed + self._offset
        frames = self._frames_before(rollouts - rollouts % every)
        return seed_after(self._run_seed, frames) + self._offset

    def _frames_before(self, rollouts: int) -> int:
        """The frames that the run has after so many rollouts of each worker."""
        crew = self._crew
        of_rollout = crew.settings.steps * crew.settings.envs_per_worker
        return self._writer.frames_before + rollouts * len(crew.devices) * of_rollout

    def _begin_life(self) -> None:
        """Make the environments anew, with the seeds of the life of the next rollout."""
        self._roller, before = None, self._roller
        if before is not None:
            before.close()
        seed = self._life_seed()
        seed_all(seed)
        self._seat.generator.manual_seed(seed)
        self._roller = self._made_roller()
        self._roller.reset(seed)
        self._in_life = 0
        every = self._crew.settings.life_rollouts
        if every is not None:
            written = self._writer.written
            self._writer.life = written // every
            if self._trail is not None:
                self._go_on(self._trail, self._frames_before(written - written % every))

    def _go_on(self, trail: Trail, frames: int) -> None:
        """Go on with the episodes of the life before this one, which ended after so many frames of the run.

        New episodes are saved and loaded, too: who has an error in that shall know it before the first frame.
        """
        roller = self._here()
        new = roller.saved()
        if new is None:
            return
        trail.require_room(new)
        roller.load(trail.saved(frames) or new)

    def _leave_off(self, trail: Trail) -> None:
        """Keep what the next life goes on from, where another one begins after this rollout."""
        saved = self._here().saved()
        if saved is not None:
            rollouts = self._writer.written + 1
            trail.save(self._writer.life + 1, self._frames_before(rollouts), saved)

    def _made_roller(self) -> Roller:
        env = self._crew.env
        player = self._crew.player
        settings = self._crew.settings

        def make(count: int) -> Envs:
            envs = make_venv(env, count)
            check_fits(player, envs, str(env))
            if player.keeps_last:
                envs.keep_last()
            return envs

        return Roller(
            self._seat,
            make,
            settings.shape,
            overlap=settings.overlap,
            clip_reward=settings.clip_reward,
        )

    def _catch_up(self, trail: Trail) -> None:
        """Bring the environments to where those of a process that died were, by the same actions.

        The player, which is not asked, gets its state back, and its random numbers.
        """
        writer = self._writer
        rollouts = writer.written
        every = self._crew.settings.life_rollouts
        if every is not None:
            rollouts %= every
        if not rollouts:
            return
        roller = self._here()
        number, views = writer.memory_of_its_own()
        slot = trail.slot(number, views)
        differs: list[str] = []
        for place in range(rollouts):
            recorded = trail.entry(place, slot)
            if not roller.repeat(number, views, lambda: writer.closing):
                return
            writer.count_wait(time.monotonic_ns())  # a sign of life
            if not differs:
                differs = slot.sums().other_than(recorded)
                if differs:
                    _tell_not_decided(self._crew.env, writer.written - rollouts + place, differs)
        roller.standing = trail.standing_after(writer.written - 1)
        self._in_life = rollouts

    def step(self) -> bool:
        """Make a rollout, once a slot is free; False: the learner is gone."""
        writer = self._writer
        views = writer.take()
        if views is None or writer.slot is None:
            return False
        seed = writer.new_seed()
        is_over = self._in_life == self._crew.settings.life_rollouts
        # The seed that a life has just begun with changes nothing.
        if seed is not None and (self._in_life or seed != self._first_seed):
            self._first_seed = seed
            is_over = True
        if is_over:
            self._begin_life()
        roller = self._here()
        with self.adopter.acting() as version:
            complete = roller.roll(writer.slot, views, version, lambda: writer.closing)
            if trace.ON:
                trace.write(trace.worker(self._seat.worker), "stamp", version)
        if complete:
            if self._trail is not None:
                slot = self._trail.slot(writer.slot, views)
                self._trail.note(writer.written, self._in_life, slot, roller.standing)
                if self._in_life + 1 == self._crew.settings.life_rollouts:
                    self._leave_off(self._trail)
            self._in_life += 1
            writer.commit()
        return complete

    def close(self) -> None:
        self.adopter.close()
        if self._trail is not None:
            self._trail.close()
        if self._roller is not None:
            self._roller.close()


def _tell_not_decided(env: EnvSpec, rollout: int, differs: Sequence[str]) -> None:
    """Say that environments answered the same actions otherwise."""
    parts = " and ".join(differs)
    problem = (
        f"the same actions in rollout {rollout} had another {parts}: the seed does not decide this "
    )
    problem += "environment, and from here on this run is not the same as others of its seed"
    cure = "rlsync doctor --env names the first step that differs"
    sys.stderr.write(f"{problem}\n  where  {env}\n  cure   {cure}\n")
