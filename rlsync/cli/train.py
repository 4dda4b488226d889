"""``rlsync train``: compose a config, build its recipe, train it."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import signal
import sys
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf
from rich.console import Console
from torchrl.trainers import Trainer

from rlsync import Stop, SyncWeights
from rlsync.cli.compose import command_line, own_hydra
from rlsync.cli.compose.command_line import CommandLine
from rlsync.cli.compose.resumed import BEFORE
from rlsync.cli.ending import Ending, Interrupts
from rlsync.cli.job import Job, checked, jobs_of
from rlsync.cli.live import LiveLine
from rlsync.cli.main import exit_status, output_read
from rlsync.cli.resume import load
from rlsync.core.errors import ConfigError, RlsyncError, WorkerLost
from rlsync.recipes.hooks import EpisodeReturns, InSummary
from rlsync.recipes.run_files import BOARD, RESOLVED
from rlsync.recipes.settings import Config
from rlsync.tensors.device import keep_freed_memory
from rlsync.torchrl_plugin.collectors.board import BoardEndpoint
from rlsync.torchrl_plugin.collectors.choose import endpoint_of
from rlsync.torchrl_plugin.compat import collectors, trainers
from rlsync.torchrl_plugin.ending.last_checkpoint import CollectorState
from rlsync.transport.board.reader import BoardHandle


def main(arguments: list[str]) -> int:
    """Check the command line, then let Hydra run one job or a sweep of them."""
    line = command_line.read(arguments)
    if line.flags.help:
        print(help_text())
    elif line.is_for_hydra:
        words = line.flags.overrides if line.errors else line.overrides  # these know where recipes lie
        own_hydra.hand_over(line.flag_words, words, lambda _: run_job(line, []))
    else:
        jobs = jobs_of(line)
        own_hydra.hand_over(line.flag_words, words_for_hydra(line, jobs), lambda _: run_job(line, jobs))
    return 0


def words_for_hydra(line: CommandLine, jobs: list[Job]) -> list[str]:
    """The overrides with which Hydra composes the same as rlsync has, to make folders or to print it.

    In a sweep these are the user's own, with what all jobs add: jobs may differ in what is tuned for them.
    """
    added = [word for word in jobs[0].added if all(word in job.added for job in jobs)] if jobs else []
    if line.sweeps:  # Hydra's own sweeper cannot leave out a group
        added = [word for word in added if not word.startswith("~")]
    words = [*line.overrides, *added]
    has_folder = any(word.startswith("hydra.run.dir=") for word in words)
    if not line.sweeps and jobs[0].config.run_dir and not has_folder:
        words.append("hydra.run.dir=${run_dir}")  # Hydra writes there too: a run has one folder
    return words


def help_text() -> str:
    """What ``rlsync train --help`` prints."""
    groups = "\n".join(f"  {g}={'|'.join(options)}" for g, options in command_line.choices().items())
    return (
        "usage: rlsync train [group=option | key=value ...]\n\n"
        "Trains a recipe in worker processes that adopt their weights from a board.\n"
        "Receipts, metrics, the checkpoint and the config go to runs/<date>/<time>.\n\n"
        f"groups:\n{groups}\n\n"
        "examples:\n"
        "  rlsync train recipe=dqn seed=3       another recipe, another seed\n"
        "  rlsync train --cfg job               prints every key and its value\n"
        "  rlsync train recipe=dqn --cfg job    the same, of another recipe\n"
        "  rlsync train -m seed=0,1,2           runs a sweep\n"
        "  rlsync train resume=runs/DATE/TIME   continues from a run's checkpoint\n"
        "  rlsync train --hydra-help            prints Hydra's own options\n"
        "  rlsync check ...                     lists all that is wrong with the same words, runs nothing\n\n"
        "exit status: 0 the run ended well, 1 it failed, 2 a wrong command line or config,\n"
        "130 after Ctrl-C, 141 if nobody reads the output any more, 143 after SIGTERM"
    )


def run_job(line: CommandLine, jobs: list[Job]) -> None:
    """One run in the folder that Hydra has made; ends the process unless the run ended well."""
    about = HydraConfig.get()
    try:
        job = job_of(line, jobs, [*about.overrides.hydra, *about.overrides.task])
        if about.output_subdir is not None:
            # Hydra does not know what is tuned for one job of a sweep. Its file has the same name as ours.
            shown = Path(about.runtime.output_dir, about.output_subdir, RESOLVED)
            OmegaConf.save(OmegaConf.structured(job.config), shown)
        status = train_job(job.placed(about.runtime.output_dir, line.config_dir))
    except RlsyncError as error:
        print(error, file=sys.stderr)
        status = exit_status(error)
    if status:
        sys.exit(status)


def job_of(line: CommandLine, jobs: list[Job], words: list[str]) -> Job:
    """The job that Hydra runs with these overrides.

    One that was not checked is composed and checked here: a sweeper may choose values as it goes.
    """
    added = {command_line.spelled(word) for job in jobs for word in job.added}

    def users(words: Iterable[str]) -> list[str]:
        """Those that rlsync has not added: it finds them anew for a job that was not checked."""
        return [w for w in words if command_line.spelled(w) not in added and not w.endswith(f"={BEFORE}")]

    def key(words: Iterable[str]) -> list[str]:
        return [command_line.spelled(w) for w in users(words) if not w.lstrip("+~").startswith("hydra")]

    for job in jobs:
        if key(job.words) == key(words):
            return job
    (job,) = jobs_of(replace(line, jobs=(tuple(users(words)),), errors=()))
    return job


def train(config: Config) -> int:
    """Check a config that has a ``run_dir``, and train it; see :func:`train_job`."""
    return train_job(checked(config))


def train_job(job: Job) -> int:
    """Build, resume if asked, train, and say how it went; ``rlsync status`` reads it from the run's folder.
    Returns 0; 130 after Ctrl-C, 143 after SIGTERM.
    """
    prepare_process()
    run_dir = Path(str(job.config.run_dir))
    run_dir.mkdir(parents=True, exist_ok=True)
    if not job.continues_in(run_dir):
        OmegaConf.save(OmegaConf.structured(job.config), run_dir / RESOLVED)
    print("\n".join([f"run {run_dir}", *(f"{word} {text}" for word, text in job.told.items())]), flush=True)
    with Interrupts.caught() as interrupts, Ending.of(run_dir) as ending, output_read():
        with interrupts.held():
            trainer = job.build()
        with shut_down(trainer):
            CollectorState.of(trainer)
            if job.checkpoint is not None:
                load(trainer, job.checkpoint, job.changes)
                print(told_of_resume(trainer, job), flush=True)
            if job.continues_in(run_dir):  # the checkpoint and the config beside it belong together
                trainer.save_trainer(force_save=True)
                OmegaConf.save(OmegaConf.structured(job.config), run_dir / RESOLVED)
            stop = Stop(trainer, job.config.stop_within_s)
            interrupts.attach(stop)
            sync, returns = find_hooks(trainer)
            ending.watch(trainer, sync)
            if interrupts.signal is not None:
                print("stopped: interrupted before the first frame", flush=True)
            else:
                leave_address(trainer, run_dir)
                live_line = LiveLine(trainer, sync, returns, Console())
                with stop, live_line.shown() as live, ending.saving(unless=stop.covers), told_as_lost(sync):
                    trainer.train()
                if stop.lost is not None and stop.saved is not None:
                    print(f"the workers did not end by themselves: {stop.lost}", file=sys.stderr)
                    ending.tell(stop.saved)
                print(summary(trainer, sync, returns, interrupts, live.seconds()), flush=True)
                for part in trainers.registered_modules(trainer):
                    if isinstance(part, InSummary):
                        print(part.summary_line(), flush=True)
        return ending.reached(reason(returns, interrupts), interrupts.exit_status())


def told_of_resume(trainer: Trainer, job: Job) -> str:
    """What is resumed, and with what changed."""
    told = f"resumed from {job.checkpoint}  frames {trainer.collected_frames:,}"
    if job.changes is None:
        return (
            f"{told}\nno {RESOLVED} lies beside this checkpoint: keys that this command line does not give "
            "have their defaults, so repeat the overrides of the first run"
        )
    return "\n".join([told, *(f"changed {change}" for change in job.changes)])


def prepare_process() -> None:
    """One thread for the learner, which leaves the cores to the workers; its memory kept; and less noise."""
    torch.set_num_threads(1)
    keep_freed_memory()
    logging.getLogger("torchrl").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*experimental/prototype feature")
    warnings.filterwarnings("ignore", category=FutureWarning, module="torchrl")


@contextlib.contextmanager
def shut_down(trainer: Trainer) -> Iterator[Trainer]:
    """Whatever happens inside, workers and evaluator are gone afterwards, and what was logged is written."""
    try:
        yield trainer
    except BaseException:
        with contextlib.suppress(Exception):  # another error is on its way, which must not be lost
            trainers.run_shutdown_operations(trainer)
        raise
    finally:
        trainer.shutdown()
        if trainer.logger is not None:
            trainer.logger.close()


@contextlib.contextmanager
def told_as_lost(sync: SyncWeights) -> Iterator[None]:
    """Turn TorchRL's RuntimeError about a dead worker into a WorkerLost."""
    try:
        yield
    except RuntimeError as error:
        if not collectors.says_a_worker_died(error):
            raise
        raise WorkerLost(
            str(error).partition(". ")[0],
            f"after {sync.counters().frames:,} frames, version {sync.version}",
            "the worker's own error is printed above; resume=RUN goes on from its checkpoint",
        ) from error


def leave_address(trainer: Trainer, run_dir: Path) -> None:
    """Write the board's address to the run's folder, for ``rlsync status``."""
    endpoint = endpoint_of(trainer.collector)
    handle = endpoint.publisher.transport.handle if isinstance(endpoint, BoardEndpoint) else None
    if isinstance(handle, BoardHandle):
        (run_dir / BOARD).write_text(json.dumps(asdict(handle)))


def find_hooks(trainer: Trainer) -> tuple[SyncWeights, EpisodeReturns]:
    """The two hooks that the live line reads."""
    modules = trainers.registered_modules(trainer)
    syncs = [m for m in modules if isinstance(m, SyncWeights) and m.feeds is trainer.collector]
    returns = [m for m in modules if isinstance(m, EpisodeReturns)]
    if len(syncs) != 1 or len(returns) != 1:
        raise ConfigError(
            f"the trainer has {len(syncs)} SyncWeights and {len(returns)} EpisodeReturns hooks",
            "the recipe's build()",
            "register one of each, for example with rlsync.recipes.parts.register_hooks(trainer, run)",
        )
    return syncs[0], returns[0]


def reason(returns: EpisodeReturns, interrupts: Interrupts) -> str:
    if interrupts.signal is not None:
        return "interrupted" if interrupts.signal == signal.SIGINT else "terminated"
    return "target return reached" if returns.reached else "total_frames collected"


def summary(
    trainer: Trainer,
    sync: SyncWeights,
    returns: EpisodeReturns,
    interrupts: Interrupts,
    seconds: float,
) -> str:
    mean = "none" if math.isnan(returns.mean) else f"{returns.mean:.1f}"
    return (
        f"stopped: {reason(returns, interrupts)}  frames {trainer.collected_frames:,}  "
        f"mean return of the last {len(returns.newest)} episodes {mean}  "
        f"version {sync.version}  {seconds:.1f} s"
    )
