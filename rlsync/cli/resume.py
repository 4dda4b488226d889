"""Resume from a checkpoint."""

from __future__ import annotations

from pathlib import Path

from omegaconf import OmegaConf
from torchrl.checkpoint import Checkpoint, CheckpointError
from torchrl.trainers import Trainer

from rlsync.core.errors import ConfigError, first_line
from rlsync.recipes.config import Config
from rlsync.recipes.run_files import CHECKPOINT, RESOLVED


def checkpoint_at(folder: Path) -> Path | None:
    """The checkpoint that a folder is, or that lies in it as in a run's; None if there is none."""
    return next((at for at in (folder, folder / CHECKPOINT) if Checkpoint.is_checkpoint(at)), None)


def checkpoint_in(path: str, config: Config) -> Path:
    """The checkpoint that ``resume=path`` means: ``path`` itself, or the one in that run folder.

    Raises:
        ConfigError: there is none, or the run it belongs to had another recipe.
    """
    folder = Path(path)
    found = checkpoint_at(folder)
    if found is not None:
        _same_recipe(found.parent / RESOLVED, config)
        return found
    said = "holds no checkpoint" if folder.is_dir() else "does not exist"
    raise ConfigError(
        f"cannot resume: {path!r} {said}",
        f"resume={path}",
        f"give a run folder that has a {CHECKPOINT}/ in it, or the checkpoint folder itself",
    )


def _same_recipe(resolved: Path, config: Config) -> None:
    if not resolved.is_file():
        return
    before = OmegaConf.select(OmegaConf.load(resolved), "recipe.name")
    if before not in (None, config.recipe.name):
        raise ConfigError(
            f"cannot resume a run of {before!r} with the recipe {config.recipe.name!r}",
            f"resume={config.resume}",
            f"add recipe={before}",
        )


def load(trainer: Trainer, checkpoint: Path) -> None:
    """Load a checkpoint into the trainer.

    Raises:
        ConfigError: the checkpoint does not fit the trainer.
    """
    try:
        trainer.load_from_file(checkpoint)
    except (CheckpointError, RuntimeError, KeyError, ValueError) as error:
        first = first_line(error)
        raise ConfigError(
            f"the checkpoint does not fit this configuration: {first}",
            str(checkpoint),
            f"repeat the overrides of the first run; its {RESOLVED} has them all",
        ) from error
