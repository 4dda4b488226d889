"""Reads the command line before Hydra does, to refuse a bad key or value in three lines."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from rlsync.cli import schema
from rlsync.core.errors import ConfigError
from rlsync.recipes.config import Config, check

CONFIG_NAME = "train"
FREE_FORM = "env.kwargs."
_SEE_ALL = "rlsync train --cfg job prints all keys"


@dataclass(frozen=True, slots=True)
class CommandLine:
    """What Hydra will make of the arguments: the overrides of every job, and its own flags."""

    jobs: tuple[tuple[str, ...], ...]
    only_shows: bool
    asks_help: bool
    config_name: str


def read(arguments: list[str]) -> CommandLine:
    """Split the arguments like Hydra, and a sweep into its jobs.

    Raises:
        ConfigError: an override is not written in Hydra's grammar.
    """
    flags = get_args_parser().parse_args(arguments)
    shows = bool(flags.hydra_help or flags.shell_completion or flags.info)
    overrides = list(flags.overrides)
    if flags.config_dir is not None:
        overrides.append(f"hydra.searchpath=[file://{Path(flags.config_dir).resolve()}]")
    sweeps = flags.multirun or "hydra.mode=MULTIRUN" in overrides
    # Another sweeper chooses values as it goes; only Hydra's own can be spelled out beforehand.
    spelled = sweeps and not any(o.lstrip("+").startswith("hydra/sweeper") for o in overrides)
    parsed = _parse(overrides)
    if spelled:
        jobs = BasicSweeper.split_arguments(parsed, None)[0]
    elif sweeps:
        jobs = [[o.input_line or "" for o in parsed if not o.is_sweep_override()]]
    else:
        _refuse_sweep(parsed)
        jobs = [overrides]
    return CommandLine(tuple(map(tuple, jobs)), shows, bool(flags.help), flags.config_name or CONFIG_NAME)


def _refuse_sweep(parsed: list[Override]) -> None:
    for override in parsed:
        if override.is_sweep_override():
            key, values = override.get_key_element(), override.get_value_string()
            raise ConfigError(
                f"{key} has several values",
                f"override {override.input_line}",
                f"add -m to run them all, or write {key}=[{values}] for a list",
            )


def choices() -> dict[str, list[str]]:
    """Every config group a user may choose from, with its options."""
    with initialize_config_dir(str(schema.config_dir()), version_base="1.3"):
        return _groups()


def configs(line: CommandLine) -> list[Config]:
    """Compose, type and check the config of every job.

    Raises:
        ConfigError: names the key, group, option or value that is wrong.
    """
    with initialize_config_dir(str(schema.config_dir()), version_base="1.3"):
        return [_one_config(line.config_name, list(job)) for job in line.jobs]


def to_config(composed: DictConfig) -> Config:
    """The typed and checked config in one that Hydra composed.

    Raises:
        ConfigError: a value is missing, of the wrong type, or out of bounds.
    """
    try:
        config = OmegaConf.to_object(composed)
    except OmegaConfBaseException as error:
        where = error.full_key or "the configuration"
        raise ConfigError(_first_line(error), where, _SEE_ALL) from error
    assert isinstance(config, Config)
    return check(config)


def _one_config(config_name: str, job: list[str]) -> Config:
    overrides = [o for o in _parse(job) if not o.is_hydra_override()]
    groups = _groups()
    chosen = [o for o in overrides if _group_of(o) in groups]
    for override in chosen:
        _check_option(override, groups)
    kept = [o for o in job if _parse([o])[0].is_hydra_override()]
    keys = set(_keys(compose(config_name, [*kept, *(str(o.input_line) for o in chosen)])))
    for override in overrides:
        if override not in chosen:
            _check_key(override, keys, groups)
    try:
        composed = compose(config_name, job)
    except (HydraException, OmegaConfBaseException) as error:
        raise _refused(error, overrides) from error
    return to_config(composed)


def _parse(overrides: list[str]) -> list[Override]:
    try:
        return list(OverridesParser.create().parse_overrides(overrides))
    except HydraException as error:
        raise ConfigError(
            "cannot read an override",
            _first_line(error),
            "write key=value; quote what the shell or Hydra would split: 'key=\"a, b\"'",
        ) from error


def _groups() -> dict[str, list[str]]:
    loader = GlobalHydra.instance().config_loader()
    found = loader.list_groups("")
    groups = {g: loader.get_group_options(g, ObjectType.CONFIG) for g in found}
    return {g: o for g, o in groups.items() if g not in ("hydra", schema.SCHEMA)}


def _group_of(override: Override) -> str:
    return str(override.key_or_group)


def _check_option(override: Override, groups: dict[str, list[str]]) -> None:
    group = _group_of(override)
    option, offered = override.value(), groups[group]
    if override.is_delete() or option is None or option in offered:
        return
    raise ConfigError(
        f"no {group} {option!r}",
        f"override {override.input_line}",
        f"{_did_you_mean(nearest(str(option), offered))}{group} is one of {', '.join(offered)}",
    )


def _check_key(override: Override, keys: set[str], groups: dict[str, list[str]]) -> None:
    key = _group_of(override)
    if key in keys or (key.startswith(FREE_FORM) and override.is_add()):
        return
    if key.startswith(FREE_FORM):
        cure = f"{key} is an argument for gymnasium: write +{key}=..."
    else:
        cure = _did_you_mean(nearest(key, [*sorted(keys), *groups])) + _beside(key, keys)
    raise ConfigError(f"unknown key {key!r}", f"override {override.input_line}", cure)


def _beside(key: str, keys: set[str]) -> str:
    parent = key.rpartition(".")[0]
    split = (name.rpartition(".") for name in sorted(keys))
    names = [last for other, _, last in split if parent and other == parent]
    return f"{parent} has: {', '.join(names)}" if names else _SEE_ALL


def _keys(node: DictConfig, prefix: str = "") -> Iterator[str]:
    for name in map(str, node):
        key = prefix + name
        yield key
        if not OmegaConf.is_missing(node, name) and OmegaConf.is_dict(node[name]):
            yield from _keys(node[name], key + ".")


def nearest(wanted: str, offered: Iterable[str]) -> str:
    """The offered dotted name whose last part is closest to that of ``wanted``; or nothing.

    A name that was put under another parent must be closer than one that was not.

    Example:
        >>> nearest("num_epoch", ["recipe.lr", "recipe.num_epochs"])
        'recipe.num_epochs'
    """
    parent, _, last = wanted.rpartition(".")

    def closeness(name: str) -> float:
        other, _, end = name.rpartition(".")
        ratio = difflib.SequenceMatcher(None, last, end).ratio()
        needed = 0.6 if parent in ("", other) else 0.85
        return ratio + (parent == other) / 10 if ratio >= needed else 0.0

    best = max(offered, key=closeness, default="")
    return best if best and closeness(best) else ""


def _did_you_mean(name: str) -> str:
    return f"did you mean {name!r}? " if name else ""


def _refused(error: Exception, overrides: list[Override]) -> ConfigError:
    """Hydra wraps what OmegaConf said; the inner error says what is wrong with the value."""
    inner: Any = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    written = [str(o.input_line) for o in overrides]
    guilty = [line for line in written if line in str(error)] or written
    cure = _SEE_ALL
    if isinstance(inner, ConfigKeyError) and is_dataclass(inner.object_type):
        names = [spec.name for spec in fields(inner.object_type)]
        cure = f"{_did_you_mean(nearest(str(inner.key), names))}keys: {', '.join(names)}"
    return ConfigError(_first_line(inner), f"override {' '.join(guilty)}", cure)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
