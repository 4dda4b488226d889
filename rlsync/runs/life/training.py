"""A run from the build of its trainer to its last word, life by life."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from omegaconf import OmegaConf
from rich.console import Console
from rich.live import Live
from rich.text import Text
from tensordict import TensorDictBase
from torchrl.trainers import Trainer

from rlsync import ConfigError, Stop, SyncWeights
from rlsync.runs.compat.trainers import leave_out_later
from rlsync.runs.config import trust
from rlsync.runs.evaluation.evaluator import evaluations_ended
from rlsync.runs.life.aside import set_all_aside, set_aside
from rlsync.runs.life.ending import LIFE_OVER, Ending, Interrupts
from rlsync.runs.life.job import Job
from rlsync.runs.life.output import output_read
from rlsync.runs.life.resume import load
from rlsync.runs.life.state import EVERY_S, PLAIN_EVERY_S, TARGET_REACHED
from rlsync.runs.recipes.hooks.measuring import InSummary, StatisticsHook
from rlsync.runs.recipes.hooks.steering import EpisodeReturns
from rlsync.runs.recipes.pure import PureStepper
from rlsync.runs.recipes.rerun import keep_life
from rlsync.runs.recipes.run_files import BOARD, RESOLVED
from rlsync.seams import (
    BoardEndpoint,
    BoardHandle,
    endpoint_of,
    last_checkpoint,
    machine,
    planned,
    trainers,
    whole_file,
)

#: Called about once a second while a run goes on, in the thread that learns, with the run's folder.
Watch = Callable[[Path], object]


def train_job(
    job: Job,
    parent: Connection | None = None,
    *,
    is_called: bool = False,
    watch: Watch | None = None,
) -> int:
    """Build, resume if asked, and train. Returns the exit status.

    Args:
        job: what to train.
        parent: see :meth:`Interrupts.caught`, as for ``is_called``.
        is_called: by a program that lives on after the run.
        watch: what it raises ends the run.
    """
    run_dir = begun(job)
    began_s = time.monotonic()
    with Interrupts.caught(parent, is_called=is_called) as interrupts:
        while (status := _live(job, run_dir, interrupts, began_s, watch)) is None:
            gc.collect()  # what lives leave has files open, in cycles of references
            job = job.next_life(run_dir)
    return status


def begun(job: Job) -> Path:
    """Make this process and the run's folder ready, and say which run it is. Returns the folder."""
    prepare_process()
    run_dir = Path(str(job.config.run_dir))
    run_dir.mkdir(parents=True, exist_ok=True)
    trust.claim(run_dir, job.trusted)
    if job.checkpoint is not None and job.continues_in(run_dir):
        set_aside(run_dir, job.checkpoint)
    elif job.auto and (run_dir / RESOLVED).is_file():
        set_all_aside(run_dir)
    if not job.continues_in(run_dir):
        OmegaConf.save(OmegaConf.structured(job.config), run_dir / RESOLVED)
    lines = [f"run {run_dir}"]
    for word, text in job.told.items():
        lines.append(f"{word} {text}")
    print("\n".join(lines), flush=True)
    return run_dir


def _live(
    job: Job, run_dir: Path, interrupts: Interrupts, began_s: float, watch: Watch | None
) -> int | None:
    """One life of a run: its exit status, or None if the run goes on with another one."""
    # Inside, for what ended.json says; outside, because it may not be possible to write that.
    with (
        output_read(run_dir),
        Ending.of(run_dir, interrupts, began_s) as ending,
        output_read(run_dir),
    ):
        with interrupts.held():
            trainer = job.build()
        with shut_down(trainer):
            _prepare(trainer, job, run_dir)
            life = TrainingLife(trainer, interrupts, job.config.life_frames)
            ending.watch(trainer, life.sync)
            if watch is not None:
                life.shown_to(watch, run_dir)
            life.train(job, run_dir, ending)
        reason = life.reason()
        status = ending.reached(reason, interrupts.exit_status())
        if reason == LIFE_OVER:
            return None
        return status


def _prepare(trainer: Trainer, job: Job, run_dir: Path) -> None:
    """Load the checkpoint that a run goes on from, and leave one where the run may be killed at any time."""
    last_checkpoint.CollectorState.of(trainer)
    if isinstance(stepper := trainer.optimization_stepper, PureStepper):
        print(f"updates {stepper.way()}", flush=True)

    goes_on = job.continues_in(run_dir)
    if job.checkpoint is not None:
        load(trainer, job.checkpoint, job.changes)
        print(told_of_resume(trainer, job), flush=True)
        if goes_on:
            leave_out_later(trainer.logger, trainer.collected_frames)
            life = keep_life(run_dir, job.checkpoint)
            if life is not None:
                trust.claim(life, trusted=True)  # this run's own, or looked at when it was loaded

    if goes_on or job.shared is not None:  # an agent may be killed, and resumed, at any time
        trainer.save_trainer(force_save=True)  # it and the config beside it belong together
        OmegaConf.save(OmegaConf.structured(job.config), run_dir / RESOLVED)


class TrainingLife:
    """One life of a run, from its trainer to its end, and why it ended.

    Whoever wants to know how far the run is, or draws that, asks here.

    Raises:
        ConfigError: the trainer lacks a hook that says it.
    """

    def __init__(
        self, trainer: Trainer, interrupts: Interrupts, life_frames: int | None = None
    ) -> None:
        syncs = []
        returns = []
        statistics = []
        for hook in trainers.registered_modules(trainer):
            match hook:
                case SyncWeights() if hook.feeds is trainer.collector:
                    syncs.append(hook)
                case EpisodeReturns():
                    returns.append(hook)
                case StatisticsHook():
                    statistics.append(hook)
        if not len(syncs) == len(returns) == len(statistics) == 1:
            problem = f"the trainer has {len(syncs)} SyncWeights, {len(returns)} EpisodeReturns "
            problem += f"and {len(statistics)} StatisticsHook"
            cure = "register one of each, as rlsync.runs.recipes.parts.register_hooks(trainer, run) does"
            raise ConfigError(problem, "the recipe's build()", cure)
        self.trainer = trainer
        self.sync = syncs[0]
        self._returns = returns[0]
        self._statistics = statistics[0]
        self._interrupts = interrupts
        self._began_s = time.monotonic()
        self._end_frames = trainer.collected_frames + (life_frames or trainer.total_frames)
        trainer.register_op("post_steps_log", self._batch_done)

    def train(self, job: Job, run_dir: Path, ending: Ending) -> None:
        """Train until the life is over, and print how it ended; a signal is obeyed from here on."""
        stop = Stop(self.trainer, job.config.stop_within_s)
        self._interrupts.attach(stop, job.config.stop_within_s)
        if self._interrupts.signal is not None:
            print("stopped: interrupted before the first frame", flush=True)
            # else the evaluator would be waited for, in vain
            trainers.ShutdownStage.of(self.trainer)()
            return

        way = self._way_of_updates()
        leave_address(self.trainer, run_dir)
        line = LiveLine(self, Console())
        with stop, line.shown(), ending.saving(unless=self._saves_nothing(stop)):
            self.trainer.train()

        if stop.lost is not None and stop.saved is not None:
            print(f"the workers did not end by themselves: {stop.lost}", file=sys.stderr)
            ending.tell(stop.saved)
        if self._way_of_updates() != way:  # they were compiled, or somebody has put a hook on them
            print(f"updates {self._way_of_updates()}", flush=True)
        print(self.summary(), flush=True)
        for part in trainers.registered_modules(self.trainer):
            if isinstance(part, InSummary):
                print(part.summary_line(), flush=True)

    def shown_to(self, watch: Watch, run_dir: Path) -> None:
        """Let somebody else look at the run, about once a second."""
        next_s = 0.0

        def look(batch: TensorDictBase | None = None) -> None:
            nonlocal next_s
            now_s = time.monotonic()
            if now_s >= next_s or self.all_collected:
                next_s = now_s + 1.0
                watch(run_dir)

        self.trainer.register_op("post_steps_log", look)

    def _saves_nothing(self, stop: Stop) -> Callable[[BaseException], bool]:
        """Which errors are followed by no checkpoint: the stop has written one, or nobody wants to wait for it."""
        return lambda error: self._interrupts.abandoned or stop.covers(error)

    def _way_of_updates(self) -> str:
        stepper = self.trainer.optimization_stepper
        if isinstance(stepper, PureStepper):
            return stepper.way()
        return ""

    def _batch_done(self, batch: TensorDictBase | None = None) -> None:
        if self._is_over:
            self.trainer.request_stop(LIFE_OVER)

    @property
    def _is_over(self) -> bool:
        """Whether another life follows now."""
        return self._end_frames <= self.trainer.collected_frames < self.trainer.total_frames

    @property
    def all_collected(self) -> bool:
        """Whether the run has all its frames."""
        return bool(self.trainer.collected_frames >= self.trainer.total_frames)

    def reason(self) -> str:
        """Why the life ends, if it ends now."""
        if self._interrupts.signal is not None:
            return self._interrupts.how()
        if self._returns.reached:
            return TARGET_REACHED
        if self._is_over:
            return LIFE_OVER
        return "total_frames collected"

    def progress(self) -> str:
        """How far the run is, in a line."""
        return self._statistics.now().progress()

    def summary(self) -> str:
        """Why and where the life has ended, in a line."""
        newest = len(self._returns.newest)
        mean = "none"
        if newest:
            mean = f"{self._returns.mean:.1f}"
        parts = [
            f"stopped: {self.reason()}",
            f"frames {self.trainer.collected_frames:,}",
            f"mean return of the last {newest} episodes {mean}",
            f"version {self.sync.version}",
            f"{time.monotonic() - self._began_s:.1f} s",
        ]
        ended = evaluations_ended(self.trainer)
        if ended:
            parts.append(ended)
        return "  ".join(parts)


class LiveLine:
    """Draws how far a run is: twice a second on a terminal, every few seconds elsewhere."""

    def __init__(self, life: TrainingLife, console: Console) -> None:
        self._life = life
        self._live: Live | None = None
        self._cell: Callable[[str], object] | None = None
        self._every_s = PLAIN_EVERY_S
        if console.is_terminal:
            self._live = Live(console=console, auto_refresh=False)
            self._every_s = EVERY_S
        elif console.is_jupyter and threading.current_thread() is threading.main_thread():
            self._cell = _line_below_the_cell()
            self._every_s = EVERY_S
        self._next_s = time.monotonic()
        life.trainer.register_op("post_steps_log", self._batch_done)

    def shown(self) -> contextlib.AbstractContextManager[object]:
        """Inside, a terminal is drawn to."""
        return self._live or contextlib.nullcontext()

    def _batch_done(self, batch: TensorDictBase | None = None) -> None:
        now_s = time.monotonic()
        is_last = self._every_s == EVERY_S and self._life.all_collected
        if now_s < self._next_s and not is_last:
            return
        self._next_s = now_s + self._every_s
        text = self._life.progress()
        if self._cell is not None:
            self._cell(text)
        elif self._live is None:
            print(text, flush=True)
        else:
            self._live.update(Text(text, no_wrap=True, overflow="ellipsis"), refresh=True)


def _line_below_the_cell() -> Callable[[str], object]:
    """In a notebook: what shows a line below the cell that runs, in place of the line before."""
    # It is there: rich has asked it whether this is a notebook.
    from IPython.display import display

    line = display({"text/plain": ""}, raw=True, display_id=True)
    return lambda text: line.update({"text/plain": text}, raw=True)


def told_of_resume(trainer: Trainer, job: Job) -> str:
    lines = [f"resumed from {job.checkpoint}  frames {trainer.collected_frames:,}"]
    if job.changes is None:
        lines.append(
            f"no {RESOLVED} lies beside this checkpoint: keys that this command line does not give have their "
            "defaults, so repeat the overrides of the first run"
        )
    else:
        lines += [f"changed {change}" for change in job.changes]
    return "\n".join(lines)


def prepare_process() -> None:
    """One thread, which leaves the cores to the workers; no slow numbers; memory kept; and less noise."""
    torch.set_num_threads(1)
    # Adam's moments of units that are off would cost dqn a fifth of a step
    torch.set_flush_denormal(True)
    machine.keep_freed_memory()
    logging.getLogger("torchrl").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*experimental/prototype feature")
    warnings.filterwarnings("ignore", category=FutureWarning, module="torchrl")


@contextlib.contextmanager
def shut_down(trainer: Trainer) -> Iterator[Trainer]:
    """Whatever happens inside, workers and evaluator are gone afterwards, and what was logged is written."""
    stage = trainers.ShutdownStage.of(trainer)
    try:
        yield trainer
    except BaseException:
        with contextlib.suppress(Exception):  # another error is on its way, which must not be lost
            stage()
        raise
    finally:
        trainer.shutdown()
        if trainer.logger is not None:
            trainer.logger.close()


def leave_address(trainer: Trainer, run_dir: Path) -> None:
    """Leave the address of the workers' board in the run's folder, if they have one, for `rlsync status`."""
    endpoint = endpoint_of(trainer.collector)
    if isinstance(endpoint, BoardEndpoint):
        handle = endpoint.publisher.transport.handle
    else:
        handle = None
    if isinstance(handle, planned.PlannedHandle):
        handle = handle.board
    if isinstance(handle, BoardHandle):
        whole_file.write_whole(
            run_dir / BOARD, lambda beside: beside.write_text(json.dumps(asdict(handle)))
        )
