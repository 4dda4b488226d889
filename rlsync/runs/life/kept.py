"""What a run has kept of its training: its config, its checkpoint and its policy."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from omegaconf import OmegaConf
from torchrl.checkpoint import Checkpoint

from rlsync import ConfigError, __version__
from rlsync.runs.actors.devices import CPU, device_named
from rlsync.runs.actors.envs.specs import make_venv
from rlsync.runs.config import trust
from rlsync.runs.config.composing import written
from rlsync.runs.evaluation.checkpoint import COMPONENTS, CheckpointPlayer, Trained, load, load_best
from rlsync.runs.evaluation.policy import Policy
from rlsync.runs.evaluation.process import best_in
from rlsync.runs.life.policy import Which
from rlsync.runs.life.run_folder import RunFolder
from rlsync.runs.recipes.bounds import bound_errors, refuse
from rlsync.runs.recipes.checkpoints import checkpoint_at, require_whole
from rlsync.runs.recipes.evaluating import acting_of
from rlsync.runs.recipes.parts import making
from rlsync.runs.recipes.run_files import (
    BEST,
    CHECKPOINT,
    DIGESTS,
    RECEIPTS,
    RESOLVED,
    VERSIONS,
    best_agent,
)
from rlsync.runs.recipes.settings import Config
from rlsync.seams import ledger, whole_file


def config_of(run: Path, trusted: bool = False) -> Config:
    """A run's configuration; ConfigError: none is there, it is unreadable, or names code without trust."""
    file = RunFolder(run).path / RESOLVED
    config = written(file, trusted=trusted)
    trust.check_code(config, trust.OF_ENV, file, trusted)
    # Only the values: the run has trained, and newer rules about collectors do not concern an evaluation.
    refuse(bound_errors(config))
    return config


def checkpoint_of(run: Path, asked: Path | None, config: Config, trusted: bool = False) -> Path:
    """The checkpoint to play; ConfigError: there is none, it is damaged, unsafe, or of something else."""
    folder = run
    where = f"run {run}"
    if asked is not None:
        folder = asked
        where = f"--checkpoint {asked}"
    checkpoint = checkpoint_at(folder)
    if checkpoint is None:
        if folder.is_dir():
            problem = f"{folder} holds no checkpoint"
        else:
            problem = f"{folder} does not exist"
        cure = "a run writes its first after a twentieth of its frames and 30 s, or checkpoint_every_frames"
        raise ConfigError(problem, where, f"{cure}; rlsync status {run} says how it ended")
    trust.check_checkpoint(checkpoint, trusted)
    if not require_whole(checkpoint, trusted=trusted, components=COMPONENTS):
        print(f"unchecked: {checkpoint} has no {DIGESTS}", file=sys.stderr)
    if checkpoint.parent != run:
        _check_owner(checkpoint, run, config, where)
    return checkpoint


def _check_owner(checkpoint: Path, run: Path, config: Config, where: str) -> None:
    """Refuse a checkpoint of something else: tensors of the same names and shapes would fit."""
    beside = checkpoint.parent / RESOLVED
    runs_own = run / CHECKPOINT
    if beside.is_file():
        written = trust.config_in(beside)
        for key, ours in (
            ("recipe.name", config.recipe.name),
            ("env.id", config.env.id),
            ("env.make", config.env.make),
        ):
            theirs = OmegaConf.select(written, key)
            if theirs != ours:
                problem = f"that checkpoint is of {key} {theirs!r}, the run is of {ours!r}"
                raise ConfigError(
                    problem, where, f"name its own run: rlsync eval {checkpoint.parent}"
                )
    elif Checkpoint.is_checkpoint(runs_own):
        theirs = set(Checkpoint.manifest(checkpoint)["components"])
        odd = theirs.symmetric_difference(Checkpoint.manifest(runs_own)["components"])
        if odd:
            parts = ", ".join(sorted(odd))
            problem = f"that checkpoint is not made as the run's own: only one of them has: {parts}"
            raise ConfigError(problem, where, "name the run that wrote it")


def policy_of(
    run: Path,
    which: Which,
    *,
    where: str,
    trusted: bool,
    greedy: bool = True,
    device: str | torch.device = CPU,
) -> Policy:
    """See :func:`rlsync.load_policy`; ``where`` is what errors call the place of ``which``."""
    at = device_named(device, where)
    run = best_agent(run)
    config = config_of(run, trusted)
    trust.check_file(run / BEST, run, trusted)
    acting = acting_of(config, deterministic=greedy)
    trained = _loaded(acting, run, config, which, where=where, trusted=trusted)
    with making(config.env):
        envs = make_venv(acting.env, 1)
    envs.close()
    run_id = ""
    numbers = whole_file.record_in(run / VERSIONS, ledger.Reserved, "the reserved version numbers")
    if numbers is not None:
        run_id = numbers.run_id
    origin = {
        "rlsync": __version__,
        "recipe": config.recipe.name,
        "env": config.env.name,
        "run_id": run_id,
        "config": (run / RESOLVED).read_text(),
    }
    return Policy(acting, trained, envs.actions, greedy=greedy, origin=origin).to(at)


def _loaded(
    acting: CheckpointPlayer, run: Path, config: Config, which: Which, *, where: str, trusted: bool
) -> Trained:
    """Give a player the weights that are asked for, which are the best or those of the checkpoint."""
    best = None
    if which != "last":
        best = best_in(run / BEST, trusted=trusted)
    if which == "best" or (best is not None and best.version == which):
        return load_best(run / BEST, run / RECEIPTS, acting, trusted=trusted)
    if which != "last" and not isinstance(which, int):
        raise ConfigError(
            f"{which!r} names no weights of a run", where, "give best, last or a version"
        )
    trained = load(checkpoint_of(run, None, config, trusted), acting)
    if which not in ("last", trained.version) or (which != "last" and trained.unpublished_steps):
        cure = f"it keeps last: {trained}"
        if best is not None:
            cure += f", best: version {best.version}"
        raise ConfigError(f"the run keeps no weights of version {which}", where, cure)
    return trained
