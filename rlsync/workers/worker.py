"""A worker process: adopt, fill a slot, and again, until the learner is gone."""

from __future__ import annotations

import signal
import traceback
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from rlsync.core.errors import BoardClosed, RlsyncError
from rlsync.sync.adopter import Adopt, Adopter, Destination
from rlsync.sync.starting import StartLog
from rlsync.transport.board.handle import BoardHandle
from rlsync.transport.ring.format import RingHandle
from rlsync.transport.ring.writer import RingWriter
from rlsync.workers.envs.base import Envs
from rlsync.workers.envs.specs import EnvSpec, make_venv
from rlsync.workers.frames import RolloutShape
from rlsync.workers.player import Player, Seat, check_fits, materialised
from rlsync.workers.rollout import Roller, make_roller

#: The seeds of a worker's next life lie this far from those of the life before.
_SEEDS_APART = 1_000_003


@dataclass(frozen=True, slots=True)
class WorkerJob:
    """What a worker is told; small and picklable.

    Args:
        ring: where rollouts go.
        board: where weights come from.
        player: what acts, without memory.
        env: what it acts in.
        shape: of a slot.
        num_workers: how many workers there are.
        adopt: whether parameters are pointed at the board, or copied out of it.
        overlap: whether the environments are two groups: one steps while the player acts in the other.
        seed: of the first environment of the first worker.
        devices: where the player acts, of each worker.
        logs: where each worker leaves what it prints while it makes its environments.
    """

    ring: RingHandle
    board: BoardHandle
    player: Player
    env: EnvSpec
    shape: RolloutShape
    num_workers: int
    adopt: Adopt
    overlap: bool
    seed: int
    devices: tuple[torch.device, ...]
    logs: tuple[StartLog, ...]


def start_worker(method: str, job: WorkerJob, worker: int, life: int) -> BaseProcess:
    """Start a worker process.

    Args:
        method: a start method of :mod:`multiprocessing`.
        job, worker, life: see :func:`run_worker`.
    """
    context: Any = get_context(method)
    if method == "forkserver":  # imports take seconds: the fork server does them once, for restarts too
        context.set_forkserver_preload(["__main__", __name__, type(job.player).__module__])
    process: BaseProcess = context.Process(
        target=run_worker, args=(job, worker, life), name=f"rlsync worker {worker}", daemon=True
    )
    process.start()
    return process


def run_worker(job: WorkerJob, worker: int, life: int) -> None:
    """What the process runs.

    Args:
        job: what to do.
        worker: this worker's number.
        life: how often a worker of this number was started before.
    """
    prepare_process()
    try:
        writer = RingWriter(job.ring, worker)
    except BoardClosed:  # the learner has left in the meantime
        return
    try:
        _work(job, worker, life, writer)
    except Exception as error:
        told = error.what if isinstance(error, RlsyncError) else str(error)
        headline = f"{type(error).__name__}: {told.strip()}".splitlines()[0]
        writer.leave_last_words("\n".join([headline, "".join(traceback.format_exception(error)).rstrip()]))
        raise
    finally:
        writer.close()


def prepare_process() -> None:
    """One thread, and no signal handlers of a learner that forked this process; Ctrl-C is for the learner."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)


def adopting(board: BoardHandle, reader: int, player: Player, adopt: Adopt, device: torch.device) -> Adopter:
    """Give a player memory, and attach it to the board; it has the newest version when this returns.

    Args:
        board: where versions come from. This process ends when their publisher is killed.
        reader: this process's number on the board.
        player: what acts, without memory.
        adopt: whether its parameters are pointed at the board, or copied out of it; on any device but the
            CPU they are copied.
        device: where the player gets its memory.

    Raises:
        BoardClosed: the learner has closed the board or died.
    """
    materialised(player, device)
    places = {
        name: Destination(lambda module=module: module, adopt)  # type: ignore[misc]
        for name, module in player.modules.items()
    }
    adopter = Adopter(board, reader)
    adopter.end_with_the_learner()
    adopter.place(places)
    adopter.tell()
    adopter.adopt()
    return adopter


def _work(job: WorkerJob, worker: int, life: int, writer: RingWriter) -> None:
    device = job.devices[worker]
    adopter = adopting(job.board, worker, job.player, job.adopt, device)
    offset = worker * job.shape.num_envs
    seed = writer.new_seed()
    first = (job.seed if seed is None else seed) + offset + life * _SEEDS_APART
    seat = Seat.taken(job.player, first, device, worker, job.num_workers)
    with job.logs[worker].making():
        roller = _roller(job, seat)
        roller.reset(first)
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


def _roller(job: WorkerJob, seat: Seat) -> Roller:
    def make_envs(count: int) -> Envs:
        envs = make_venv(job.env, count)
        check_fits(job.player, envs, str(job.env))
        return envs

    return make_roller(seat, make_envs, job.shape, overlap=job.overlap)
