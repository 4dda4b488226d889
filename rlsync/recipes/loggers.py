"""The logger of a run: TorchRL's, chosen by ``logger.kind``, writing into the run's folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torchrl.checkpoint import Checkpoint
from torchrl.record.loggers import CSVLogger, Logger, TensorboardLogger, WandbLogger

from rlsync.core.errors import ConfigError, first_line
from rlsync.recipes.run_files import CHECKPOINT, METRICS
from rlsync.recipes.settings import Config


def make_logger(config: Config) -> Logger | None:
    """The logger that a config names; None if it names none, or if there is no run folder to write to.

    A Weights & Biases run is also told all other keys, and goes on in place of the run that ``resume`` names.
    ConfigError if the logger refuses its arguments or cannot start: no worker runs yet.

    Example:
        >>> make_logger(Config()) is None
        True
    """
    if config.run_dir is None or config.logger.kind == "none":
        return None
    try:
        return _MAKERS[config.logger.kind](config, config.run_dir)
    except TypeError as error:
        raise ConfigError(
            f"the {config.logger.kind} logger does not take these arguments: {first_line(error)}",
            "logger.kwargs",
            "see the arguments of TorchRL's logger class, and leave the others out",
        ) from error


def _csv(config: Config, run_dir: str) -> Logger:
    return CSVLogger(exp_name=METRICS, log_dir=run_dir, **config.logger.kwargs)


def _tensorboard(config: Config, run_dir: str) -> Logger:
    return TensorboardLogger(exp_name=METRICS, log_dir=run_dir, **config.logger.kwargs)


def _wandb(config: Config, run_dir: str) -> Logger:
    import wandb

    kwargs = {"id": _wandb_id(config.resume), "config": asdict(config)} | dict(config.logger.kwargs)
    try:
        return WandbLogger(exp_name=Path(run_dir).name, log_dir=str(Path(run_dir) / METRICS), **kwargs)
    except wandb.Error as error:
        raise ConfigError(
            f"wandb cannot start: {first_line(error)}",
            "logger.kind",
            "run `wandb login` first, or give logger.kwargs.mode=offline",
        ) from error


_MAKERS: Mapping[str, Callable[[Config, str], Logger]] = {
    "csv": _csv,
    "tensorboard": _tensorboard,
    "wandb": _wandb,
}


class _Saved:
    """Takes a component's state out of a checkpoint."""

    def __init__(self) -> None:
        self.state: Mapping[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.state = state


def _wandb_id(resume: str | None) -> str | None:
    """The id of the Weights & Biases run that wrote the checkpoint to resume from, if one did."""
    if resume is None:
        return None
    places = (Path(resume), Path(resume) / CHECKPOINT)
    found = next((at for at in places if Checkpoint.is_checkpoint(at)), None)
    if found is None or "logger" not in Checkpoint.manifest(found)["components"]:
        return None
    saved = _Saved()
    Checkpoint(logger=saved).load(found, components=["logger"])
    return saved.state.get("local", {}).get("id")
