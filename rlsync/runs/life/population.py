"""A population: learners in processes of their own, each an ordinary run, which share one replay.

This process makes the replay, starts the agents and waits for them. By a pipe it tells each of them to end,
in good order; if this process dies, the pipe tells so, too. An agent that dies leaves the others alone.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from rlsync import Forkserver, RlsyncError, WorkerLost
from rlsync.runs.actors.replay.shared import SharedReplayHandle
from rlsync.runs.life.ending import Ending, Interrupts
from rlsync.runs.life.job import Job, examined
from rlsync.runs.life.output import exit_status, output_read
from rlsync.runs.life.state import PLAIN_EVERY_S
from rlsync.runs.life.training import begun, train_job
from rlsync.runs.recipes.bounds import refuse
from rlsync.runs.recipes.run_files import AGENTS, OUTPUT, agent_folder, best_agent, statistics_in
from rlsync.runs.recipes.settings import Config
from rlsync.sync.families import let_forks_use_cuda, start_as
from rlsync.sync.processes import ending as ending_of


def train_population(job: Job, parent: Connection | None = None) -> int:
    """Train a population's agents; returns 0, or 128 and the number of the signal that ended it.

    WorkerLost, when all others have ended, if an agent was killed or failed. ``parent``: see
    :class:`Interrupts`.
    """
    from rlsync.runs.recipes.impala.recipe import shared_replay

    run_dir = begun(job)
    file, replay = shared_replay([*job.agents.values()], job.spaces)
    with closing(file):
        with (
            output_read(run_dir),
            Interrupts.caught(parent) as interrupts,
            Ending.of(run_dir) as ending,
        ):
            agents: dict[int, BaseProcess] = {}
            pipes: list[Connection] = []
            with interrupts.held():  # agents see none before they catch them
                Forkserver(preload=[__name__])
                for number, config in job.agents.items():
                    agents[number], pipe = _started(
                        config, replace(replay, agent=number), job.trusted
                    )
                    pipes.append(pipe)
            interrupts.attach(lambda why: _end(pipes))
            _await_end(agents, run_dir)
            print(f"best agent {best_agent(run_dir)}", flush=True)
            if interrupts.signal is not None:
                return ending.reached(interrupts.how(), interrupts.exit_status())
            lost = [
                f"agent {n} {ending_of(agent.exitcode)}"
                for n, agent in agents.items()
                if agent.exitcode
            ]
            if lost:
                cure = f"look at {AGENTS}/N/{OUTPUT}; resume={run_dir} goes on with these agents"
                raise WorkerLost(", ".join(lost), str(run_dir), cure)
            return ending.reached("all agents ended", 0)


def _started(
    config: Config, shared: SharedReplayHandle, trusted: bool
) -> tuple[BaseProcess, Connection]:
    """An agent's process, which may start others, and the pipe that it ends with."""
    ours, theirs = multiprocessing.Pipe()
    name = f"rlsync agent {shared.agent}"
    args = (config, shared, trusted, theirs)
    let_forks_use_cuda()
    process = multiprocessing.get_context("forkserver").Process(
        target=_train_agent, args=args, name=name
    )
    start_as("forkserver", process)
    theirs.close()
    return process, ours


def _end(pipes: Sequence[Connection]) -> None:
    for pipe in pipes:
        with suppress(OSError):  # that agent has ended
            pipe.send_bytes(b"end")


def _train_agent(
    config: Config, shared: SharedReplayHandle, trusted: bool, parent: Connection
) -> None:
    """What the process of an agent runs; what it prints goes to a file in its folder."""
    folder = Path(str(config.run_dir))
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / OUTPUT).open("a") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    try:
        job, errors = examined(config, trusted=trusted)
        refuse(errors)
        assert job is not None, "nothing is wrong"
        sys.exit(train_job(replace(job, shared=shared, trusted=trusted), parent))
    except RlsyncError as error:
        print(error, file=sys.stderr)
        sys.exit(exit_status(error))


def _await_end(agents: Mapping[int, BaseProcess], run_dir: Path) -> None:
    """Wait until all agents have ended; every few seconds print a line of each that goes on."""
    living = dict(agents)
    while living:
        wait([agent.sentinel for agent in living.values()], PLAIN_EVERY_S)
        for number, agent in list(living.items()):
            if agent.exitcode is not None:
                del living[number]
                print(f"agent {number} {ending_of(agent.exitcode)}", flush=True)
            elif (numbers := statistics_in(agent_folder(run_dir, number))) is not None:
                print(f"agent {number}  {numbers.progress()}", flush=True)
