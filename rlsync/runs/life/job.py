"""Runs that are about to start: their configs, checked once, and their environments, looked at once."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from torchrl.trainers import Trainer

from rlsync import ConfigError, RlsyncError, RlsyncWarning
from rlsync.runs.actors.replay.shared import SharedReplayHandle
from rlsync.runs.config import own_hydra
from rlsync.runs.config.command_line import CommandLine, spelled
from rlsync.runs.config.composing import BEFORE, composition, file_before, told, written
from rlsync.runs.life.resume import Change, change_errors, changes, checkpoint_in, require_fit
from rlsync.runs.life.state import learner_in
from rlsync.runs.recipes import checks
from rlsync.runs.recipes.evaluating import require_screen
from rlsync.runs.recipes.registry import Recipe, recipe_of
from rlsync.runs.recipes.run import Run
from rlsync.runs.recipes.run_files import CHECKPOINT, RECEIPTS, agent_folder
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
    trusted: bool = False  # whether code may run that the folder of the run before holds or names
    # of a population, by number; else empty
    agents: Mapping[int, Config] = field(default_factory=dict)
    # the replay of the population that this is an agent of
    shared: SharedReplayHandle | None = None
    # whether it is run by a launcher of Hydra's that may start processes for jobs
    apart: bool = False

    def build(self) -> Trainer:
        """The trainer, its workers started; nothing is checked or probed again."""
        acts = self.recipe.player(self.config, self.spaces, deterministic=True).weights
        trainer = self.recipe.build(self.config, self.spaces, shared=self.shared)
        device = Run(self.config).device
        loss = trainer.loss_module
        kept = getattr(loss, "actor_network", None) or getattr(loss, "value_network", None)
        elsewhere = {str(p.device) for p in loss.parameters() if p.device != device}
        if elsewhere:
            where = "learner.device"
            problem = f"trains on {', '.join(elsewhere)}, not on {device}"
            cure = "let its build() move the networks to run.device before it makes the loss"
        elif kept is not None and set(kept.state_dict()) != set(acts.state_dict()):
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
        own = self.config.config_dir if config_dir is None else str(config_dir)
        config = replace(self.config, run_dir=self.config.run_dir or run_dir, config_dir=own)
        agents = {
            number: replace(
                agent, run_dir=str(agent_folder(str(config.run_dir), number)), config_dir=own
            )
            for number, agent in self.agents.items()
        }
        return replace(self, config=config, agents=agents)


def examined(
    config: Config, *, trusted: bool = False, config_dir: Path | None = None
) -> tuple[Job | None, list[RlsyncError]]:
    """Check a config without starting a worker. Returns the job, or None, and all that is wrong."""
    errors = list(checks.errors(config))

    def tried(look: Callable[[], T]) -> T | None:
        try:
            return look()
        except RlsyncError as error:
            errors.append(error)
            return None

    recipe = tried(lambda: recipe_of(config))
    spaces = None
    found = None
    before = None
    if recipe is not None and config.env.id:
        spaces = tried(lambda: recipe.probe(config.env))
        if spaces is not None and not errors:
            tried(lambda: require_screen(config))
    if config.resume is not None:
        found = tried(lambda: checkpoint_in(str(config.resume), trusted))
        if (file := file_before(Path(config.resume))) is not None:
            before = tried(lambda: written(file, trusted=trusted, config_dir=config_dir))
        if before is not None:
            errors += change_errors(before, config)
    if recipe is None or errors:
        return None, errors
    changed = None if before is None else changes(before, config)
    checkpoint = None if found is None else found.checkpoint
    if checkpoint is not None:
        tried(lambda: require_fit(recipe, config, spaces, checkpoint, changed or []))
    facts = {} if found is None else {"resumes": str(found)}
    job = Job(config, recipe, spaces, checkpoint, changed, facts, trusted=trusted)
    tried(lambda: require_free_folder(job))
    return (None if errors else job), errors


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
    cure = f"give another folder, or resume={run_dir} to go on with that run"
    raise ConfigError(f"the folder {run_dir!r} holds another run", f"run_dir={run_dir}", cure)


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
            made, faults = composition(line, words)
            errors += faults
            if made is None:
                continue
            recipe: Any = made.config.recipe
            population = recipe.population() > 1
            # each agent has a checkpoint of its own
            resume = None if population else made.config.resume
            config = replace(made.config, resume=resume)
            job, wrong = examined(config, trusted=line.trusted, config_dir=line.config_dir)
            errors += wrong
            if job is not None and not faults:
                facts = told(made.choices, made.config, line.config_dir)
                apart = line.sweeps and made.choices.get(own_hydra.LAUNCHER) not in own_hydra.BASIC
                job = replace(
                    job,
                    told={**facts, **job.told},
                    words=tuple(words),
                    added=made.added,
                    apart=apart,
                )
                if population:
                    # loads what no other run needs
                    from rlsync.runs.life.population import agents_of

                    agents, wrong = agents_of(line, words, made.config)
                    errors += wrong
                    facts["agents"] = (
                        f"{recipe.agents}, which differ in {recipe.vary or 'their seeds'}"
                    )
                    job = replace(
                        job, config=made.config, agents=agents, told={**job.told, **facts}
                    )
                jobs.append(job)
    errors += _shared_folders(jobs)
    once: dict[tuple[str, str], RlsyncError] = {}
    for error in errors:
        once.setdefault((error.what, error.cure), error)
    return jobs, list(once.values())


def _shared_folders(jobs: list[Job]) -> list[RlsyncError]:
    counts = Counter(job.config.run_dir for job in jobs if job.config.run_dir is not None)
    return [
        ConfigError(
            f"{count} jobs of the sweep would write to the folder {folder}",
            f"run_dir={folder}",
            f"leave it out, or write hydra.sweep.dir={folder}: each job gets a folder of its own in there",
        )
        for folder, count in counts.items()
        if count > 1
    ]


def jobs_of(line: CommandLine) -> list[Job]:
    jobs, errors = examined_jobs(line)
    if errors:
        raise errors[0] if len(errors) == 1 else ManyErrors(errors)
    return jobs


def words_for_hydra(line: CommandLine, jobs: list[Job]) -> list[str]:
    """The overrides with which Hydra composes the same; in a sweep the user's own and what all jobs add."""
    if jobs:
        added = [word for word in jobs[0].added if all(word in job.added for job in jobs)]
    else:
        added = []
    if line.sweeps:  # Hydra's own sweeper cannot leave out a group
        added = [word for word in added if not word.startswith("~")]
    words = [*line.overrides, *added]
    has_folder = any(word.startswith("hydra.run.dir=") for word in words)
    if not line.sweeps and jobs[0].config.run_dir and not has_folder:
        words.append("hydra.run.dir=${run_dir}")  # Hydra writes there too: a run has one folder
    return words


def job_of(line: CommandLine, jobs: list[Job], words: list[str]) -> Job:
    """The job that Hydra runs with these overrides; one that a sweeper chose is composed and checked here."""
    added = {spelled(word) for job in jobs for word in job.added}

    def users(words: Iterable[str]) -> list[str]:
        """Those that rlsync has not added: it finds them anew for a job that was not checked."""
        return [w for w in words if spelled(w) not in added and not w.endswith(f"={BEFORE}")]

    def key(words: Iterable[str]) -> list[str]:
        return [spelled(w) for w in users(words) if not w.lstrip("+~").startswith("hydra")]

    for job in jobs:
        if key(job.words) == key(words):
            return job
    (job,) = jobs_of(replace(line, jobs=(tuple(users(words)),), errors=()))
    return job
