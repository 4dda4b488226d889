"""A recorded run that is made again: which of its lives, with which trainers, and up to which frame."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count, filterfalse
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor
from torchrl.trainers import Trainer

from rlsync import ConfigError, Rerun
from rlsync.runs.actors.envs.actions import DiscreteActions
from rlsync.runs.actors.envs.specs import make_venv
from rlsync.runs.life.job import Job, examined
from rlsync.runs.life.kept import config_of
from rlsync.runs.life.output import output_read
from rlsync.runs.life.resume import load
from rlsync.runs.life.run_folder import RecordedRun
from rlsync.runs.life.training import prepare_process
from rlsync.runs.recipes.bounds import refuse
from rlsync.runs.recipes.parts import making
from rlsync.runs.recipes.rerun import (
    Frame,
    config_of_rerun,
    frame_of,
    kept_frame,
    lives_to_repeat,
    number_versions,
    watch_frame,
)
from rlsync.runs.recipes.run_files import RESOLVED
from rlsync.runs.recipes.settings import Config, EnvConfig
from rlsync.seams import STAMP, last_checkpoint, machine, schedule


class RunAgain(RecordedRun):
    """A recorded run of which lives can be made again, also up to a frame alone.

    ``trusted``: whether code may run that its folder names.
    """

    def __init__(self, folder: Path, trusted: bool = False) -> None:
        super().__init__(folder)
        self._trusted = trusted

    def chosen(self, first: int | None, until: int | None) -> list[tuple[schedule.Life, Config]]:
        """The lives to make again, with their configs: from number ``first`` to version ``until``.

        None: from the first life that can be made again, and to the end.
        """
        lives = lives_to_repeat(self.folder, lambda folder: config_of(folder, self._trusted))
        if first is not None and first not in lives:
            problem = f"the run has no life {first} that can be made again"
            cure = f"give one of {', '.join(map(str, lives))}; a checkpoint inside a life will not do: it "
            cure += "lacks the environments, the workers' random numbers, and the rollouts not learned from yet; "
            cure += "life_frames=N makes a life of every N frames of a run"
            raise ConfigError(problem, "--from", cure)
        chosen = [life for number, life in lives.items() if first is None or number >= first]
        if until is None:
            return chosen
        for number, (life, _) in enumerate(chosen, 1):
            if until in {publish.version for publish in life.publishes}:
                return chosen[:number]
        newest = chosen[-1][0].publishes[-1].version
        problem = f"no version {until} was recorded"
        raise ConfigError(problem, "--until", f"the newest version is {newest}")

    def new_folder(self, into: Path | None) -> Path:
        """Where to make it again, by default inside its folder; ConfigError if ``into`` is there already."""
        if into is None:
            numbered = (self.folder / f"rerun-{number}" for number in count(1))
            folder = next(filterfalse(Path.exists, numbered))
        else:
            folder = into
        if folder.exists():
            raise ConfigError(
                f"{folder} is there already", "--into", "name a new folder: nothing is overwritten"
            )
        machine.require_place(folder, "--into", "name a folder that you may write to")
        return folder

    def ready(self, lives: Sequence[tuple[schedule.Life, Config]], folder: Path) -> list[LifeAgain]:
        """Check that these lives can be made again in a folder, which need not be there yet."""
        prepare_process()
        ready = []
        errors = []
        for life, recorded in lives:
            config = config_of_rerun(recorded, life, folder)
            job, wrong = examined(config, trusted=self._trusted)
            errors += wrong
            if job is not None:
                ready.append(LifeAgain(life, job, folder))
        refuse(errors)
        return ready


@dataclass(frozen=True, slots=True)
class LifeAgain:
    """A recorded life that can be made again."""

    life: schedule.Life
    job: Job
    folder: Path  #: that the rerun writes to

    def trainer(self) -> Trainer:
        """The trainer of the rerun, its workers started; the folder is there."""
        job = self.job
        OmegaConf.save(OmegaConf.structured(job.config), self.folder / RESOLVED)
        number_versions(self.life, self.folder)
        trainer = job.recipe.build(job.config, job.spaces, self.life)
        last_checkpoint.CollectorState.of(trainer)
        if job.checkpoint is not None:
            load(trainer, job.checkpoint, job.changes)
        return trainer


def made_again(lives: Sequence[LifeAgain], until: int | None) -> schedule.Comparison:
    """Make lives again, one after the other, until a version differs or is ``until``."""
    comparison: schedule.Comparison | None = None
    for again in lives:
        comparison = Rerun(again.life, until).run(again.trainer()).after(comparison)
        if comparison.unequal:
            break
    assert comparison is not None, "there is a life"
    return comparison


@dataclass(frozen=True, slots=True)
class FrameAgain:
    """A frame of a run that was made again up to it."""

    life: schedule.Life
    config: Config  #: of that life
    frame: Frame
    tensors: Mapping[str, Tensor]  #: as the learner took them in the rerun
    stored: Mapping[str, Tensor]  #: what the run itself has kept of them
    comparison: schedule.Comparison  #: of the rerun's digests

    @property
    def equal(self) -> dict[str, bool]:
        """Whether all that the run has kept is the same in the rerun, by its name."""
        equal = {}
        for name, tensor in self.tensors.items():
            if name in self.stored:
                equal[f"stored {name}"] = torch.equal(self.stored[name], tensor)
        version = self.tensors.get(STAMP, -1)
        equal["recorded version"] = bool(version == self.frame.rollout.version)
        return equal

    @property
    def is_equal(self) -> bool:
        return not self.comparison.unequal and all(self.equal.values())

    def to_dict(self) -> dict[str, Any]:
        """Who acted in it, on what, and how, as plain data."""
        frame = self.frame
        rollout = frame.rollout
        facts: dict[str, Any] = {
            "frame": frame.number,
            "worker": schedule.named(rollout.worker),
            "life": rollout.life,
            "rollout": rollout.number,
            "step": frame.step,
            "env": frame.env,
            "prefill": self._is_prefill(),
        }
        for name, tensor in self.tensors.items():
            facts[name] = tensor.tolist()
        if "action" in self.tensors:
            facts["sent"] = sent(self.config.env, self.tensors["action"]).tolist()
        digests = self.life.digests.get(rollout.version, {})
        facts["digests"] = {leaf: f"{digest:016x}" for leaf, digest in digests.items()}
        facts["equal"] = self.equal
        facts["rerun"] = str(self.comparison)
        return facts

    def _is_prefill(self) -> bool:
        """Whether a random action was taken, before the policy acted."""
        begins = self.config.resume is None
        return begins and self.frame.number <= self.config.recipe.prefill_frames()


def frame_again(
    run: RunAgain, first: int | None, number: int | None, place: tuple[int, int, int, int]
) -> FrameAgain:
    """Make a run again up to a frame: of a number, or else of worker, rollout, step and environment.

    ``first``: see :meth:`RunAgain.chosen`. ConfigError if there is no such frame.
    """
    lives = run.chosen(first, None)[:1]
    ((life, config),) = lives
    frame = frame_of(life, config, number, place)
    with TemporaryDirectory() as folder, output_read(Path(folder)):
        (again,) = run.ready(lives, Path(folder))
        trainer = again.trainer()
        tensors = watch_frame(trainer, frame)
        comparison = Rerun(life).run(trainer)
    stored = kept_frame(run.folder, config, frame)
    return FrameAgain(life, config, frame, tensors, stored, comparison)


def sent(env: EnvConfig, action: Tensor) -> Tensor:
    """What the environment got for a stored action, which may be one-hot."""
    with making(env):
        envs = make_venv(env.spec(), 1)
    envs.close()
    if isinstance(envs.actions, DiscreteActions) and action.ndim:
        action = action.to(torch.int64).argmax()
    return envs.actions.sent(action)
