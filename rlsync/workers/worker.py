"""A worker process: adopt, fill a slot, and again, until the learner is gone."""

from __future__ import annotations

import signal
import traceback
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch import nn

from rlsync.core.errors import BoardClosed, RlsyncError
from rlsync.sync.acts import examined
from rlsync.sync.adopter import Adopt, Adopter, Destination
from rlsync.sync.sample import Shadow
from rlsync.sync.starting import StartLog, StartLogs
from rlsync.transport.board.reader import BoardHandle
from rlsync.transport.ring.format import RingHandle
from rlsync.transport.ring.reader import RolloutRing
from rlsync.transport.ring.writer import RingWriter
from rlsync.workers.envs.base import Envs
from rlsync.workers.envs.specs import EnvSpec, make_venv
from rlsync.workers.frames import RolloutShape
from rlsync.workers.player import Player, Seat, check_fits, materialised, player_call
from rlsync.workers.rollout import Roller, make_roller
from rlsync.workers.supervision import Restarts, Supervisor

#: The seeds of a worker's next life lie this far from those of the life before.
_SEEDS_APART = 1_000_003


@dataclass(frozen=True, slots=True)
class CollectSettings:
    """How the workers of one host act, and how they are kept running; picklable once the player has no
    memory.
    """

    player: Player
    env: EnvSpec
    shape: RolloutShape  # of a rollout
    slots: int  # of the ring
    adopt: Adopt  # whether parameters are pointed at the board, or copied out of it
    overlap: bool  # two groups of environments: one steps while the player acts in the other
    devices: tuple[torch.device, ...]  # where the player acts, one for each worker
    restarts: Restarts  # of one worker
    start_method: str  # of multiprocessing
    silent_timeout_s: float  # without a sign of life
    prove: bool = (
        True  # whether each worker finds out, before its first frame, if the player's parameters act
    )


@dataclass(frozen=True, slots=True)
class WorkerJob:
    """What a worker process is given: settings, where rollouts go and weights come from, the seed of the
    first environment of the first worker, and where each worker leaves what it prints while it makes its
    environments.
    """

    settings: CollectSettings
    ring: RingHandle
    board: BoardHandle
    seed: int
    logs: tuple[StartLog, ...]


def start_workers(
    settings: CollectSettings, ring: RolloutRing, board: BoardHandle, seed: int, logs: StartLogs
) -> Supervisor:
    """Start the worker processes of this host; wait for them with :meth:`Supervisor.await_start`."""
    job = WorkerJob(settings, ring.handle, board, seed, tuple(logs))
    start, count = partial(start_worker, job), len(settings.devices)
    return Supervisor(start, count, ring, settings.restarts, settings.silent_timeout_s)


def start_worker(job: WorkerJob, worker: int, life: int) -> BaseProcess:
    """Start the process of a worker that was started ``life`` times before."""
    method = job.settings.start_method
    context: Any = get_context(method)
    if method == "forkserver":  # imports take seconds: the fork server does them once, for restarts too
        context.set_forkserver_preload(["__main__", __name__, type(job.settings.player).__module__])
    process: BaseProcess = context.Process(
        target=run_worker, args=(job, worker, life), name=f"rlsync worker {worker}", daemon=True
    )
    process.start()
    return process


def run_worker(job: WorkerJob, worker: int, life: int) -> None:
    """What the process runs; a worker of this number was started ``life`` times before."""
    prepare_process()
    try:
        writer = RingWriter(job.ring, worker)
    except BoardClosed:  # the learner has left in the meantime
        return
    try:
        _work(job, worker, life, writer)
    except Exception as error:
        what = error.what if isinstance(error, RlsyncError) else str(error)
        headline = f"{type(error).__name__}: {what.strip()}".splitlines()[0]
        writer.leave_last_words("\n".join([headline, "".join(traceback.format_exception(error)).rstrip()]))
        raise
    finally:
        writer.close()


def prepare_process() -> None:
    """One thread, and no signal handlers of a learner that forked this process; Ctrl-C is for the learner."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)


def adopting(
    board: BoardHandle,
    reader: int,
    player: Player,
    adopt: Adopt,
    device: torch.device,
    *,
    prove: bool = False,
) -> Adopter:
    """Give a player memory on a device, and attach it to the board as this reader; it has the newest version
    when this returns.

    On any device but the CPU, parameters are copied out of the board, whatever ``adopt`` says. This process
    ends when the board's publisher is killed. BoardClosed: the learner has closed the board or died.
    """
    materialised(player, device)
    places = {
        name: Destination(lambda module=module: module, adopt)  # type: ignore[misc]
        for name, module in player.modules.items()
    }
    adopter = Adopter(board, reader)
    adopter.end_with_the_learner()
    adopter.place(places)
    if prove:
        adopter.adopt()
        alias = player.modules if adopt == "alias" else ()
        adopter.note_acting(examined(player.modules, player_call(player, device), alias=alias))
    adopter.tell()
    adopter.adopt()
    return adopter


def _work(job: WorkerJob, worker: int, life: int, writer: RingWriter) -> None:
    settings = job.settings
    device = settings.devices[worker]
    adopter = adopting(job.board, worker, settings.player, settings.adopt, device, prove=settings.prove)
    offset = worker * settings.shape.num_envs
    seed = writer.new_seed()
    first = (job.seed if seed is None else seed) + offset + life * _SEEDS_APART
    seat = Seat.taken(settings.player, first, device, worker, len(settings.devices))
    with job.logs[worker].making():
        roller = _roller(settings, seat)
        roller.reset(first)
    if settings.prove:
        acts = nn.ModuleList(settings.player.modules.values())
        adopter.shadow = lambda: Shadow(
            acts, settings.player.modules, roller.act_once_more, roller.before_acts
        )
    writer.announce_ready()
    try:
        while (views := writer.take()) is not None and writer.slot is not None:
            if (seed := writer.new_seed()) is not None:
                seat.generator.manual_seed(seed + offset)
                roller.reset(seed + offset)
            with adopter.acting() as version:
                complete = roller.roll(writer.slot, views, version, lambda: writer.closing)
            if not complete:
                return
            writer.commit()
    finally:
        adopter.close()
        roller.close()


def _roller(settings: CollectSettings, seat: Seat) -> Roller:
    def make_envs(count: int) -> Envs:
        envs = make_venv(settings.env, count)
        check_fits(settings.player, envs, str(settings.env))
        return envs

    return make_roller(seat, make_envs, settings.shape, overlap=settings.overlap)
