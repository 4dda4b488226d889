"""Reads the command line before Hydra does: its flags, its overrides, and the jobs of a sweep."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import hydra
from hydra.core.override_parser.types import ChoiceSweep, Glob, Override, RangeSweep

from rlsync import ConfigError
from rlsync.runs.config import own_hydra, trust
from rlsync.runs.config.refusals import key_of, parsed, word_of
from rlsync.runs.recipes import registry
from rlsync.seams import user_input

_SEARCH_PATH = "hydra.searchpath"
_SWEEP = "hydra.mode=MULTIRUN"

#: What Hydra does not know.
_OWN_FLAGS = (trust.FLAG, "--json")


@dataclass(frozen=True, slots=True)
class CommandLine:
    overrides: tuple[str, ...]  # all of them, as Hydra is to read them
    # a job each; of a sweeper that chooses values as it goes one, with the first value of each
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
    def words(self) -> list[str]:
        """The command line once more, for another process, its options first; who asks for JSON prints it."""
        words = [*self.flag_words, *self.flags.overrides]
        if self.trusted:
            words.append(trust.FLAG)
        return words

    @property
    def config_name(self) -> str:
        return self.flags.config_name or own_hydra.CONFIG_NAME

    @property
    def is_for_hydra(self) -> bool:
        """Whether Hydra alone answers: it prints help or information, or refuses the flags."""
        flags = self.flags
        shows = flags.hydra_help or flags.shell_completion or flags.info
        runs = flags.multirun or flags.run
        return bool(shows or (flags.cfg and runs) or (flags.resolve and not flags.cfg))


def read(arguments: list[str]) -> CommandLine:
    """Split the arguments like Hydra, and a sweep into its jobs; own recipes can then be imported."""
    flags, unknown = _parser().parse_known_intermixed_args(arguments)
    if unknown:
        raise _no_option(unknown[0])
    errors: list[ConfigError] = []
    config_dir = None
    if flags.config_dir is not None:
        config_dir = Path(flags.config_dir).resolve()
        if not config_dir.is_dir():
            problem = f"no folder {flags.config_dir!r}"
            errors.append(ConfigError(problem, "--config-dir", "check the path"))
            config_dir = None

    unusable = own_hydra.register(config_dir)
    with own_hydra.initialised():
        overrides = []
        for word in flags.overrides:
            try:
                overrides.append(parsed(word))
            except ConfigError as error:
                errors.append(error)
        overrides = _with_search_path(overrides, config_dir)
        sweeps = flags.multirun or _SWEEP in map(word_of, overrides)
        if sweeps:
            hydras = [word_of(override) for override in overrides if override.is_hydra_override()]
            overrides = [_listed(override, hydras) for override in overrides]
            jobs = _swept(overrides, errors)
        else:
            jobs = [_single(overrides, errors)]
    return CommandLine(
        overrides=tuple(map(word_of, overrides)),
        jobs=tuple(map(tuple, jobs)),
        sweeps=sweeps,
        flags=flags,
        flag_words=tuple(w for w in arguments if w not in (*flags.overrides, *_OWN_FLAGS)),
        config_dir=config_dir,
        errors=tuple(errors),
        unusable=unusable,
        trusted=flags.trust,
    )


def _no_option(word: str) -> ConfigError:
    """The error for a word with a dash that is no option: an option mistyped, or a key."""
    option = word.partition("=")[0]
    bare = word.lstrip("-")
    if bare.partition("=")[0] in {spec.name for spec in fields(own_hydra.settings.Config)}:
        near = ""
    else:
        near = user_input.nearest_name(option, _parser()._option_string_actions)
    if "=" not in bare:
        bare += "=..."
    cure = user_input.did_you_mean(near) or f"keys have no dashes: {bare}"
    return ConfigError(f"no option {option!r}", "the command line", cure)


def _parser() -> argparse.ArgumentParser:
    """Hydra's own flags, as ``--hydra-help`` lists them; Hydra reads them once more. And rlsync's."""
    parser = argparse.ArgumentParser(prog="rlsync train", add_help=False)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--version", action="version", version=f"Hydra {hydra.__version__}")
    short = ("--help -h", "--run -r", "--multirun -m", "--shell-completion -sc")
    for names in (*short, "--hydra-help", "--resolve", *_OWN_FLAGS):
        parser.add_argument(*names.split(), action="store_true")
    values = ("--package -p", "--config-path -cp", "--config-name -cn", "--config-dir -cd")
    for names in (*values, "--experimental-rerun"):
        parser.add_argument(*names.split())
    parser.add_argument("--cfg", "-c", choices=["job", "hydra", "all"])
    parser.add_argument("--info", "-i", nargs="?", const="all")
    return parser


def _with_search_path(overrides: list[Override], config_dir: Path | None) -> list[Override]:
    """The overrides with the folders of the user's and of installed recipes on Hydra's search path."""
    folders = list(registry.installed_config_folders())
    if config_dir is not None:
        folders = [config_dir, *folders]
    if not folders:
        return overrides
    paths: list[str] = []
    others = []
    for override in overrides:
        if key_of(override) != _SEARCH_PATH:
            others.append(override)
            continue
        value = override.value()
        if isinstance(value, list):
            paths += map(str, value)
        else:
            paths.append(str(value))
    paths += map("file://{}".format, folders)
    quoted = ",".join(map("'{}'".format, paths))
    return [*others, parsed(f"{_SEARCH_PATH}=[{quoted}]")]


def _listed(override: Override, hydras: list[str]) -> Override:
    """A sweep with its values one by one, where Hydra would shuffle them once more, or find other options."""
    value: Any = override.value()
    if isinstance(value, Glob):
        options = own_hydra.options(key_of(override), own_hydra.CONFIG_NAME, hydras)
        values = value.filter(options)
    elif isinstance(value, ChoiceSweep | RangeSweep) and value.shuffle:
        values = list(override.sweep_string_iterator())
    else:
        return override
    if override.is_hydra_override() or not values:
        return override
    return parsed(f"{override.get_key_element()}={','.join(values)}")


def _swept(overrides: list[Override], errors: list[ConfigError]) -> list[list[str]]:
    """The jobs of a sweep, in the order of Hydra's own sweeper; another sweeper chooses values as it goes."""
    hydras = []  # the words for Hydra itself
    unswept = []
    unlisted = []  # that sweep over values which cannot be listed
    firsts = []  # each key that is swept, with its first value
    values = {}  # a key that is given twice has its last values, at its first place
    goes_on = False
    for override in overrides:
        word = word_of(override)
        if override.is_hydra_override():
            hydras.append(word)
            chooses_sweeper = key_of(override) == own_hydra.SWEEPER
            goes_on |= chooses_sweeper and override.value() not in own_hydra.BASIC
            continue
        values[override.get_key_element()] = values_of(override)
        if not override.is_sweep_override():
            unswept.append(word)
        elif not override.is_discrete_sweep():
            unlisted.append(word)
            firsts.append(_first_of(override))
        else:
            firsts.append(values[override.get_key_element()][0])

    if not unlisted and not goes_on:
        return [[*hydras, *job] for job in itertools.product(*values.values())]
    if not goes_on:
        problem = f"Hydra's own sweeper cannot list the values of {unlisted[0]}"
        cure = "write key=a,b or key=range(0,3); other sweepers are plugins of Hydra: hydra/sweeper=..."
        errors.append(ConfigError(problem, "-m", cure))
    return [[*hydras, *unswept, *firsts]]


def _first_of(override: Override) -> str:
    """An override with a value within its interval to check its key by; its ends may be out of bounds."""
    interval: Any = override.value()
    middle = (interval.start + interval.end) / 2
    if isinstance(interval.start, int) and isinstance(interval.end, int):
        middle = (interval.start + interval.end) // 2
    return f"{override.get_key_element()}={middle}"


def values_of(override: Override) -> list[str]:
    """An override once for each value that it takes in a sweep."""
    if not override.is_discrete_sweep():
        return [word_of(override)]
    return [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]


def _single(overrides: list[Override], errors: list[ConfigError]) -> list[str]:
    words = []
    for override in overrides:
        word = word_of(override)
        if override.is_sweep_override():
            key = override.get_key_element()
            values = override.get_value_string()
            cure = f"add -m to run them all, or write {key}=[{values}] for a list"
            errors.append(ConfigError(f"{key} has several values", f"override {word}", cure))
        else:
            words.append(word)
    return words


def choices() -> dict[str, list[str]]:
    """Every config group a user may choose from, with its options; installed recipes included."""
    own_hydra.register()
    with own_hydra.initialised():
        words = list(map(word_of, _with_search_path([], None)))
        groups = own_hydra.group_names()
        return {group: own_hydra.options(group, own_hydra.CONFIG_NAME, words) for group in groups}
