"""Reads the command line before Hydra does: its flags, its overrides, and the jobs of a sweep."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

import hydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override

from rlsync import ConfigError
from rlsync.runs.config import own_hydra, trust
from rlsync.runs.config.refusals import parsed
from rlsync.runs.recipes import registry
from rlsync.seams import user_input

_SEARCH_PATH = "hydra.searchpath"
_SWEEP = "hydra.mode=MULTIRUN"


@dataclass(frozen=True, slots=True)
class CommandLine:
    overrides: tuple[str, ...]  # all of them, as Hydra is to read them
    # a job each; a sweeper that chooses values as it goes has one, without those values
    jobs: tuple[tuple[str, ...], ...]
    sweeps: bool  # whether the jobs are those of a sweep
    flags: argparse.Namespace  # Hydra's own
    flag_words: tuple[str, ...] = ()  # Hydra's flags as they were written
    config_dir: Path | None = None  # what --config-dir names
    errors: tuple[ConfigError, ...] = ()  # what could not be read, and is in no job
    unusable: Mapping[str, ConfigError] = field(default_factory=dict)  # recipes that cannot be had
    trusted: bool = False  # whether unchecked checkpoints, and code of a run folder, are loaded
    # where it was read: what its relative paths mean, whatever changes the working directory later
    folder: Path = field(default_factory=Path.cwd)

    @property
    def config_name(self) -> str:
        return self.flags.config_name or own_hydra.CONFIG_NAME

    @property
    def is_for_hydra(self) -> bool:
        """Whether Hydra alone answers: it prints help or information, reruns a job, or refuses the flags."""
        flags = self.flags
        shows = flags.hydra_help or flags.shell_completion or flags.info or flags.experimental_rerun
        return bool(shows or (flags.cfg and flags.multirun) or (flags.resolve and not flags.cfg))


def read(arguments: list[str]) -> CommandLine:
    """Split the arguments like Hydra, and a sweep into its jobs; own recipes can then be imported."""
    parser = _parser()
    flags, unknown = parser.parse_known_intermixed_args(arguments)
    if unknown:
        option = unknown[0].partition("=")[0]
        bare = unknown[0].lstrip("-")
        near = user_input.nearest_name(
            option, (name for action in parser._actions for name in action.option_strings)
        )
        if bare.partition("=")[0] in {each.name for each in fields(own_hydra.settings.Config)}:
            near = ""
        cure = (
            user_input.did_you_mean(near)
            or f"keys have no dashes: {bare if '=' in bare else f'{bare}=...'}"
        )
        raise ConfigError(f"no option {option!r}", "the command line", cure)
    errors: list[ConfigError] = []
    own = None if flags.config_dir is None else Path(flags.config_dir).resolve()
    if own is not None and not own.is_dir():
        errors.append(
            ConfigError(f"no folder {flags.config_dir!r}", "--config-dir", "check the path")
        )
        own = None
    unusable = own_hydra.register(own)
    with own_hydra.initialised():
        overrides = []
        for word in flags.overrides:
            try:
                overrides.append(parsed(word))
            except ConfigError as error:
                errors.append(error)
        overrides = _with_search_path(overrides, own)
        words = [str(o.input_line) for o in overrides]
        sweeps = flags.multirun or _SWEEP in words
        if sweeps:
            jobs = _swept(overrides, errors)
        else:
            jobs = [_single(overrides, errors)]
    flag_words = tuple(word for word in arguments if word not in (*flags.overrides, trust.FLAG))
    all_jobs = tuple(map(tuple, jobs))
    found = (tuple(words), all_jobs, sweeps, flags, flag_words, own, tuple(errors))
    return CommandLine(*found, unusable, flags.trust)


def _parser() -> argparse.ArgumentParser:
    """Hydra's own flags, as ``--hydra-help`` lists them; Hydra reads them once more. And ``--trust``."""
    parser = argparse.ArgumentParser(prog="rlsync train", add_help=False)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--version", action="version", version=f"Hydra {hydra.__version__}")
    short = ("--help -h", "--run -r", "--multirun -m", "--shell-completion -sc")
    for names in (*short, "--hydra-help", "--resolve", trust.FLAG):
        parser.add_argument(*names.split(), action="store_true")
    values = ("--package -p", "--config-path -cp", "--config-name -cn", "--config-dir -cd")
    for names in (*values, "--experimental-rerun"):
        parser.add_argument(*names.split())
    parser.add_argument("--cfg", "-c", choices=["job", "hydra", "all"])
    parser.add_argument("--info", "-i", nargs="?", const="all")
    return parser


def _with_search_path(overrides: list[Override], own: Path | None) -> list[Override]:
    """The overrides with the folders of the user's and of installed recipes on Hydra's search path."""
    folders = [*([own] if own else []), *registry.installed_config_folders()]
    if not folders:
        return overrides
    given = [o for o in overrides if str(o.key_or_group) == _SEARCH_PATH]
    values = [o.value() for o in given]
    paths = [
        str(path) for value in values for path in (value if isinstance(value, list) else [value])
    ]
    paths += [f"file://{folder}" for folder in folders]
    quoted = ",".join(f"'{path}'" for path in paths)
    return [*(o for o in overrides if o not in given), parsed(f"{_SEARCH_PATH}=[{quoted}]")]


def _swept(overrides: list[Override], errors: list[ConfigError]) -> list[list[str]]:
    """The jobs of a sweep, in the order of Hydra's own sweeper; another sweeper chooses values as it goes."""
    hydras = [str(o.input_line) for o in overrides if o.is_hydra_override()]
    task = [o for o in overrides if not o.is_hydra_override()]
    unknown = [o for o in task if o.is_sweep_override() and not o.is_discrete_sweep()]
    goes_on = any(line.lstrip("+").startswith("hydra/sweeper") for line in hydras)
    if not unknown and not goes_on:
        return [[*hydras, *job] for job in itertools.product(*map(values_of, task))]
    if not goes_on:
        problem = f"Hydra's own sweeper cannot list the values of {unknown[0].input_line}"
        cure = "write key=a,b or key=range(0,3); other sweepers are plugins of Hydra: hydra/sweeper=..."
        errors.append(ConfigError(problem, "-m", cure))
    return [[*hydras, *(str(o.input_line) for o in task if not o.is_sweep_override())]]


def values_of(override: Override) -> list[str]:
    """An override once for each value that it takes in a sweep."""
    if not override.is_discrete_sweep():
        return [str(override.input_line)]
    return [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]


def spelled(word: str) -> str:
    """An override as Hydra's sweeper spells it. Where Hydra is not initialised, too."""
    override = OverridesParser.create().parse_override(word)
    return f"{override.get_key_element()}={override.get_value_element_as_str()}"


def _single(overrides: list[Override], errors: list[ConfigError]) -> list[str]:
    for override in overrides:
        if override.is_sweep_override():
            key = override.get_key_element()
            values = override.get_value_string()
            cure = f"add -m to run them all, or write {key}=[{values}] for a list"
            errors.append(
                ConfigError(f"{key} has several values", f"override {override.input_line}", cure)
            )
    return [str(o.input_line) for o in overrides if not o.is_sweep_override()]


def choices() -> dict[str, list[str]]:
    """Every config group a user may choose from, with its options; installed recipes included."""
    own_hydra.register()
    with own_hydra.initialised():
        own = [str(o.input_line) for o in _with_search_path([], None)]
        groups = own_hydra.group_names()
        return {group: own_hydra.options(group, own_hydra.CONFIG_NAME, own) for group in groups}
