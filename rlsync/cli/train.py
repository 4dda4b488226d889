"""``rlsync train``: compose a config, build its recipe, train it, and show its progress in one line."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf
from rich.console import Console
from rich.live import Live
from rich.text import Text
from tensordict import TensorDictBase
from torchrl.trainers import Trainer

from rlsync import Stop, SyncWeights
from rlsync.cli import trust
from rlsync.cli.compose import command_line, own_hydra
from rlsync.cli.ending import LIFE_OVER, Ending, Interrupts
from rlsync.cli.host import JobFailed, Lifeline, require_host, sweep_apart
from rlsync.cli.job import Job, job_of, jobs_of, require_free_folder, words_for_hydra
from rlsync.cli.main import EXIT_FAILED, exit_status, output_read
from rlsync.cli.resume import load
from rlsync.cli.watch import EVERY_S, PLAIN_EVERY_S
from rlsync.core.errors import ConfigError, RlsyncError
from rlsync.core.whole_file import write_whole
from rlsync.evaluation.evaluator import evaluations_ended
from rlsync.recipes.hooks.measuring import InSummary, StatisticsHook
from rlsync.recipes.hooks.steering import EpisodeReturns
from rlsync.recipes.pure import PureStepper
from rlsync.recipes.rerun import keep_life
from rlsync.recipes.run_files import BOARD, RESOLVED
from rlsync.tensors.device import keep_freed_memory
from rlsync.torchrl_plugin.collectors.board import BoardEndpoint
from rlsync.torchrl_plugin.collectors.choose import endpoint_of
from rlsync.torchrl_plugin.compat import trainers
from rlsync.torchrl_plugin.ending.last_checkpoint import CollectorState
from rlsync.transport.board.planned import PlannedHandle
from rlsync.transport.board.reader import BoardHandle


def main(arguments: list[str]) -> int:
    """Check the command line, then let Hydra run one job or a sweep of them."""
    line = command_line.read(arguments)
    if line.flags.help:
        print(help_text())
    elif line.is_for_hydra:
        if line.flags.experimental_rerun:  # the pickle that Hydra may leave in .hydra
            pickled = Path(line.flags.experimental_rerun)
            trust.check_file(pickled, pickled.absolute().parent.parent, line.trusted)
        words = line.flags.overrides if line.errors else line.overrides  # these know where recipes lie
        own_hydra.hand_over(line.flag_words, words, lambda _: run_job(line, []))
    else:
        return run_jobs(line, jobs_of(line))
    return 0


def run_jobs(line: command_line.CommandLine, jobs: list[Job]) -> int:
    """Let Hydra run these jobs, or print what the flags ask for. Returns the exit status."""
    if line.flags.cfg is None:
        for job in jobs:
            require_host(job)
    around = sweep_apart() if any(job.apart for job in jobs) else contextlib.nullcontext()
    try:
        with around as lifeline:
            words = words_for_hydra(line, jobs)
            own_hydra.hand_over(line.flag_words, words, lambda _: run_job(line, jobs, lifeline))
    except JobFailed as error:
        print(error, file=sys.stderr)
        return error.status
    return 0


def help_text() -> str:
    groups = "\n".join(f"  {g}={'|'.join(options)}" for g, options in command_line.choices().items())
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
  rlsync train --trust resume=RUN      the same, if it cannot be checked, or is somebody else's and names code
  rlsync train --hydra-help            prints Hydra's own options
  rlsync check ...                     lists all that is wrong with the same words, runs nothing

exit status: 0 the run ended well, 1 it failed, 2 a wrong command line or config,
130 after Ctrl-C, 141 if nobody reads the output any more, 128 and its number after another signal"""


def run_job(line: command_line.CommandLine, jobs: list[Job], lifeline: Lifeline | None = None) -> None:
    """One run in the folder that Hydra has made. Raises SystemExit unless the run ended well; in a sweep
    JobFailed, after which the jobs that follow are run, unless a signal has ended this one.
    """
    about = HydraConfig.get()
    words: Any = OmegaConf.to_container(about.overrides)  # as they were written, not yet interpolated
    parent = None if lifeline is None else lifeline.held()
    if parent is not None and parent.poll():
        raise JobFailed(f"job {about.job.num} was not begun", "the sweep was stopped", "start it by itself")
    try:
        job = job_of(line, jobs, [*words["hydra"], *words["task"]])
        job = job.placed(about.runtime.output_dir, line.config_dir)
        require_host(job)
        require_free_folder(job)  # which a key of Hydra's may have named
        if about.output_subdir is not None:
            # Hydra does not know what is tuned for one job of a sweep. Its file has the same name as ours.
            shown = Path(about.runtime.output_dir, about.output_subdir, RESOLVED)
            OmegaConf.save(OmegaConf.structured(job.config), shown)
        if job.agents:
            from rlsync.cli.population import train_population

            status = train_population(job, parent)
        else:
            status = train_job(job, parent)
    except RlsyncError as error:
        print(error, file=sys.stderr)
        status = exit_status(error)
    except (Exception, SystemExit):
        if not line.sweeps:
            raise
        traceback.print_exc()
        status = EXIT_FAILED
    if not status:
        return
    stopped = status > 128  # by a signal, or because nobody reads the output
    if line.sweeps and (lifeline is not None or not stopped):
        raise job_failed(about.job.num, about.runtime.output_dir, status)
    if line.sweeps:
        print(f"the sweep ends with its job {about.job.num}: none after it is run", file=sys.stderr)
    sys.exit(status)


def job_failed(number: int, folder: str, status: int) -> JobFailed:
    """What a launcher is told of a job of a sweep; its error was printed."""
    if status > 128:
        cure = f"resume={folder} run_dir={folder} goes on with it"
        return JobFailed(f"job {number} of the sweep was stopped", folder, cure, status)
    print(f"job {number} of the sweep failed; the others go on", file=sys.stderr, flush=True)
    cure = "look at its error above, and whether others have failed; then start it by itself"
    return JobFailed(f"job {number} of the sweep failed", folder, cure, status)


def train_job(job: Job, parent: Connection | None = None) -> int:
    """Build, resume if asked, and train. Returns the exit status. ``parent``: see :class:`Interrupts`."""
    run_dir = begun(job)
    with Interrupts.caught(parent) as interrupts:
        while (status := _live(job, run_dir, interrupts)) is None:
            gc.collect()  # what lives leave has files open, in cycles of references
            job = job.next_life(run_dir)
    return status


def begun(job: Job) -> Path:
    """Make this process and the run's folder ready, and say which run it is. Returns the folder."""
    prepare_process()
    run_dir = Path(str(job.config.run_dir))
    run_dir.mkdir(parents=True, exist_ok=True)
    trust.claim(run_dir, job.trusted)
    if not job.continues_in(run_dir):
        OmegaConf.save(OmegaConf.structured(job.config), run_dir / RESOLVED)
    print("\n".join([f"run {run_dir}", *(f"{word} {text}" for word, text in job.told.items())]), flush=True)
    return run_dir


def _live(job: Job, run_dir: Path, interrupts: Interrupts) -> int | None:
    """One life of a run: its exit status, or None if the run goes on with another one."""
    goes_on = job.continues_in(run_dir)
    # Inside, for what ended.json says; outside, because it may not be possible to write that.
    with output_read(run_dir), Ending.of(run_dir) as ending, output_read(run_dir):
        with interrupts.held():
            trainer = job.build()
        with shut_down(trainer):
            CollectorState.of(trainer)
            if isinstance(stepper := trainer.optimization_stepper, PureStepper):
                way = stepper.way()
                print(f"updates {way}", flush=True)
            if job.checkpoint is not None:
                load(trainer, job.checkpoint, job.changes)
                print(told_of_resume(trainer, job), flush=True)
                if goes_on and (kept := keep_life(run_dir, job.checkpoint)) is not None:
                    trust.claim(kept, trusted=True)  # this run's own, or looked at when it was loaded
            if goes_on or job.shared is not None:  # an agent may be killed, and resumed, at any time
                trainer.save_trainer(force_save=True)  # it and the config beside it belong together
                OmegaConf.save(OmegaConf.structured(job.config), run_dir / RESOLVED)
            stop = Stop(trainer, job.config.stop_within_s)
            interrupts.attach(stop, job.config.stop_within_s)
            line = LiveLine(trainer, Console(), job.config.life_frames)
            ending.watch(trainer, line.sync)
            if interrupts.signal is not None:
                print("stopped: interrupted before the first frame", flush=True)
                trainers.run_shutdown_operations(trainer)  # else the evaluator would be waited for, in vain
            else:
                leave_address(trainer, run_dir)
                with stop, line.shown(), ending.saving(unless=stop.covers):
                    trainer.train()
                if stop.lost is not None and stop.saved is not None:
                    print(f"the workers did not end by themselves: {stop.lost}", file=sys.stderr)
                    ending.tell(stop.saved)
                if isinstance(stepper, PureStepper) and stepper.way() != way:  # compiled, or another way
                    print(f"updates {stepper.way()}", flush=True)
                print(line.summary(interrupts), flush=True)
                for part in trainers.registered_modules(trainer):
                    if isinstance(part, InSummary):
                        print(part.summary_line(), flush=True)
        status = ending.reached(how := line.reason(interrupts), interrupts.exit_status())
        return None if how == LIFE_OVER else status


def told_of_resume(trainer: Trainer, job: Job) -> str:
    told = f"resumed from {job.checkpoint}  frames {trainer.collected_frames:,}"
    if job.changes is None:
        return (
            f"{told}\nno {RESOLVED} lies beside this checkpoint: keys that this command line does not give "
            "have their defaults, so repeat the overrides of the first run"
        )
    return "\n".join([told, *(f"changed {change}" for change in job.changes)])


def prepare_process() -> None:
    """One thread, which leaves the cores to the workers; no slow numbers; memory kept; and less noise."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # Adam's moments of units that are off would cost dqn a fifth of a step
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


def leave_address(trainer: Trainer, run_dir: Path) -> None:
    endpoint = endpoint_of(trainer.collector)
    handle = endpoint.publisher.transport.handle if isinstance(endpoint, BoardEndpoint) else None
    if isinstance(handle, PlannedHandle):
        handle = handle.board
    if isinstance(handle, BoardHandle):
        write_whole(run_dir / BOARD, lambda beside: beside.write_text(json.dumps(asdict(handle))))


class LiveLine:
    """Prints how far the run is, twice a second on a terminal, every few seconds elsewhere; ends its life."""

    def __init__(self, trainer: Trainer, console: Console, life_frames: int | None = None) -> None:
        hooks = trainers.registered_modules(trainer)
        syncs = [hook for hook in hooks if isinstance(hook, SyncWeights) and hook.feeds is trainer.collector]
        returns = [hook for hook in hooks if isinstance(hook, EpisodeReturns)]
        statistics = [hook for hook in hooks if isinstance(hook, StatisticsHook)]
        counts = len(syncs), len(returns), len(statistics)
        if counts != (1, 1, 1):
            what = "the trainer has {} SyncWeights, {} EpisodeReturns and {} StatisticsHook".format(*counts)
            cure = "register one of each, for example with rlsync.recipes.parts.register_hooks(trainer, run)"
            raise ConfigError(what, "the recipe's build()", cure)
        self.trainer, self.sync, self.returns, self.statistics = trainer, syncs[0], returns[0], statistics[0]
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._every_s = PLAIN_EVERY_S if self._live is None else EVERY_S
        self._started = self._next = time.monotonic()
        self._end = trainer.collected_frames + (life_frames or trainer.total_frames)
        trainer.register_op("post_steps_log", self._on_batch)

    def shown(self) -> contextlib.AbstractContextManager[object]:
        """Inside, a terminal is drawn to."""
        return self._live or contextlib.nullcontext()

    def _on_batch(self, batch: TensorDictBase | None = None) -> None:
        now, over = time.monotonic(), self.trainer.collected_frames >= self.trainer.total_frames
        if self._life_over:
            self.trainer.request_stop(LIFE_OVER)
        if now < self._next and not (over and self._live):
            return
        self._next = now + self._every_s
        text = self.statistics.now().progress()
        if self._live is None:
            print(text, flush=True)
        else:
            self._live.update(Text(text, no_wrap=True, overflow="ellipsis"), refresh=True)

    def reason(self, interrupts: Interrupts) -> str:
        if interrupts.signal is not None:
            return interrupts.how()
        if self.returns.reached:
            return "target return reached"
        return LIFE_OVER if self._life_over else "total_frames collected"

    @property
    def _life_over(self) -> bool:
        return self._end <= self.trainer.collected_frames < self.trainer.total_frames

    def summary(self, interrupts: Interrupts) -> str:
        mean = f"{self.returns.mean:.1f}" if self.returns.newest else "none"
        ended = evaluations_ended(self.trainer)
        return (
            f"stopped: {self.reason(interrupts)}  frames {self.trainer.collected_frames:,}  "
            f"mean return of the last {len(self.returns.newest)} episodes {mean}  "
            f"version {self.sync.version}  {time.monotonic() - self._started:.1f} s"
            + (f"  {ended}" if ended else "")
        )
