"""A run made again from its config, seed and schedule, and its digests compared with those of the record."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from itertools import count
from pathlib import Path
from typing import Any

from tensordict import TensorDictBase
from torch import Tensor
from torchrl.trainers import Trainer

from rlsync import ConfigError
from rlsync.runs.recipes.checkpoints import checkpoint_at
from rlsync.runs.recipes.replay.row_segments import stored_row
from rlsync.runs.recipes.replay.settings import OffPolicyConfig
from rlsync.runs.recipes.run_files import (
    CHECKPOINT,
    DIGESTS,
    LIVES,
    RESOLVED,
    SCHEDULE,
    VERSIONS,
    agents_in,
)
from rlsync.runs.recipes.settings import Config, EvaluationConfig
from rlsync.seams import STAMP, ledger, machine, schedule, stop, whole_file

#: Keys that decide nothing of what is learned.
_BESIDE = (
    "run_dir",
    "config_dir",
    "resume",
    "restarts",
    "logger",
    "checkpoint_every_frames",
    "stop_within_s",
    "evaluation",
)


def schedule_facts(config: Config) -> dict[str, Any]:
    """What a schedule says of its run's config."""
    checkpoint = None
    if config.resume is not None:
        checkpoint = _print_of(Path(config.resume))
    return {
        "config": _deciding(config),
        "seed": config.seed,
        "resumed": config.resume is not None,
        "checkpoint": checkpoint,
        "life_length": config.life_length,
        "rollout_frames": config.recipe.batches(config).steps * config.env.num_envs,
    }


def _deciding(config: Config) -> dict[str, Any]:
    """The keys of a config that decide what is learned, as JSON has them."""
    keys = {name: value for name, value in asdict(config).items() if name not in _BESIDE}
    return dict(json.loads(json.dumps(keys, default=str)))


def _other_key(recorded: Any, now: Any, at: str = "") -> str | None:
    """A key whose value is not the recorded one. One that is newer than the record has its default."""
    if isinstance(recorded, dict) and isinstance(now, dict) and not at.endswith(".kwargs"):
        for name, value in recorded.items():
            key = _other_key(value, now.get(name), f"{at}.{name}")
            if key is not None:
                return key
        return None
    if recorded == now:
        return None
    return at.lstrip(".") or "config"


def _print_of(resumed: Path) -> str | None:
    """A digest of the checkpoint that a run begins from; None if there is none, or it has no digests."""
    checkpoint = checkpoint_at(resumed)
    if checkpoint is None or not (checkpoint / DIGESTS).is_file():
        return None
    return whole_file.digest_of(checkpoint / DIGESTS)


def keep_life(run: Path, checkpoint: Path) -> Path | None:
    """Keep what a run's last life has left, linked where possible; None if the run has no schedule."""
    if not (run / SCHEDULE).is_file():
        return None
    folder = run / LIVES / str(len(schedule.lives_in(run / SCHEDULE)) - 1)
    folder.mkdir(parents=True)
    shutil.copy2(run / RESOLVED, folder)
    shutil.copytree(checkpoint, folder / CHECKPOINT, copy_function=machine.link_or_copy)
    return folder


def lives_to_repeat(
    run: Path, config_in: Callable[[Path], Config]
) -> dict[int, tuple[schedule.Life, Config]]:
    """The lives of a run that can be made again, by number from 1, and their configs; else ConfigError."""
    if agents_in(run):
        problem = "this run cannot be made again: its replay was that of a population"
        raise ConfigError(problem, str(run), "make a run with recipe.agents=1 again")
    file = run / SCHEDULE
    lives: dict[int, tuple[schedule.Life, Config]] = {}
    for number, life in enumerate(schedule.lives_in(file), 1):
        if not life.rollouts:  # it was killed before it had written a block
            continue
        folder = run / LIVES / str(number)
        if not (folder / RESOLVED).is_file():
            folder = run
        config = config_in(folder)
        if number > 1:
            config = replace(config, resume=str(run / LIVES / str(number - 1)))
        for problem, cure in _why_not(config, life):
            raise ConfigError(
                f"this run cannot be made again: {problem}", f"life {number} of {run}", cure
            )
        key = _other_key(life.facts.get("config"), _deciding(config))
        if key is not None:
            problem = f"the schedule was recorded with another config than the one beside it: {key} differs"
            raise ConfigError(
                problem, str(file), f"put the {RESOLVED} back that the run has written"
            )
        lives[number] = (life, config)
    return lives


def _why_not(config: Config, life: schedule.Life) -> Iterator[tuple[str, str]]:
    """What lacks or is not recorded, and what to do about it."""
    when = config.sync.when
    if str(life.facts.get("rlsync")).startswith("0.1."):
        problem = "rlsync 0.1 recorded it, whose workers were others"
        yield problem, "install that version to make it again, or start the run anew"
    if life.facts.get("resumed"):
        digest = _print_of(Path(str(config.resume)))
        if digest is None or digest != life.facts.get("checkpoint"):
            problem = f"the checkpoint in {config.resume} is not the one that it began from"
            yield problem, "put that one back, or begin at a later life with --from"
    if not config.cluster.here:
        yield "its workers were on a cluster", "make a run with cluster=none again"
    if when.unit == "seconds" and when.every is not None:
        yield "it published every so many seconds", "count batches, frames or optim_steps"
    if config.recipe.ring_policy() == "drop_newest":
        yield (
            "its workers dropped rollouts, which are not recorded",
            "give when_full=block or drop_oldest",
        )


def config_of_rerun(config: Config, life: schedule.Life, folder: Path) -> Config:
    """The same run, but for what it writes, evaluates and verifies; it ends where the record ends."""
    recipe = replace(config.recipe, target_return=None)
    if "evaluation" in {field.name for field in fields(recipe)}:
        recipe = replace(recipe, evaluation=EvaluationConfig())  # type: ignore[call-arg]
    resume = None  # a later life in its folder may have begun from a checkpoint
    if life.facts.get("resumed"):
        resume = config.resume
    return replace(
        config,
        run_dir=str(folder),
        resume=resume,
        recipe=recipe,
        sync=replace(config.sync, verify_every_s=None),
        logger=replace(config.logger, kind="none"),
        checkpoint_every_frames=10**15,  # none before the end
    )


def number_versions(life: schedule.Life, folder: Path) -> None:
    """Let the versions of a rerun in this folder begin with the number with which the life's began."""
    reserved = ledger.Reserved(run_id="", up_to=life.publishes[0].version - 1)
    (folder / VERSIONS).write_text(json.dumps(asdict(reserved)))


@dataclass(frozen=True, slots=True)
class Frame:
    """A step of one of the environments of a recorded rollout, both from 0."""

    #: from 1, as the learner took frames; of a rollout, step after step of all environments
    number: int
    rollout: schedule.Rollout
    taken: int  #: how many rollouts the learner took before this one
    step: int
    env: int
    steps: int  #: of the rollout
    envs: int  #: of the rollout


def frame_of(
    life: schedule.Life, config: Config, number: int | None, place: tuple[int, int, int, int]
) -> Frame:
    """The frame of a number, or else of worker, rollout, step and env; ConfigError if there is none."""
    envs = config.env.num_envs
    steps, in_batch = config.recipe.batches(config)
    rollouts = [rollout for rollout in life.rollouts if not rollout.dropped]
    # a killed run may have taken a part of a batch
    del rollouts[len(rollouts) // in_batch * in_batch :]
    if number is None:
        worker, which, step, env = place
        _require("--env", env, range(envs))
        places = {
            rollout.number: at for at, rollout in enumerate(rollouts) if rollout.worker == worker
        }
        _require("--worker", worker, {rollout.worker for rollout in rollouts})
        _require("--rollout", which, places)
        _require("--step", step, range(steps))
        number = (places[which] * steps + step) * envs + env + 1
    _require("NUMBER", number, range(1, len(rollouts) * steps * envs + 1))
    before, env = divmod(number - 1, envs)
    at, step = divmod(before, steps)
    return Frame(
        number=number,
        rollout=rollouts[at],
        taken=at,
        step=step,
        env=env,
        steps=steps,
        envs=envs,
    )


def _require(name: str, asked: int, known: Collection[int]) -> None:
    if asked not in known:
        if known:
            span = f"give {min(known)} to {max(known)}"
        else:
            span = "no batch is complete"
        cure = f"{span}; rollouts that were dropped have no frames; --from names another life"
        raise ConfigError(f"no such frame was recorded: {name} cannot be {asked}", name, cure)


def kept_frame(run: Path, config: Config, frame: Frame) -> Mapping[str, Tensor]:
    """What a run's first life keeps of a frame in its replay buffer, if that is one of single steps."""
    number = (frame.taken * frame.envs + frame.env) * frame.steps + frame.step
    checkpoint = checkpoint_at(run / LIVES / "1") or checkpoint_at(run)
    if (
        checkpoint is None
        or not isinstance(config.recipe, OffPolicyConfig)
        or config.resume is not None
    ):
        return {}
    row = stored_row(checkpoint, number)
    if row is None:
        return {}
    return dict(row.items())


def watch_frame(trainer: Trainer, frame: Frame) -> dict[str, Tensor]:
    """What the frame has, by name; filled when the trainer, which a rerun stops then, has its batch."""
    arrays: dict[str, Tensor] = {}
    batches = count()
    collector = trainer.collector
    before, place = divmod(frame.taken, collector.rollouts_per_batch)

    def look(batch: TensorDictBase) -> None:
        if next(batches) != before:
            return
        at = frame.step, place * frame.envs + frame.env
        if batch.ndim:  # transitions; in batches of unrolls time comes first
            at = at[::-1]
        for name in batch.sorted_keys:
            if name in (STAMP, "observation", "action") or name.endswith("log_prob"):
                arrays[name] = batch[name][at].clone()
        stop(trainer)

    trainer.register_op("batch_process", look)
    return arrays
