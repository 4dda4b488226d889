"""``rlsync train``: compose a config, build its recipe, train it, and show its progress in one line."""

from __future__ import annotations

import contextlib
import sys
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from hydra.conf import HydraConf
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from rlsync import RlsyncError
from rlsync.runs.config import command_line, own_hydra, trust
from rlsync.runs.life.host import JobFailed, Lifeline, require_host, sweep_apart
from rlsync.runs.life.job import Job, jobs_of, recorded_job, require_free_folder, words_of_sweep
from rlsync.runs.life.output import EXIT_FAILED, exit_status
from rlsync.runs.life.restarting import lifeline, train_again_if_killed
from rlsync.runs.life.training import train_job
from rlsync.runs.recipes.run_files import RESOLVED


def main(arguments: list[str]) -> int:
    """Check the command line, then let Hydra run one job or a sweep of them."""
    line = command_line.read(arguments)
    if line.flags.help:
        print(help_text())
    elif line.flags.experimental_rerun or line.is_for_hydra:
        _let_hydra_answer(line)
    else:
        jobs = jobs_of(line)
        if len(jobs) == 1 and jobs[0].is_done:
            print(f"nothing is left to do: {jobs[0].is_done}")
            return 0
        if restarts := jobs[0].config.restarts:
            return train_again_if_killed(arguments, restarts)
        return run_jobs(line, jobs)
    return 0


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


def run_jobs(line: command_line.CommandLine, jobs: list[Job]) -> int:
    """Let Hydra run these jobs, or print what the flags ask for. Returns the exit status."""
    if line.flags.cfg is None:
        for job in jobs:
            require_host(job)
    around: contextlib.AbstractContextManager[Lifeline | None] = contextlib.nullcontext()
    if any(job.apart for job in jobs):
        around = sweep_apart()
    try:
        with around as lifeline:
            task = Task(line, jobs, lifeline)
            if line.sweeps or jobs[0].composed is None:
                own_hydra.hand_over(line.flag_words, words_of_sweep(line, jobs), task)
            else:
                words = [*jobs[0].words, *jobs[0].added]
                own_hydra.run(line.flags, jobs[0].composed, words, task)
    except JobFailed as error:
        print(error, file=sys.stderr)
        return error.status
    return 0


@dataclass(frozen=True, slots=True)
class Task:
    """Runs the job that Hydra calls it for, here or, pickled, in a process that a launcher starts."""

    line: command_line.CommandLine
    jobs: list[Job]
    lifeline: Lifeline | None = None

    def __call__(self, _: DictConfig) -> None:
        """One run in the folder that Hydra has made.

        Raises SystemExit unless the run ended well; in a sweep JobFailed, after which the jobs that follow
        are run, unless a signal has ended this one.
        """
        about = HydraConfig.get()
        parent = lifeline() if self.lifeline is None else self.lifeline.held()
        if parent is not None and parent.poll():
            problem = f"job {about.job.num} was not begun"
            raise JobFailed(problem, "the sweep was stopped", "start it by itself")
        try:
            status = self._run(about, parent)
        except RlsyncError as error:
            print(error, file=sys.stderr)
            status = exit_status(error)
        except (Exception, SystemExit):
            if not self.line.sweeps:
                raise
            traceback.print_exc()
            status = EXIT_FAILED
        if not status:
            return
        stopped = status > 128  # by a signal, or because nobody reads the output
        if self.line.sweeps and (self.lifeline is not None or not stopped):
            raise job_failed(about.job.num, about.runtime.output_dir, status)
        if self.line.sweeps:
            last = about.job.num
            print(f"the sweep ends with its job {last}: none after it is run", file=sys.stderr)
        sys.exit(status)

    def _run(self, about: HydraConf, parent: Connection | None) -> int:
        """Train the job; returns the exit status. The ``parent`` is a sweep that may be stopped."""
        job = self._job(about).placed(about.runtime.output_dir, self.line.config_dir)
        require_host(job)
        require_free_folder(job)  # which a key of Hydra's may have named
        if about.output_subdir is not None:
            # Hydra does not know what is tuned for one job of a sweep. Its file has the same name as ours.
            shown = Path(about.runtime.output_dir, about.output_subdir, RESOLVED)
            OmegaConf.save(OmegaConf.structured(job.config), shown)
        if job.agents:
            from rlsync.runs.life.population import train_population

            return train_population(job, parent)
        return train_job(job, parent)

    def _job(self, about: HydraConf) -> Job:
        """The job that was checked; or one that Hydra alone knows, which is checked now."""
        if self.jobs and self.jobs[0].composed is not None:
            return self.jobs[0]
        if self.jobs and not about.sweeper.get("params"):
            return self.jobs[about.job.num]  # Hydra makes the same jobs in the same order
        # It is in a pickle, or its config has values for the sweeper. The words are not interpolated yet.
        words: Any = OmegaConf.to_container(about.overrides)
        added = {word for job in self.jobs for word in job.added}
        return recorded_job(self.line, [*words["hydra"], *words["task"]], added)


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
  rlsync train -m seed=0,1,2           runs a sweep
  rlsync train resume=runs/DATE/TIME   continues from a run's checkpoint, which is checked first
  rlsync train resume=auto run_dir=R   continues in the folder R from its checkpoint, or begins there
  rlsync train restarts=9 run_dir=R    starts the run again from its checkpoint when something kills it
  rlsync train --trust resume=RUN      the same, if it cannot be checked, or is somebody else's and names code
  rlsync train --hydra-help            prints Hydra's own options
  rlsync check ...                     lists all that is wrong with the same words, runs nothing

exit status: 0 the run ended well, 1 it failed, 2 a wrong command line or config,
130 after Ctrl-C, 141 if nobody reads the output any more, 128 and its number after another signal"""


def job_failed(number: int, folder: str, status: int) -> JobFailed:
    """What a launcher is told of a job of a sweep; its error was printed."""
    if status > 128:
        cure = f"resume={folder} run_dir={folder} goes on with it"
        return JobFailed(f"job {number} of the sweep was stopped", folder, cure, status)
    print(f"job {number} of the sweep failed; the others go on", file=sys.stderr, flush=True)
    cure = "look at its error above, and whether others have failed; then start it by itself"
    return JobFailed(f"job {number} of the sweep failed", folder, cure, status)
