"""Runs that are about to start: their configs, checked once, and their environments, looked at once."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import DictConfig
from torchrl.trainers import Trainer

from rlsync import ConfigError, RlsyncError, RlsyncWarning
from rlsync.runs.actors.replay.shared import SharedReplayHandle
from rlsync.runs.config import own_hydra
from rlsync.runs.config.command_line import CommandLine
from rlsync.runs.config.composing import (
    BEFORE,
    Composition,
    composition,
    file_before,
    told,
    written,
)
from rlsync.runs.life.resume import (
    Change,
    NothingLeft,
    change_errors,
    changes,
    checkpoint_in,
    require_fit,
)
from rlsync.runs.life.state import learner_in
from rlsync.runs.recipes import checks
from rlsync.runs.recipes.bounds import refuse
from rlsync.runs.recipes.evaluating import require_screen
from rlsync.runs.recipes.registry import Recipe, recipe_of
from rlsync.runs.recipes.run import Run
from rlsync.runs.recipes.run_files import CHECKPOINT, RECEIPTS, RESOLVED, agent_folder
from rlsync.runs.recipes.settings import Config
from rlsync.seams import machine, warn

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Job:
    """A checked config with all that the check found out, so that nothing has to be looked up twice."""

    config: Config
    recipe: Recipe
    spaces: Any  # what the recipe's probe found the environment to be
    checkpoint: Path | None  # to resume from; None starts anew
    # since the run that is resumed; None if that run's config is not known
    changes: list[Change] | None = None
    # which checkpoint is resumed; where the settings come from, what is played, when the run ends, in words
    told: Mapping[str, str] = field(default_factory=dict)
    words: tuple[str, ...] = ()  # the overrides of the command line that made it
    added: tuple[str, ...] = ()  # what rlsync adds to them, so that Hydra composes the same config
    # what Hydra has composed of both, with its own part; None in a sweep: there Hydra composes itself
    composed: DictConfig | None = None
    trusted: bool = False  # whether code may run that the folder of the run before holds or names
    # of a population, by number; else empty
    agents: Mapping[int, Config] = field(default_factory=dict)
    # the replay of the population that this is an agent of
    shared: SharedReplayHandle | None = None
    # whether it goes on in its folder if that has something to go on from, and else begins there
    auto: bool = False
    # why there is nothing left to do; empty: there is
    is_done: str = ""
    # whether it is run by a launcher of Hydra's that may start processes for jobs
    apart: bool = False
    # whether a sweeper chooses values as it goes, so that this is an example of its jobs
    chosen_later: bool = False

    def build(self) -> Trainer:
        """The trainer, its workers started; nothing is checked or probed again."""
        acts = self.recipe.player(self.config, self.spaces, deterministic=True).weights
        trainer = self.recipe.build(self.config, self.spaces, shared=self.shared)
        device = Run(self.config).device
        loss = trainer.loss_module
        network = getattr(loss, "actor_network", None) or getattr(loss, "value_network", None)
        elsewhere = {str(p.device) for p in loss.parameters() if p.device != device}
        if elsewhere:
            where = "learner.device"
            problem = f"trains on {', '.join(elsewhere)}, not on {device}"
            cure = "let its build() move the networks to run.device before it makes the loss"
        elif network is not None and set(network.state_dict()) != set(acts.state_dict()):
            where = "acting"
            problem = "returned another network there than the one that a checkpoint keeps"
            cure = "let it return one like the loss module's actor_network, else like its value_network"
        else:
            return trainer
        trainer.shutdown()
        raise ConfigError(f"the recipe {self.recipe.name!r} {problem}", where, cure)

    def continues_in(self, run_dir: Path) -> bool:
        """Whether the run goes on in the folder that it resumes from."""
        return self.checkpoint is not None and self.checkpoint.parent.resolve() == run_dir.resolve()

    def next_life(self, run_dir: Path) -> Job:
        """The job that goes on, in the same folder, from the checkpoint that this one has just written."""
        config = replace(self.config, resume=str(run_dir))
        return replace(self, config=config, checkpoint=run_dir / CHECKPOINT, changes=[])

    def placed(self, run_dir: str, config_dir: Path | None) -> Job:
        """The same job with the folder it writes to (the config's own wins) and that of ``--config-dir``."""
        recipes = self.config.config_dir
        if config_dir is not None:
            recipes = str(config_dir)
        whole = replace(self.config, run_dir=self.config.run_dir or run_dir, config_dir=recipes)
        agents = {}
        for number, agent in self.agents.items():
            folder = str(agent_folder(str(whole.run_dir), number))
            agents[number] = replace(agent, run_dir=folder, config_dir=recipes)
        return replace(self, config=whole, agents=agents)


def examined(
    config: Config, *, trusted: bool = False, config_dir: Path | None = None, auto: bool = False
) -> tuple[Job | None, list[RlsyncError]]:
    """Check a config without starting a worker. Returns the job, or None, and all that is wrong.

    ``auto``: it may begin in a folder where it has begun before, and may be done.
    """
    errors = list(checks.errors(config))

    def tried(look: Callable[[], T]) -> T | None:
        try:
            return look()
        except RlsyncError as error:
            errors.append(error)
            return None

    recipe = tried(lambda: recipe_of(config))
    spaces = None
    if recipe is not None and config.env.name:
        spaces = tried(lambda: recipe.probe(config.env))
        if spaces is not None and not errors:
            tried(lambda: require_screen(config))
    resumed = None
    before = None
    if config.resume is not None:
        resumed = tried(lambda: checkpoint_in(str(config.resume), trusted))
        before = tried(lambda: _config_before(config, trusted, config_dir))
    if before is not None:
        errors += change_errors(before, config)
    if recipe is None or errors:
        return None, errors

    job = Job(config, recipe, spaces, checkpoint=None, trusted=trusted, auto=auto)
    if before is not None:
        job = replace(job, changes=changes(before, config))
    if resumed is not None:
        job = replace(job, checkpoint=resumed.checkpoint, told={"resumes": str(resumed)})
        going_on = job
        job = tried(lambda: _going_on(going_on, resumed.checkpoint)) or job
    tried(lambda: require_free_folder(job))
    return (None if errors else job), errors


def _going_on(job: Job, checkpoint: Path) -> Job:
    """The job, if it can go on from its checkpoint, or need not; else ConfigError."""
    try:
        require_fit(job.recipe, job.config, job.spaces, checkpoint, job.changes or [])
    except NothingLeft as error:
        if not job.auto:
            raise
        return replace(job, is_done=error.what)
    return job


def _config_before(config: Config, trusted: bool, config_dir: Path | None) -> Config | None:
    """The config of the run that is resumed, if it is known."""
    file = file_before(Path(str(config.resume)))
    if file is None:
        return None
    return written(file, trusted=trusted, config_dir=config_dir)


def require_free_folder(job: Job) -> None:
    """Refuse a ``run_dir`` that cannot be written to, or where another run's curves would be mixed in."""
    run_dir = job.config.run_dir
    if run_dir is None:  # Hydra names one
        return
    machine.require_place(
        Path(run_dir), f"run_dir={run_dir}", "name a folder that you may write to"
    )
    try_checkpoints(Path(run_dir))
    if (learner := learner_in(Path(run_dir))) not in (None, os.getpid()):
        cure = "wait until that run has ended, stop it, or give another folder"
        raise ConfigError(f"pid {learner} trains in {run_dir!r}", f"run_dir={run_dir}", cure)
    if job.continues_in(Path(run_dir)) or not (Path(run_dir) / RECEIPTS).is_file():
        return
    if job.auto and _has_begun(job, Path(run_dir)):
        return
    cure = f"give another folder, or resume={run_dir} to go on with that run"
    raise ConfigError(f"the folder {run_dir!r} holds another run", f"run_dir={run_dir}", cure)


def _has_begun(job: Job, run_dir: Path) -> bool:
    """Whether what is in this folder was left by a beginning of the same run."""
    file = run_dir / RESOLVED
    return file.is_file() and not changes(written(file, trusted=job.trusted), job.config)


@cache  # a run's folder is looked at when its config is checked, and when the run begins
def try_checkpoints(run_dir: Path) -> None:
    """Try what a checkpoint needs: ConfigError if it cannot be had, a warning if it takes more there."""
    where = f"run_dir={run_dir}"
    if lacks := machine.require_checkpoints(run_dir, where):
        problem = f"the file system of the run's folder cannot {', '.join(lacks)}"
        cure = "give a run_dir on a local disk: here more is written, and a power cut may cost a checkpoint"
        warn(RlsyncWarning(problem, where, cure))


class ManyErrors(ConfigError):
    """Several errors at once, three lines each, with a blank line between them."""

    def __init__(self, errors: Sequence[RlsyncError]) -> None:
        first = errors[0]
        super().__init__(first.what, first.where, first.cure)
        self.errors = errors

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.errors))


def examined_jobs(line: CommandLine) -> tuple[list[Job], list[RlsyncError]]:
    """The jobs of a line that nothing is wrong with, and each error once; no worker is started."""
    jobs: list[Job] = []
    errors: list[RlsyncError] = list(line.errors)
    with own_hydra.initialised(line.flags.config_path):
        for words in line.jobs:
            composed, faults = composition(line, words)
            job, wrong = _examined_job(line, words, composed, faults)
            errors += wrong
            if job is not None:
                jobs.append(job)
    errors += _shared_folders(jobs)
    once: dict[tuple[str, str], RlsyncError] = {}
    for error in errors:
        once.setdefault((error.what, error.cure), error)
    return jobs, list(once.values())


def _examined_job(
    line: CommandLine,
    words: Sequence[str],
    composed: Composition | None,
    faults: Sequence[RlsyncError],
) -> tuple[Job | None, list[RlsyncError]]:
    """The job that was composed of these overrides, or None if anything is wrong; ``faults`` was already."""
    errors = [*faults]
    if composed is None:
        return None, errors

    whole = composed.config
    recipe: Any = whole.recipe
    population = recipe.population() > 1
    if population:  # each agent has a checkpoint of its own
        config = replace(whole, resume=None)
    else:
        config = whole
    job, wrong = examined(
        config, trusted=line.trusted, config_dir=line.config_dir, auto=composed.auto
    )
    errors += wrong
    if job is None or faults:
        return None, errors

    sweeps = line.sweeps or own_hydra.asks_for_sweep(composed.composed)
    if whole.restarts:
        errors += _restart_errors(line, whole)
        if errors:
            return None, errors
    facts = {**told(composed.choices, whole, line.config_dir), **job.told}
    agents: Mapping[int, Config] = {}
    if population:
        facts["agents"] = f"{recipe.agents}, which differ in {recipe.vary or 'their seeds'}"
        # It loads what no other run needs.
        from rlsync.runs.life.population import agents_of

        agents, wrong = agents_of(line, words, whole)
        errors += wrong
    job = replace(
        job,
        config=whole,
        told=facts,
        words=tuple(words),
        added=composed.added,
        composed=None if sweeps else composed.composed,
        agents=agents,
        chosen_later=sweeps and bool(own_hydra.foreign_sweeper(composed.composed.hydra)),
        apart=line.sweeps and composed.choices.get(own_hydra.LAUNCHER) not in own_hydra.BASIC,
    )
    return job, errors


def _restart_errors(line: CommandLine, config: Config) -> Iterator[RlsyncError]:
    """Why a run cannot be started again from its checkpoint."""
    where = f"restarts={config.restarts}"
    if line.sweeps:
        cure = "start its jobs one by one, or give restarts=0"
        yield ConfigError("the jobs of a sweep are not started again", where, cure)
    elif config.run_dir is None:
        cure = "give run_dir=FOLDER"
        yield ConfigError("a run that is started again needs a folder of its own", where, cure)
    elif config.resume is not None and Path(config.run_dir) not in (
        Path(config.resume),
        Path(config.resume).parent,
    ):
        cure = f"copy that run to {config.run_dir}, and give resume=auto"
        yield ConfigError("a run that is started again goes on in its own folder", where, cure)


def _shared_folders(jobs: list[Job]) -> list[RlsyncError]:
    errors: list[RlsyncError] = []
    folders = Counter(job.config.run_dir for job in jobs)
    del folders[None]
    for folder, count in folders.items():
        if count > 1:
            problem = f"{count} jobs of the sweep would write to the folder {folder}"
            cure = f"leave it out, or write hydra.sweep.dir={folder}: each job gets a folder of its own in there"
            errors.append(ConfigError(problem, f"run_dir={folder}", cure))
    return errors


def jobs_of(line: CommandLine) -> list[Job]:
    jobs, errors = examined_jobs(line)
    _refuse(errors)
    return jobs


def recorded_job(line: CommandLine, words: Sequence[str], added: Collection[str]) -> Job:
    """The job that has these overrides in Hydra's record, checked now; what rlsync ``added`` is found anew."""
    users = [word for word in words if word not in added and not word.endswith(f"={BEFORE}")]
    own_hydra.register_in_process_of_launcher(line.config_dir)
    with own_hydra.initialised(line.flags.config_path):
        composed, faults = composition(line, users)
        job, errors = _examined_job(line, users, composed, faults)
    _refuse(errors)
    assert job is not None
    return job


def _refuse(errors: Sequence[RlsyncError]) -> None:
    if len(errors) > 1:
        raise ManyErrors(errors)
    refuse(errors)


def words_of_sweep(line: CommandLine, jobs: list[Job]) -> list[str]:
    """The overrides of which Hydra makes the jobs of a sweep: the user's, and what all jobs add."""
    words = [*line.overrides]
    if not jobs or jobs[0].chosen_later:  # nobody knows yet what fits the jobs
        return words
    for word in jobs[0].added:
        # Hydra's own sweeper cannot leave out a group
        if not word.startswith("~") and all(word in job.added for job in jobs):
            words.append(word)
    return words
