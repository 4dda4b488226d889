"""Reads the command line before Hydra does, to tell all that is wrong with it, three lines each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlsync.cli import recipes, schema
from rlsync.cli.choices import SEE_ALL, groups
from rlsync.cli.compose import composed, parsed
from rlsync.core.errors import ConfigError, RlsyncError, first_line
from rlsync.recipes.config import Config, check

CONFIG_NAME = "train"


@dataclass(frozen=True, slots=True)
class CommandLine:
    """What Hydra will make of the arguments: the overrides of every job, and its own flags.

    Args:
        jobs: the overrides of each.
        only_shows: nothing will run.
        asks_help: ``--help`` was given.
        config_name: the primary config.
        errors: what could not be read, and is in no job.
    """

    jobs: tuple[tuple[str, ...], ...]
    only_shows: bool
    asks_help: bool
    config_name: str
    errors: tuple[ConfigError, ...] = ()


class ManyErrors(ConfigError):
    """Several errors at once, three lines each.

    Args:
        errors: at least one.
    """

    def __init__(self, errors: list[RlsyncError]) -> None:
        first = errors[0]
        super().__init__(first.what, first.where, first.cure)
        self.errors = errors

    def __str__(self) -> str:
        return "\n".join(map(str, self.errors))


def read(arguments: list[str]) -> CommandLine:
    """Split the arguments like Hydra, and a sweep into its jobs."""
    flags = get_args_parser().parse_args(arguments)
    shows = bool(flags.hydra_help or flags.shell_completion or flags.info)
    errors: list[ConfigError] = []
    lines = list(flags.overrides)
    if flags.config_dir is not None:
        folder = Path(flags.config_dir).resolve()
        if folder.is_dir():
            lines.append(f"hydra.searchpath=['file://{folder}']")
        else:
            errors.append(ConfigError(f"no folder {flags.config_dir!r}", "--config-dir", "check the path"))
    sweeps = flags.multirun or "hydra.mode=MULTIRUN" in lines
    with schema.initialised():
        overrides = _read_each(lines, errors)
        jobs = _swept(overrides, errors) if sweeps else [_single(overrides, errors)]
    name = flags.config_name or CONFIG_NAME
    return CommandLine(tuple(map(tuple, jobs)), shows, bool(flags.help), name, tuple(errors))


def _read_each(lines: list[str], errors: list[ConfigError]) -> list[Override]:
    read = []
    for line in lines:
        try:
            read.append(parsed(line))
        except ConfigError as error:
            errors.append(error)
    return read


def _swept(overrides: list[Override], errors: list[ConfigError]) -> list[list[str]]:
    """The jobs of a sweep: another sweeper than Hydra's own chooses values as it goes; those stay out."""
    if not any(str(o.input_line).lstrip("+").startswith("hydra/sweeper") for o in overrides):
        try:
            return list(BasicSweeper.split_arguments(overrides, None)[0])
        except HydraException as error:
            cure = "write key=a,b or key=range(0,3); other sweepers are plugins of Hydra: hydra/sweeper=..."
            errors.append(ConfigError(str(error), "-m", cure))
    return [[str(o.input_line) for o in overrides if not o.is_sweep_override()]]


def _single(overrides: list[Override], errors: list[ConfigError]) -> list[str]:
    """The one job; several values for a key are refused."""
    for override in overrides:
        if override.is_sweep_override():
            key, values = override.get_key_element(), override.get_value_string()
            cure = f"add -m to run them all, or write {key}=[{values}] for a list"
            errors.append(ConfigError(f"{key} has several values", f"override {override.input_line}", cure))
    return [str(o.input_line) for o in overrides if not o.is_sweep_override()]


def choices() -> dict[str, list[str]]:
    """Every config group a user may choose from, with its options."""
    with schema.initialised():
        return groups(CONFIG_NAME, [])


def examined(line: CommandLine) -> tuple[list[Config], list[RlsyncError]]:
    """Compose, type and check the config of every job, without starting a worker.

    Returns:
        The configs, as they would be without the errors, and the errors; a sweep's are told once.
    """
    found: list[Config] = []
    errors: list[RlsyncError] = list(line.errors)
    with schema.initialised():
        for job in line.jobs:
            config, faults = composed(line.config_name, list(job))
            errors += faults
            if config is None:
                continue
            try:
                found.append(_typed(config))
            except ConfigError as missing:
                errors.append(missing)
            else:
                errors += recipes.errors(found[-1])
    told: dict[tuple[str, str], RlsyncError] = {}
    for error in errors:
        told.setdefault((error.what, error.cure), error)
    return found, list(told.values())


def configs(line: CommandLine) -> list[Config]:
    """The config of every job.

    Raises:
        ConfigError: names the key, group, option or value that is wrong; or all of them.
    """
    found, errors = examined(line)
    if errors:
        raise errors[0] if len(errors) == 1 else ManyErrors(errors)
    return found


def to_config(config: DictConfig) -> Config:
    """The typed and checked config in one that Hydra composed.

    Raises:
        ConfigError: a value is missing, of the wrong type, or out of bounds.
    """
    return check(_typed(config))


def _typed(composed: DictConfig) -> Config:
    try:
        config = OmegaConf.to_object(composed)
    except OmegaConfBaseException as error:
        where = error.full_key or "the configuration"
        raise ConfigError(first_line(error), where, SEE_ALL) from error
    assert isinstance(config, Config)
    return config
