"""A run that is made again: which of its lives, with which jobs and trainers."""

from __future__ import annotations

import argparse
from pathlib import Path

from omegaconf import OmegaConf
from torchrl.trainers import Trainer

from rlsync import ConfigError
from rlsync.record.schedule import Life
from rlsync.runs.life.job import Job, examined
from rlsync.runs.life.resume import load
from rlsync.runs.life.training import prepare_process
from rlsync.runs.recipes.bounds import refuse
from rlsync.runs.recipes.rerun import config_of_rerun, number_versions
from rlsync.runs.recipes.run_files import RESOLVED
from rlsync.runs.recipes.settings import Config
from rlsync.torchrl_plugin.ending.last_checkpoint import CollectorState


def jobs_again(chosen: list[tuple[Life, Config]], folder: Path, trusted: bool) -> list[Job]:
    prepare_process()
    found = [
        examined(config_of_rerun(recorded, life, folder), trusted=trusted)
        for life, recorded in chosen
    ]
    refuse(error for _, errors in found for error in errors)
    return [job for job, _ in found if job is not None]


def trainer_again(life: Life, job: Job, folder: Path) -> Trainer:
    """The trainer of a rerun, its workers started; the folder is there."""
    OmegaConf.save(OmegaConf.structured(job.config), folder / RESOLVED)
    number_versions(life, folder)
    trainer = job.recipe.build(job.config, job.spaces, life)
    CollectorState.of(trainer)
    if job.checkpoint is not None:
        load(trainer, job.checkpoint, job.changes)
    return trainer


def wanted(
    lives: dict[int, tuple[Life, Config]], given: argparse.Namespace
) -> list[tuple[Life, Config]]:
    """The lives to make again; ConfigError if the one that is asked for, or the version, is not there."""
    if given.first is not None and given.first not in lives:
        cure = (
            f"give one of {', '.join(map(str, lives))}; a checkpoint inside a life will not do: it "
        )
        cure += "lacks the environments, the workers' random numbers, and the rollouts not learned from yet; "
        cure += "life_frames=N makes a life of every N frames of a run"
        raise ConfigError(
            f"the run has no life {given.first} that can be made again", "--from", cure
        )
    chosen = [
        each for number, each in lives.items() if given.first is None or number >= given.first
    ]
    if given.until is None:
        return chosen
    for number, (life, _) in enumerate(chosen, 1):
        if given.until in {publish.version for publish in life.publishes}:
            return chosen[:number]
    problem = f"no version {given.until} was recorded"
    newest = chosen[-1][0].publishes[-1].version
    raise ConfigError(problem, "--until", f"the newest version is {newest}")
