"""A population: learners in processes of their own, each an ordinary run, which share one replay.

A command line gives each agent its config. Then this process makes the replay, starts the agents and waits for
them. By a pipe it tells each of them to end, in good order; if this process dies, the pipe tells so, too. An agent
that dies leaves the others alone.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from rlsync import ConfigError, Forkserver, RlsyncError, WorkerLost
from rlsync.runs.actors.replay.shared import SharedReplayHandle
from rlsync.runs.config.command_line import CommandLine, values_of
from rlsync.runs.config.composing import composition
from rlsync.runs.config.refusals import parsed
from rlsync.runs.life.ending import Ending, Interrupts
from rlsync.runs.life.job import Job, examined
from rlsync.runs.life.output import exit_status, output_read
from rlsync.runs.life.state import PLAIN_EVERY_S, ended
from rlsync.runs.life.training import begun, train_job
from rlsync.runs.recipes.bounds import caught, refuse
from rlsync.runs.recipes.checkpoints import checkpoint_at
from rlsync.runs.recipes.impala.recipe import shared_replay
from rlsync.runs.recipes.run_files import (
    AGENTS,
    OUTPUT,
    agent_folder,
    agents_in,
    best_agent,
    statistics_in,
)
from rlsync.runs.recipes.settings import Config
from rlsync.seams import families, processes


def agents_of(
    line: CommandLine, words: Sequence[str], whole: Config
) -> tuple[dict[int, Config], list[RlsyncError]]:
    """The configs of a population's agents that have not ended, by number, and all that is wrong."""
    errors: list[RlsyncError] = []
    if whole.resume is not None and not agents_in(Path(whole.resume)):
        cure = "leave recipe.agents out, or start a population anew without resume"
        errors.append(ConfigError(f"{whole.resume} has no agents", f"resume={whole.resume}", cure))
    varied, wrong = _varied(whole)
    errors += wrong
    if errors:
        return {}, errors

    common = [word for word in words if not word.startswith(("resume=", "run_dir="))]
    agents: dict[int, Config] = {}
    spaces: Any = None
    for number in range(whole.recipe.population()):
        overrides = [*common, *(each[number] for each in varied)]
        if whole.resume is not None:
            before = agent_folder(whole.resume, number)
            if _has_all_frames(before, whole.recipe.total_frames):
                continue
            if checkpoint_at(before) is not None:
                overrides.append(f"resume='{before}'")
        job, wrong = _agent(line, overrides, whole, number)
        errors += wrong
        if job is not None:
            agents[number] = job.config
            spaces = job.spaces

    if agents and not errors:
        errors += caught(lambda: shared_replay([*agents.values()], spaces)[0].close())
    elif not errors:
        problem = "all agents of this population have ended"
        cure = "give more recipe.total_frames"
        errors.append(ConfigError(problem, f"resume={whole.resume}", cure))
    return agents, errors


def _varied(whole: Config) -> tuple[list[list[str]], list[RlsyncError]]:
    """For each key in which agents differ an override for each agent, and what is wrong with them."""
    recipe: Any = whole.recipe
    errors: list[RlsyncError] = []
    varied = []
    for key, values in (recipe.vary or {}).items():
        if isinstance(values, list):
            values = ",".join(map(json.dumps, values))
        overrides = values_of(parsed(f"recipe.{key}={values}"))
        if len(overrides) != recipe.population():
            count = len(overrides)
            problem = f"recipe.vary has {count} values of {key} for {recipe.population()} agents"
            errors.append(ConfigError(problem, "recipe.vary", "give a value for each agent"))
        varied.append(overrides)
    return varied, errors


def _has_all_frames(agent: Path, frames: int) -> bool:
    """Whether an agent of the run before has ended well, with all frames that it is to have now."""
    end = ended(agent)
    return end is not None and end.status == 0 and (end.frames or 0) >= frames


def _agent(
    line: CommandLine, words: Sequence[str], whole: Config, number: int
) -> tuple[Job | None, list[RlsyncError]]:
    """The job of one agent, in a folder and with a seed of its own, and what is wrong with it."""
    composed, errors = composition(line, words)
    if composed is None:
        return None, [*errors]
    folder = None
    if whole.run_dir is not None:
        folder = str(agent_folder(whole.run_dir, number))
    recipe: Any = replace(composed.config.recipe, agents=1, vary=None)  # type: ignore[call-arg]
    config = replace(composed.config, recipe=recipe, run_dir=folder, seed=whole.seed + number)
    job, wrong = examined(config, trusted=line.trusted, config_dir=line.config_dir)
    return job, [*errors, *wrong]


def train_population(job: Job, parent: Connection | None = None, *, is_called: bool = False) -> int:
    """Train a population's agents; returns 0, or 128 and the number of the signal that ended it.

    WorkerLost, when all others have ended, if an agent was killed or failed. ``parent`` and ``is_called``: see
    :meth:`Interrupts.caught`.
    """
    run_dir = begun(job)
    file, replay = shared_replay([*job.agents.values()], job.spaces)
    with closing(file):
        with (
            output_read(run_dir),
            Interrupts.caught(parent, is_called=is_called) as interrupts,
            Ending.of(run_dir, interrupts) as ending,
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
            lost = []
            for number, agent in agents.items():
                if agent.exitcode:
                    lost.append(f"agent {number} {processes.ending(agent.exitcode)}")
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
    families.let_forks_use_cuda()
    process = multiprocessing.get_context("forkserver").Process(
        target=_train_agent, args=args, name=name
    )
    families.start_as("forkserver", process)
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
                print(f"agent {number} {processes.ending(agent.exitcode)}", flush=True)
            elif (numbers := statistics_in(agent_folder(run_dir, number))) is not None:
                print(f"agent {number}  {numbers.progress()}", flush=True)
