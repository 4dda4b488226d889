"""From words to results: one run, here, or the jobs of a sweep, which Hydra calls."""

from __future__ import annotations

import gc
import logging
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from hydra.conf import HydraConf
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from rlsync import ConfigError, RlsyncError
from rlsync.runs.config import command_line, own_hydra
from rlsync.runs.life.ending import is_the_hosts
from rlsync.runs.life.host import JobFailed, Lifeline, require_host
from rlsync.runs.life.job import Job, jobs_of, recorded_job, require_free_folder
from rlsync.runs.life.output import EXIT_FAILED, EXIT_INTERRUPTED, exit_status
from rlsync.runs.life.restarting import lifeline, train_again_if_killed
from rlsync.runs.life.result import NoObjective, RunResult
from rlsync.runs.life.training import Watch, train_job
from rlsync.runs.recipes.run_files import RESOLVED

_one_run = threading.Lock()


@contextmanager
def alone() -> Iterator[None]:
    """Inside, no other run is trained in this process: torch, Hydra and signals are the process's own."""
    if not _one_run.acquire(blocking=False):
        cure = "wait until that run has ended, or start a process for each run"
        raise ConfigError("this process trains a run already", "rlsync.runs.train", cure)
    try:
        yield
    finally:
        _one_run.release()


def train(
    *overrides: str,
    after_batch: Callable[[RunResult], object] | None = None,
    **keys: Any,
) -> RunResult:
    """Train one run, as ``rlsync train`` does with the same words, and return what it has come to.

    It prints what the command prints; below the cell of a notebook, one line that goes on. It works in the main
    thread and in any other, one run at a time; in another thread nothing but ``after_batch`` ends it early. In
    the main thread Ctrl-C, or the notebook's stop button, ends it after the present iteration, with a
    checkpoint, and a second one at once. Either is a ``KeyboardInterrupt`` here, when all processes of the run
    have ended. A signal that your program does not handle itself, such as SIGTERM, ends the run in the same
    way, and then raises SystemExit.

    Args:
        *overrides: the words of the command, such as ``"recipe=ppo"`` or ``"env.id=HalfCheetah-v5"``; also
            ``"--config-dir", FOLDER`` and ``"--trust"``.
        after_batch: called after a batch, about once a second, in the thread that learns, with what the run has
            come to so far. What it raises ends the run, with a checkpoint, and is raised here.
        **keys: the same as values: ``seed=1`` is ``"seed=1"``, ``None`` is null, ``**{"recipe.lr": 1e-3}`` a
            key with dots.

    Raises:
        ConfigError: something is wrong with the words, all of it in three lines each; nothing was started. Or
            this process trains already.
        RlsyncError: the run failed, as with ``rlsync train``.

    Example:
        >>> from rlsync.runs import train
        >>> train("recipe=dqn", seed=-1)
        Traceback (most recent call last):
        ...
        rlsync.core.errors.ConfigError: seed cannot be -1
          where  seed
          cure   give a number >= 0
    """
    with alone(), _other_settings_of_the_process():
        line = command_line.read([*overrides, *map(_override, keys.items())])
        _require_one_run(line)
        (job,) = jobs_of(line)
        _require_one_run(line, job)
        return train_one(line, job, is_called=True, after_batch=after_batch)


def train_one(
    line: command_line.CommandLine,
    job: Job,
    *,
    is_called: bool = False,
    after_batch: Callable[[RunResult], object] | None = None,
) -> RunResult:
    """Train the one job of a command line in a folder that Hydra makes.

    Args:
        line: what was read.
        job: what it means.
        is_called: a program calls this, and lives on; what ends the run early is then raised.
        after_batch: see :func:`train`.
    """
    if job.is_done:
        print(f"nothing is left to do: {job.is_done}")
        return _ended(job, 0, is_called=is_called)
    if restarts := job.config.restarts:
        require_host(job, in_threads=False)
        status = train_again_if_killed(line.words, restarts)
        return _ended(job, status, is_called=is_called)

    require_host(job)
    single = _Single(line, job, is_called, after_batch)
    assert job.composed is not None, "it is not one of a sweep"
    own_hydra.run(line.flags, job.composed, [*job.words, *job.added], single)
    return single.result()


class _Single:
    """What Hydra calls for a single run. Hydra would print an error of it, in words of its own."""

    def __init__(
        self,
        line: command_line.CommandLine,
        job: Job,
        is_called: bool,
        after_batch: Callable[[RunResult], object] | None,
    ) -> None:
        self._line = line
        self._job = job
        self._is_called = is_called
        self._watch: Watch | None = None
        if after_batch is not None:
            self._watch = lambda folder: after_batch(RunResult.of(folder))
        self._error: BaseException | None = None
        self._result: RunResult | None = None

    def __call__(self, _: DictConfig) -> None:
        about = HydraConfig.get()
        try:
            job = placed(self._job, self._line, about)
            status = _train(job, lifeline(), is_called=self._is_called, watch=self._watch)
            self._result = _ended(job, status, is_called=self._is_called)
        except (Exception, KeyboardInterrupt, SystemExit) as error:  # noqa: BLE001  # result() raises it
            self._error = error

    def result(self) -> RunResult:
        if self._error is not None:
            raise self._error
        assert self._result is not None, "Hydra has called this"
        return self._result


def _ended(job: Job, status: int, *, is_called: bool) -> RunResult:
    """What a run has come to that ended with this exit status; raises how it ended if a program called it."""
    folder = str(job.config.run_dir)
    result = replace(RunResult.of(folder), status=status)
    if not status or not is_called:
        return result
    again = f"train(resume={folder!r}) goes on with it"
    if status == EXIT_INTERRUPTED:
        raise KeyboardInterrupt(f"the run was interrupted: {again}")
    if status > 128 and is_the_hosts(signal.getsignal(status - 128)):
        return result  # the program's own handler has been called, and has decided
    if status > 128:
        raise SystemExit(status)
    raise JobFailed(
        f"the run ended with exit status {status}", folder, "look at its error above", status
    )


def placed(job: Job, line: command_line.CommandLine, about: HydraConf) -> Job:
    """The job in the folder that Hydra has made for it, if it may be there."""
    job = job.placed(about.runtime.output_dir, line.config_dir)
    require_host(job)
    require_free_folder(job)  # which a key of Hydra's may have named
    if about.output_subdir is not None:
        # Hydra does not know what is tuned for one job of a sweep. Its file has the same name as ours.
        shown = Path(about.runtime.output_dir, about.output_subdir, RESOLVED)
        OmegaConf.save(OmegaConf.structured(job.config), shown)
    return job


def _train(
    job: Job,
    parent: Connection | None,
    *,
    is_called: bool = False,
    watch: Watch | None = None,
) -> int:
    if not job.agents:
        return train_job(job, parent, is_called=is_called, watch=watch)
    if watch is not None:
        cure = "leave after_batch out, or train one agent"
        raise ConfigError("agents have processes of their own", "train(after_batch=...)", cure)
    # It loads what no other run needs.
    from rlsync.runs.life.population import train_population

    return train_population(job, parent, is_called=is_called)


@dataclass(frozen=True, slots=True)
class Task:
    """Runs a job of a sweep, for which Hydra calls it, here or, pickled, in a process that a launcher starts."""

    line: command_line.CommandLine
    jobs: list[Job]
    lifeline: Lifeline | None = None

    def __call__(self, _: DictConfig) -> float | None:
        """One run in the folder that Hydra has made. Returns its objective, None if it has none.

        Raises JobFailed unless the run ended well; the jobs that follow are run, unless a signal has ended this
        one. For a sweeper that chooses values by what jobs return, a run without an objective has failed.
        """
        about = HydraConfig.get()
        parent = lifeline() if self.lifeline is None else self.lifeline.held()
        if parent is not None and parent.poll():
            problem = f"job {about.job.num} was not begun"
            raise JobFailed(problem, "the sweep was stopped", "start it by itself")
        value: float | None = None
        try:
            job = placed(self._job(about), self.line, about)
            status = _train(job, parent)
            if not status:
                value = _objective(job, by_it=bool(own_hydra.foreign_sweeper(about)))
        except RlsyncError as error:
            print(error, file=sys.stderr)
            status = exit_status(error)
        except (Exception, SystemExit):  # noqa: BLE001  # the sweep goes on, as JobFailed says
            traceback.print_exc()
            status = EXIT_FAILED
        if not status:
            return value
        stopped = status > 128  # by a signal, or because nobody reads the output
        if self.lifeline is not None or not stopped:
            raise job_failed(about.job.num, about.runtime.output_dir, status)
        last = about.job.num
        print(f"the sweep ends with its job {last}: none after it is run", file=sys.stderr)
        sys.exit(status)

    def _job(self, about: HydraConf) -> Job:
        """The job that was checked; or one that Hydra alone knows, which is checked now."""
        chosen_before = not about.sweeper.get("params") and not own_hydra.foreign_sweeper(about)
        if self.jobs and chosen_before:
            return self.jobs[about.job.num]  # Hydra makes the same jobs in the same order
        # It is in a pickle, or a sweeper chooses values as it goes. The words are not interpolated yet.
        words: Any = OmegaConf.to_container(about.overrides)
        added = {word for job in self.jobs for word in job.added}
        return recorded_job(self.line, [*words["hydra"], *words["task"]], added)


def _objective(job: Job, *, by_it: bool) -> float | None:
    """What a run has come to, None if it has no such number; NoObjective if a sweeper chooses values ``by_it``."""
    result = RunResult.of(str(job.config.run_dir))
    try:
        return result.objective(job.config.objective)
    except NoObjective:
        if by_it:
            raise
        return None


def job_failed(number: int, folder: str, status: int) -> JobFailed:
    """What a launcher is told of a job of a sweep; its error was printed."""
    if status > 128:
        cure = f"resume={folder} run_dir={folder} goes on with it"
        return JobFailed(f"job {number} of the sweep was stopped", folder, cure, status)
    print(f"job {number} of the sweep failed; the others go on", file=sys.stderr, flush=True)
    cure = "look at its error above, and whether others have failed; then start it by itself"
    return JobFailed(f"job {number} of the sweep failed", folder, cure, status)


#: Text that Hydra reads as text without quotes.
_PLAIN = re.compile(r"[A-Za-z_][\w./:-]*")
_NOT_TEXT = ("true", "false", "null", "nan", "inf")


def _override(key_and_value: tuple[str, Any]) -> str:
    """A key and a value of Python's as an override."""
    key, value = key_and_value
    return f"{key}={_written(value, key)}"


def _written(value: Any, key: str) -> str:
    """A value as Hydra reads it."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case int() | float():
            return repr(value)
        case str() | Path():
            return _quoted(str(value))
        case list() | tuple():
            return f"[{','.join(_written(each, key) for each in value)}]"
        case dict():
            entries = (f"{name}:{_written(each, key)}" for name, each in value.items())
            return f"{{{','.join(entries)}}}"
    problem = f"a key cannot have a value of the type {type(value).__name__}"
    cure = "give None, a number, text, a list or a dict of them"
    raise ConfigError(problem, f"rlsync.runs.train({key}=...)", cure)


def _quoted(text: str) -> str:
    if _PLAIN.fullmatch(text) and text.lower() not in _NOT_TEXT:
        return text
    # Hydra reads backslashes as themselves, but before a quote and at the end.
    text = re.sub(r"(\\*)('|$)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), text)
    return f"'{text}'"


def _require_one_run(line: command_line.CommandLine, job: Job | None = None) -> None:
    """Refuse what the command does besides training one run."""
    flags = line.flags
    asks = flags.help or flags.cfg or flags.experimental_rerun or line.is_for_hydra
    if not line.errors and (line.sweeps or (job is not None and job.composed is None)):
        cure = "call it in a loop, or for a study with Optuna as docs/how_to/tune.md shows; rlsync train -m sweeps"
        raise ConfigError("a sweep has many results", "rlsync.runs.train", cure)
    if asks:
        cure = "give keys and values; rlsync train takes the other options"
        raise ConfigError("this trains one run, and prints nothing else", "rlsync.runs.train", cure)


@contextmanager
def _other_settings_of_the_process() -> Iterator[None]:
    """Put back what a run changes for itself, and a program that lives on may want otherwise."""
    threads = torch.get_num_threads()
    root = logging.getLogger()
    level = root.level
    handlers = [*root.handlers]
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_flush_denormal(False)
        root.setLevel(level)
        for handler in set(root.handlers) - set(handlers):
            root.removeHandler(handler)  # Hydra's, which writes into the run's folder
            handler.close()
        root.handlers[:] = handlers
        gc.collect()  # what a run leaves has files open, in cycles of references
