"""Reads the command line before Hydra does, to tell all that is wrong with it, three lines each."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from hydra import compose
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlsync.cli import job as checking
from rlsync.cli.compose import schema
from rlsync.cli.compose.choices import SEE_ALL, groups
from rlsync.cli.compose.composing import composed, parsed
from rlsync.cli.compose.tuned import told
from rlsync.cli.job import Job
from rlsync.core.errors import ConfigError, RlsyncError, first_line
from rlsync.recipes import registry
from rlsync.recipes.settings import Config

CONFIG_NAME = "train"

_SEARCH_PATH = "hydra.searchpath"
_SWEEP = "hydra.mode=MULTIRUN"


@dataclass(frozen=True, slots=True)
class CommandLine:
    """What Hydra will make of the arguments: the overrides of every job, and its own flags.

    Args:
        overrides: all of them, as Hydra is to read them.
        jobs: the overrides of each job.
        sweeps: whether the jobs are those of a sweep.
        flags: Hydra's flags.
        config_dir: the folder that ``--config-dir`` names.
        errors: what could not be read, and is in no job.
    """

    overrides: tuple[str, ...]
    jobs: tuple[tuple[str, ...], ...]
    sweeps: bool
    flags: Namespace
    config_dir: Path | None = None
    errors: tuple[ConfigError, ...] = ()

    @property
    def config_name(self) -> str:
        """The primary config."""
        return self.flags.config_name or CONFIG_NAME

    @property
    def asks_help(self) -> bool:
        """Whether ``--help`` was given."""
        return bool(self.flags.help)

    @property
    def is_for_hydra(self) -> bool:
        """Whether Hydra alone answers: it prints help or information, reruns a job, or refuses the flags."""
        flags = self.flags
        shows = flags.hydra_help or flags.shell_completion or flags.info or flags.experimental_rerun
        return bool(shows or (flags.cfg and flags.multirun) or (flags.resolve and not flags.cfg))


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
    """Split the arguments like Hydra, and a sweep into its jobs. Registers the types of all recipes.

    The parent of the folder that ``--config-dir`` names goes on ``sys.path``, so that a recipe can lie there.
    """
    flags = get_args_parser().parse_args(arguments)
    errors: list[ConfigError] = []
    own = None if flags.config_dir is None else Path(flags.config_dir).resolve()
    if own is not None and not own.is_dir():
        errors.append(ConfigError(f"no folder {flags.config_dir!r}", "--config-dir", "check the path"))
        own = None
    unusable = schema.register(own)
    with schema.initialised():
        overrides = _read_each(flags.overrides, errors)
        overrides = _with_search_path(overrides, own)
        lines = [str(o.input_line) for o in overrides]
        sweeps = flags.multirun or _SWEEP in lines
        if sweeps and _SWEEP not in lines:
            lines.append(_SWEEP)
        jobs = _swept(overrides, errors) if sweeps else [_single(overrides, errors)]
    chosen = {word.partition("=")[2] for job in jobs for word in job if word.startswith("recipe=")}
    errors += [error for name, error in unusable.items() if name in chosen]
    return CommandLine(tuple(lines), tuple(map(tuple, jobs)), sweeps, flags, own, tuple(errors))


def _read_each(lines: list[str], errors: list[ConfigError]) -> list[Override]:
    read = []
    for line in lines:
        try:
            read.append(parsed(line))
        except ConfigError as error:
            errors.append(error)
    return read


def _with_search_path(overrides: list[Override], own: Path | None) -> list[Override]:
    """The overrides with the folders of the user's and of installed recipes on Hydra's search path."""
    folders = [*([own] if own else []), *registry.installed_config_folders()]
    if not folders:
        return overrides
    given = [o for o in overrides if str(o.key_or_group) == _SEARCH_PATH]
    paths = [str(path) for o in given for path in _as_list(o.value())]
    paths += [f"file://{folder}" for folder in folders]
    quoted = ",".join(f"'{path}'" for path in paths)
    return [*(o for o in overrides if o not in given), parsed(f"{_SEARCH_PATH}=[{quoted}]")]


def _as_list(value: object) -> list[object]:
    return list(value) if isinstance(value, list) else [value]


def _swept(overrides: list[Override], errors: list[ConfigError]) -> list[list[str]]:
    """The jobs of a sweep, with the overrides in the order in which Hydra's sweeper composes them.

    Another sweeper than Hydra's own chooses values as it goes; those stay out.
    """
    hydras = [str(o.input_line) for o in overrides if o.is_hydra_override()]
    if _SWEEP not in hydras:
        hydras.append(_SWEEP)
    task = [o for o in overrides if not o.is_hydra_override()]
    if not any(line.lstrip("+").startswith("hydra/sweeper") for line in hydras):
        try:
            return [[*hydras, *job] for job in BasicSweeper.split_arguments(task, None)[0]]
        except HydraException as error:
            cure = "write key=a,b or key=range(0,3); other sweepers are plugins of Hydra: hydra/sweeper=..."
            errors.append(ConfigError(str(error), "-m", cure))
    return [[*hydras, *(str(o.input_line) for o in task if not o.is_sweep_override())]]


def _single(overrides: list[Override], errors: list[ConfigError]) -> list[str]:
    """The one job; several values for a key are refused."""
    for override in overrides:
        if override.is_sweep_override():
            key, values = override.get_key_element(), override.get_value_string()
            cure = f"add -m to run them all, or write {key}=[{values}] for a list"
            errors.append(ConfigError(f"{key} has several values", f"override {override.input_line}", cure))
    return [str(o.input_line) for o in overrides if not o.is_sweep_override()]


def choices() -> dict[str, list[str]]:
    """Every config group a user may choose from, with its options; installed recipes included."""
    own = [str(o.input_line) for o in _with_search_path([], None)]
    with schema.initialised():
        return groups(CONFIG_NAME, own)


def examined(line: CommandLine) -> tuple[list[Job], list[RlsyncError]]:
    """Compose, type and check the config of every job, without starting a worker.

    Call it where Hydra is initialised.

    Returns:
        The jobs that nothing is wrong with, and the errors; one that several jobs share is told once.
    """
    found: list[Job] = []
    errors: list[RlsyncError] = list(line.errors)
    for words in line.jobs:
        try:
            config, faults = composed(line.config_name, list(words))
            errors += faults
            if config is None:
                continue
            job, wrong = checking.examined(typed(config))
        except ConfigError as missing:
            errors.append(missing)
            continue
        errors += wrong
        if job is not None and not faults:
            whole = compose(line.config_name, list(words), return_hydra_config=True)
            found.append(replace(job, told=told(whole.hydra.runtime.choices, job.config, line.config_dir)))
    errors += _shared_folders(found)
    once: dict[tuple[str, str], RlsyncError] = {}
    for error in errors:
        once.setdefault((error.what, error.cure), error)
    return found, list(once.values())


def _shared_folders(found: list[Job]) -> list[RlsyncError]:
    counts = Counter(job.config.run_dir for job in found if job.config.run_dir is not None)
    return [
        ConfigError(
            f"{count} jobs of the sweep would write to the folder {folder}",
            f"run_dir={folder}",
            f"leave it out, or write hydra.sweep.dir={folder}: each job gets a folder of its own in there",
        )
        for folder, count in counts.items()
        if count > 1
    ]


def jobs(line: CommandLine) -> list[Job]:
    """Every job of a command line, checked. Call it where Hydra is initialised.

    Raises:
        ConfigError: names the key, group, option or value that is wrong; or all of them.
    """
    found, errors = examined(line)
    if errors:
        raise errors[0] if len(errors) == 1 else ManyErrors(errors)
    return found


def configs(line: CommandLine) -> list[Config]:
    """The config of every job.

    Raises:
        ConfigError: names the key, group, option or value that is wrong; or all of them.
    """
    with schema.initialised(line.flags.config_path):
        return [job.config for job in jobs(line)]


def typed(composed: DictConfig) -> Config:
    """The dataclasses in a config that Hydra composed. Values are not checked against their bounds.

    Raises:
        ConfigError: a value is missing, or of the wrong type.
    """
    try:
        config = OmegaConf.to_object(composed)
    except OmegaConfBaseException as error:
        where = error.full_key or "the configuration"
        raise ConfigError(first_line(error), where, SEE_ALL) from error
    assert isinstance(config, Config)
    return config
