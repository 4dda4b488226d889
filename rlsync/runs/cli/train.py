"""``rlsync train``: compose a config, build its recipe, train it, and show its progress in one line."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

from rlsync import ConfigError
from rlsync.runs.cli.main import print_document
from rlsync.runs.config import command_line, own_hydra, trust
from rlsync.runs.life.host import JobFailed, Lifeline, require_host, sweep_apart
from rlsync.runs.life.job import Job, jobs_of, words_of_sweep
from rlsync.runs.life.launch import Task, alone, train_one
from rlsync.runs.plain import json_of
from rlsync.runs.recipes.run_files import ENDED, STATISTICS


def main(arguments: list[str]) -> int:
    """Check the command line, then train one run, or let Hydra run a sweep of them."""
    line = command_line.read(arguments)
    if line.flags.help:
        print(help_text())
        return 0
    if line.flags.experimental_rerun or line.is_for_hydra:
        _let_hydra_answer(line)
        return 0
    jobs = jobs_of(line)
    if line.flags.cfg is not None:
        _print_config(line, jobs)
        return 0
    if line.sweeps or jobs[0].composed is None:
        if line.flags.json:
            cure = f"leave --json out, and read {ENDED} and {STATISTICS} in the folder of each job"
            raise ConfigError("the jobs of a sweep have no common document", "--json", cure)
        return run_sweep(line, jobs)
    with alone():
        result = train_one(line, jobs[0])
    if line.flags.json:
        print_document(json_of(result.to_dict()))
    assert result.status is not None, "it has ended"
    return result.status


def _let_hydra_answer(line: command_line.CommandLine) -> None:
    """Let Hydra print what the flags ask for, or run a job again from the pickle that it may leave of one."""
    if line.flags.experimental_rerun:
        pickled = Path(line.flags.experimental_rerun)
        trust.check_file(pickled, pickled.absolute().parent.parent, line.trusted)
    if line.errors:
        words = line.flags.overrides
    else:
        words = line.overrides  # these know where recipes lie
    own_hydra.hand_over(line.flag_words, words, Task(line, []))


def _print_config(line: command_line.CommandLine, jobs: list[Job]) -> None:
    """Let Hydra print what the flags ask for."""
    if line.sweeps or jobs[0].composed is None:
        own_hydra.hand_over(line.flag_words, words_of_sweep(line, jobs), Task(line, jobs))
    else:
        words = [*jobs[0].words, *jobs[0].added]
        own_hydra.run(line.flags, jobs[0].composed, words, Task(line, jobs))


def run_sweep(line: command_line.CommandLine, jobs: list[Job]) -> int:
    """Let Hydra run these jobs. Returns the exit status."""
    for job in jobs:
        require_host(job, in_threads=False)
    around: contextlib.AbstractContextManager[Lifeline | None] = contextlib.nullcontext()
    if any(job.apart for job in jobs):
        around = sweep_apart()
    try:
        with around as lifeline:
            words = words_of_sweep(line, jobs)
            task = Task(line, jobs, lifeline)
            if lifeline is None:
                own_hydra.hand_over(line.flag_words, words, task)
            else:
                own_hydra.hand_over(line.flag_words, words, task, lifeline.is_cut)
    except JobFailed as error:
        print(error, file=sys.stderr)
        return error.status
    return 0


def help_text() -> str:
    lines = []
    for group, options in command_line.choices().items():
        lines.append(f"  {group}={'|'.join(options)}")
    groups = "\n".join(lines)
    return f"""usage: rlsync train [group=option | key=value ...]

Trains a recipe in worker processes that adopt their weights from a board.
Receipts, metrics, the checkpoint and the config go to runs/<date>/<time>.

groups:
{groups}

examples:
  rlsync train recipe=dqn seed=3       another recipe, another seed
  rlsync train --cfg job               prints every key and its value
  rlsync train --json recipe=dqn       prints the result as JSON at the end, all else on stderr
  rlsync train -m seed=0,1,2           runs a sweep
  rlsync train resume=runs/DATE/TIME   continues from a run's checkpoint, which is checked first
  rlsync train resume=auto run_dir=R   continues in the folder R from its checkpoint, or begins there
  rlsync train restarts=9 run_dir=R    starts the run again from its checkpoint when something kills it
  rlsync train --trust resume=RUN      the same, if it cannot be checked, or is somebody else's and names code
  rlsync train --hydra-help            prints Hydra's own options
  rlsync check ...                     lists all that is wrong with the same words, runs nothing

exit status: 0 the run ended well, 1 it failed, 2 a wrong command line or config,
130 after Ctrl-C, 141 if nobody reads the output any more, 128 and its number after another signal"""
