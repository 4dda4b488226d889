"""A worker process: adopt, fill a slot, and again, until the learner is gone."""

from __future__ import annotations

import signal
import traceback
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from rlsync.core.errors import BoardClosed, ConfigError, RlsyncError
from rlsync.recipes.impala.env_base import Envs
from rlsync.recipes.impala.envs import EnvSpec, make_venv
from rlsync.recipes.impala.models import ImpalaNet
from rlsync.recipes.impala.rollout import Group, Roller
from rlsync.recipes.impala.unrolls import RolloutShape, observation_dtype
from rlsync.tensors.target import materialise
from rlsync.torchrl_plugin.adopter import Adopter, Place
from rlsync.transport.board_handle import BoardHandle
from rlsync.transport.rollout_format import RingHandle
from rlsync.transport.rollout_writer import RingWriter

#: The one destination that these workers have.
POLICY = "policy"

#: Seeds of a worker that was started again lie this far from those of its first life.
_SEEDS_APART = 1_000_003


@dataclass(frozen=True, slots=True)
class Job:
    """What a worker is told; small and picklable.

    Args:
        ring: where rollouts go.
        board: where weights come from.
        network: what acts, without its memory.
        env: what it acts in.
        shape: what a slot holds.
        overlap: whether the environments are two groups, one of which steps while the other thinks.
        seed: of the first environment of the first worker.
    """

    ring: RingHandle
    board: BoardHandle
    network: ImpalaNet
    env: EnvSpec
    shape: RolloutShape
    overlap: bool
    seed: int


def start_worker(method: str, job: Job, worker: int, life: int) -> BaseProcess:
    """Start the process.

    Args:
        method: of :mod:`multiprocessing`.
        job, worker, life: see :func:`run_worker`.
    """
    context: Any = get_context(method)
    if method == "forkserver":  # imports take seconds; the server makes them once, also for later starts
        context.set_forkserver_preload(["__main__", __name__])
    process: BaseProcess = context.Process(
        target=run_worker, args=(job, worker, life), name=f"rlsync worker {worker}", daemon=True
    )
    process.start()
    return process


def run_worker(job: Job, worker: int, life: int) -> None:
    """The process.

    Args:
        job: what to do.
        worker: this worker's number.
        life: how often a worker of this number was started before.
    """
    # Of a learner that forked it a worker inherits handlers; and Ctrl-C is for the learner to answer.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    try:
        writer = RingWriter(job.ring, worker)
    except BoardClosed:  # the learner has left meanwhile
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


def adopting(board: BoardHandle, reader: int, network: ImpalaNet) -> Adopter:
    """What brings a network that came without its memory up to date; it has the newest version already.

    Args:
        board: where versions come from. This process ends when their publisher is killed.
        reader: this process's number on the board.
        network: what acts.

    Raises:
        BoardClosed: the learner has closed the board or died.
    """
    materialise(network.requires_grad_(False))
    adopter = Adopter(board, reader)
    adopter.end_with_the_learner()
    adopter.stand({POLICY: Place(lambda: network)})
    adopter.tell()
    adopter.adopt()
    return adopter


def _work(job: Job, worker: int, life: int, writer: RingWriter) -> None:
    adopter = adopting(job.board, worker, job.network)
    seed = writer.new_seed()
    first = (job.seed if seed is None else seed) + worker * job.shape.num_envs + life * _SEEDS_APART
    generator = torch.Generator().manual_seed(first)
    roller = make_roller(job, generator)
    roller.reset(first)
    writer.stand()
    try:
        while (views := writer.take()) is not None and writer.slot is not None:
            if (seed := writer.new_seed()) is not None:
                generator.manual_seed(seed + worker * job.shape.num_envs)
                roller.reset(seed + worker * job.shape.num_envs)
            with adopter.acting() as version:
                complete = roller.roll(writer.slot, views, version, lambda: writer.closing)
            if not complete:
                return
            writer.commit()
    finally:
        adopter.close()
        roller.close()


def make_roller(job: Job, generator: torch.Generator) -> Roller:
    """The groups of environments of one worker, and the network that acts in them.

    Raises:
        ConfigError: the environments are not those that the network is for.
    """
    count = job.shape.num_envs
    sizes = [count // 2, count - count // 2] if job.overlap else [count]
    groups: list[Group] = []
    for number, size in enumerate(sizes):
        envs = make_venv(job.env, size)
        check_fits(envs, job.network, job.env)
        groups.append(Group(envs, job.network, job.shape, number, sum(sizes[:number]), generator))
    return Roller(groups, job.shape)


def check_fits(envs: Envs, network: ImpalaNet, spec: EnvSpec) -> None:
    """Refuse a network whose observations or actions are not the environment's.

    Raises:
        ConfigError: they are not.
    """
    seen = f"{list(network.observation_shape)} of {observation_dtype(network)}"
    shown = f"{list(envs.observation_shape)} of {envs.observation_dtype}"
    if seen != shown:
        raise ConfigError(
            f"the network is for observations {seen}, the environment shows {shown}",
            str(spec),
            "build the network with the observation shape of the environment",
        )
    ours, theirs = network.head, envs.head
    same = ours.action_shape == theirs.action_shape and ours.action_dtype is theirs.action_dtype
    if not same or ours.features != theirs.features:
        raise ConfigError(
            f"the network acts by {ours}, the environment takes what fits {theirs}",
            str(spec),
            f"build the network with head={theirs}",
        )
