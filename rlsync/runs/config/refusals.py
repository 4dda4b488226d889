"""What is wrong with the overrides of a job, in three lines each, with the nearest name that there is."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException
from yaml import YAMLError

from rlsync import ConfigError
from rlsync.runs.config.shipped import ENV, RECIPE
from rlsync.runs.recipes import registry
from rlsync.seams import causes, first_line, user_input

SEE_ALL = "rlsync train --cfg job prints all keys"

#: The arguments of gymnasium.make and of TorchRL's loggers stand here, and a cluster's resources. No schema
#: knows their names.
FREE_FORM = ("env.kwargs", "logger.kwargs", "cluster.resources")

#: What a group does not offer is given by a key.
_BY_KEY = {
    ENV: "an environment by its id write env.id",
    "logger": "a logger of a package write logger.kind",
}

_LAGS = (
    "give collector.lag=0, with which workers wait for each update (sync), collector.lag=null, with which "
    "nobody waits (async), or collector.num_workers=0, with which the learner's own process acts (in_process)"
)

_OPEN_LOOP = (
    "leave it out: examples/dreamer_open_loop.py shows what the model of a finished run imagines"
)

#: What a habit types that rlsync has no longer, a key or a choice; and what to give in its place.
GONE = {
    "collector.kind": _LAGS,
    "collector=sync": "give collector.lag=0: workers wait for each update",
    "collector=async": "give collector.lag=null: workers act with whatever is the newest, and nobody waits",
    "collector=in_process": "give collector.num_workers=0: the learner's own process acts",
    "collector.transport": "leave it out: workers of recipes read a board; in a program of yours, "
    "rlsync.BoardScheme(transport=NAME) takes the transport of an installed package",
    "cluster.keep_agents": "leave it out: agents end with their learner, and a resumed run starts its own",
    "cluster.learner_timeout_s": "leave it out: agents end with their learner",
    "recipe.model.normalize": "give recipe.normalize.observations, which normalises numbers, too",
    "recipe.open_loop": _OPEN_LOOP,
    "recipe.open_loop.every_frames": _OPEN_LOOP,
    "recipe.open_loop.seen": _OPEN_LOOP,
    "recipe.open_loop.ahead": _OPEN_LOOP,
    "sync=actor_behind_noise": "give sync=actor: workers of td3 add the noise themselves",
}

_A_MAP = (
    "an entry of the sync map goes by its number, sync.map.0.source=PATH; or give all, quoted for the shell: "
    "'sync.map=[{destination:policy,source:PATH}]'"
)

_IN_FILE = re.compile(r"In '(?P<file>[^']+)': ")


def parsed(line: str) -> Override:
    """One override, read like Hydra reads it; only where Hydra is initialised."""
    try:
        override = OverridesParser.create().parse_override(line)
    except HydraException as error:
        cure = "write key=value; quote what the shell or Hydra would split: 'key=\"a, b\"'"
        if "[" in line.partition("=")[0]:
            cure = "write key=value; an entry of a list goes by its number: sync.map.0.source=..."
        if "=" in line:
            problem = f"cannot read an override: {first_line(error)}"
        else:
            problem = "cannot read an override: it has no ="
        raise ConfigError(problem, f"override {line}", cure) from error
    override.config_loader = GlobalHydra.instance().config_loader()  # for glob()
    return override


def key_of(override: Override) -> str:
    return str(override.key_or_group)


def word_of(override: Override) -> str:
    """An override as it was written."""
    return str(override.input_line)


def of_option(
    override: Override, offers: list[str], bad: Mapping[str, ConfigError]
) -> Iterator[ConfigError]:
    """What is wrong with an override that chooses an option, or a ``bad`` recipe; Hydra ignores some."""
    group = key_of(override)
    option = str(override.value())
    line = word_of(override)
    if override.is_delete():
        if group == RECIPE:
            yield ConfigError(
                f"{group} cannot be left out", f"override {line}", f"choose one; {SEE_ALL}"
            )
    elif group == RECIPE and option in bad:
        yield bad[option]
    elif group == RECIPE and option not in offers and (point := registry.installed().get(option)):
        module = point.module.partition(".")[0]
        cure = f"add it beside {module}/__init__.py, where the package ships it too"
        where = f"the entry point {option} = {point.value}"
        yield ConfigError(
            f"the recipe has no file {module}/configs/recipe/{option}.yaml", where, cure
        )
    elif option not in offers:
        cure = user_input.did_you_mean(nearest(option, offers))
        if group in _BY_KEY:
            cure += f"for {_BY_KEY[group]}={option}; "
        cure += f"{group} is one of {', '.join(offers)}"
        cure = GONE.get(f"{group}={option}", cure)
        yield ConfigError(f"no {group} {option!r}", f"override {line}", cure)
    elif override.is_add():
        yield ConfigError(
            f"{group} has a choice already", f"override {line}", f"write {line.lstrip('+')}"
        )


def of_key(override: Override, known: list[str], groups: Collection[str]) -> Iterator[ConfigError]:
    """What is wrong with the key that an override names, where ``known`` are all keys that there are."""
    key = key_of(override)
    line = word_of(override)
    adds = override.is_add() or override.is_force_add()
    where = f"override {line}"
    below_free = key.startswith(tuple(f"{above}." for above in FREE_FORM))
    if below_free or (key in FREE_FORM and override.value()):
        if not adds and (key in FREE_FORM or key not in known):
            if key in FREE_FORM:
                problem = f"{key} is empty"
            else:
                problem = f"unknown key {key!r}"
            near = user_input.did_you_mean(nearest(key, known))
            yield ConfigError(
                problem, where, f"{near}an argument that is new here is added: write +{line}"
            )
    elif above := _list_above(key, known):
        yield ConfigError(f"unknown key {key!r}", where, _all_entries(f"{above}.0"))
    elif key not in known:
        near = user_input.did_you_mean(nearest(key, [*known, *groups]))
        yield ConfigError(
            f"unknown key {key!r}", where, GONE.get(key) or near + _beside(key, known)
        )
    elif override.is_delete():
        if key.rpartition(".")[2].isdigit():
            cure = _all_entries(key)
        else:
            cure = f"give it a value; {SEE_ALL}"
        yield ConfigError(f"{key} cannot be left out", where, cure)


def _of_yaml(error: YAMLError) -> ConfigError:
    mark = getattr(error, "problem_mark", None)
    where = "a YAML file of the configuration"
    if mark is not None:
        where = f"{mark.name}, line {mark.line + 1}"
    problem = f"cannot read a YAML file: {getattr(error, 'problem', None) or first_line(error)}"
    return ConfigError(problem, where, "correct it; YAML is indented by spaces")


def of_composition(
    error: Exception, words: Iterable[str], config_dir: Path | None = None
) -> ConfigError:
    """What Hydra refused, of the command line or of a file, also one in ``config_dir``."""
    raise_interrupt(error)
    if isinstance(error, MissingConfigException):
        group, _, option = str(error.missing_cfg_file).partition("/")
        if f"{group}={option}" in GONE:
            return _of_gone_option(group, option, config_dir)
    return _of_hydra(error, words)


def _of_hydra(error: Exception, words: Iterable[str]) -> ConfigError:
    """The error of Hydra's. It wraps what OmegaConf said; the inner error says what is wrong with the value."""
    if isinstance(error, YAMLError):
        return _of_yaml(error)
    inner: Any = error.__cause__ or error.__context__
    if not isinstance(inner, OmegaConfBaseException):
        inner = error
    problem = first_line(inner)
    cure = SEE_ALL
    if not isinstance(error, HydraException | OmegaConfBaseException):
        problem = f"Hydra stopped with {type(error).__name__}: {first_line(error)}".removesuffix(
            ": "
        )
    if kind := re.search("could not be converted to (Integer|Float)", problem):
        number = {"Integer": "whole number", "Float": "number"}[kind[1]]
        cure = f"give a {number}; {SEE_ALL}"
    if isinstance(inner, ConfigKeyError | ConfigAttributeError) and is_dataclass(inner.object_type):
        names = [spec.name for spec in fields(inner.object_type)]
        cure = f"{user_input.did_you_mean(nearest(str(inner.key), names))}keys: {', '.join(names)}"
        cure = GONE.get(str(inner.full_key), cure)
    if in_file := _IN_FILE.search(str(error)):
        return ConfigError(problem, f"{in_file['file']}.yaml", cure)
    guilty = max((line for line in words if line in str(error)), key=len, default="")
    key, _, value = guilty.lstrip("+~").partition("=")
    if "ListConfig" in problem:
        if key.startswith("sync.map"):
            cure = _A_MAP
        else:
            cure = f"a list is written in brackets: {key}=[{value}]"
    where = f"override {guilty}" if guilty else " ".join(["the configuration with", *words])
    return ConfigError(problem, where, cure)


def _of_gone_option(group: str, option: str, config_dir: Path | None) -> ConfigError:
    """The error for the defaults of a user's file that choose an option of 0.1. Hydra does not name the file."""
    where = "the defaults of a YAML file"
    chooses = re.compile(rf"\b{group}: {option}\b")
    files = sorted(config_dir.rglob("*.yaml")) if config_dir else []
    for file in files:
        if chooses.search(file.read_text(errors="replace")):
            where = f"the defaults of {file}"
    cure = f"leave it out there, and {GONE[f'{group}={option}']}"
    return ConfigError(f"no {group} {option!r}", where, cure)


def raise_interrupt(error: Exception) -> None:
    """Raise a KeyboardInterrupt if one came before the error: Hydra and OmegaConf stumble over it."""
    if any(isinstance(each, KeyboardInterrupt) for each in causes(error)):
        raise KeyboardInterrupt from error


def _all_entries(key: str) -> str:
    if key.startswith("sync.map."):
        return _A_MAP
    above = key.rpartition(".")[0]
    return (
        f"a list keeps its length; to have more or fewer entries give them all: {above}=[..., ...]"
    )


def keys_of(node: DictConfig | ListConfig, prefix: str = "") -> Iterator[str]:
    """Every key under ``node``, dotted; an entry of a list by its number, as in ``map.0.source``."""
    for name in names_in(node):
        key = f"{prefix}{name}"
        yield key
        if OmegaConf.is_missing(node, name):
            continue
        below = node[name]
        if isinstance(below, DictConfig | ListConfig):
            yield from keys_of(below, key + ".")


def names_in(node: DictConfig | ListConfig) -> Collection[Any]:
    """The names of what stands in ``node``; in a list, the numbers."""
    if isinstance(node, DictConfig):
        return list(node)
    return range(len(node))


def nearest(wanted: str, offered: Iterable[str]) -> str:
    """The offered dotted name whose last part is closest, or nothing; other parents count less."""
    parent, _, last = wanted.rpartition(".")

    def closeness(name: str) -> float:
        other, _, end = name.rpartition(".")
        ratio = difflib.SequenceMatcher(None, last, end).ratio()
        needed = 0.6 if parent in ("", other) else 0.85
        if ratio >= needed:
            return ratio + (parent == other) / 10
        return 0.0

    best = max(offered, key=closeness, default="")
    if best and closeness(best):
        return best
    return ""


def _beside(key: str, known: Collection[str]) -> str:
    """The keys beside an unknown key, as text: ``when has: every, unit``."""
    parent = key.rpartition(".")[0]
    if key.startswith("sync.map."):
        return _A_MAP
    names = []
    for name in sorted(known):
        other, _, last = name.rpartition(".")
        if parent and other == parent:
            names.append(last)
    if names:
        return f"{parent} has: {', '.join(names)}"
    return SEE_ALL


def _list_above(key: str, known: Collection[str]) -> str:
    """The list of which a key names an entry beyond its end, ``map.1.source`` of one entry; or nothing."""
    parts = key.split(".")
    for depth, part in enumerate(parts):
        above = ".".join(parts[:depth])
        if part.isdigit() and f"{above}.0" in known and f"{above}.{part}" not in known:
            return above
    return ""
