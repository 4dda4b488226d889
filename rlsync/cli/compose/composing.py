"""Composes one job's config with Hydra, and finds all overrides that are wrong.

A job without a fault is composed once. Otherwise the first fault is noted, its override is read as what was
probably meant, or left out, and the job is composed again, until nothing is wrong any more.
"""

from __future__ import annotations

import re
from dataclasses import fields, is_dataclass
from typing import Any

from hydra import compose
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from rlsync.cli.compose.choices import SEE_ALL, beside, groups, keys, list_above, nearest
from rlsync.core.errors import ConfigError, first_line
from rlsync.core.path import did_you_mean

#: The arguments of gymnasium.make and of TorchRL's loggers stand here, and a cluster's resources. No schema
#: knows their names.
FREE_FORM = ("env.kwargs", "logger.kwargs", "cluster.resources")

_IN_FILE = re.compile(r"In '(?P<file>[^']+)': ")


class _Fault(Exception):
    """One thing that is wrong with a job.

    Args:
        error: what to tell.
        guilty: the override at fault, as it was written; empty if it is none of them.
        meant: what to read in its place; empty to leave it out.
        group: the config group that is left without a choice; the keys below it cannot be checked then.
    """

    def __init__(self, error: ConfigError, guilty: str = "", *, meant: str = "", group: str = "") -> None:
        super().__init__(error)
        self.error, self.guilty, self.meant, self.group = error, guilty, meant, group

    def mended(self, job: list[str]) -> list[str]:
        """The job without the fault."""
        lines = [self.meant if line == self.guilty else line for line in job]
        below = f"{self.group}."
        return [o for o in lines if o and not (self.group and o.lstrip("+~").startswith(below))]


def composed(config_name: str, job: list[str]) -> tuple[DictConfig | None, list[ConfigError]]:
    """The config that a job's overrides make, and all that is wrong; only where Hydra is initialised.

    Args:
        config_name: the primary config.
        job: overrides, none of which is a sweep.

    Returns:
        The config without the faults, or None where too much is unknown; and the faults.
    """
    if _is_plain([parsed(line) for line in job], config_name):
        try:
            return compose(config_name, job), []
        except (HydraException, OmegaConfBaseException):
            pass  # what is wrong is found out below
    errors: list[ConfigError] = []
    unknown = False
    while True:
        try:
            config = _composed(config_name, job)
            return (None if unknown else config), errors
        except _Fault as fault:
            errors.append(fault.error)
            if not fault.guilty:
                return None, errors
            unknown = unknown or bool(fault.group)
            job = fault.mended(job)


def _is_plain(overrides: list[Override], config_name: str) -> bool:
    """Whether Hydra itself refuses these overrides if there is something wrong with them.

    It does not when keys are added or left out (gymnasium's arguments may be), and it ignores an unknown
    option of an optional group.
    """
    own = [str(o.input_line) for o in overrides if o.is_hydra_override()]
    known_groups = groups(config_name, own)
    for override in overrides:
        key = _key(override)
        adds = override.is_add() or override.is_force_add()
        if override.is_delete() or key in FREE_FORM or (adds and not _is_free(key)):
            return False
        if key in known_groups and override.value() not in known_groups[key]:
            return False
    return True


def parsed(line: str) -> Override:
    """One override, read like Hydra reads it; only where Hydra is initialised.

    Raises:
        ConfigError: it is not written in Hydra's grammar.
    """
    try:
        override = OverridesParser.create().parse_override(line)
    except HydraException as error:
        cure = "write key=value; quote what the shell or Hydra would split: 'key=\"a, b\"'"
        if "[" in line.partition("=")[0]:
            cure = "write key=value; an entry of a list goes by its number: sync.map.0.source=..."
        what = f"cannot read an override: {first_line(error)}"
        raise ConfigError(what, f"override {line}", cure) from error
    override.config_loader = GlobalHydra.instance().config_loader()  # for glob()
    return override


def _composed(config_name: str, job: list[str]) -> DictConfig:
    """The config.

    Raises:
        _Fault: the first thing that is wrong.
    """
    overrides = [parsed(line) for line in job]
    own = [str(o.input_line) for o in overrides if o.is_hydra_override()]
    known_groups = groups(config_name, own)
    chosen = [o for o in overrides if _key(o) in known_groups]
    for override in chosen:
        _check_option(override, known_groups)
    base = [*chosen, *(o for o in overrides if _key(o) == "resume")]  # what decides which keys there are
    lines = [*own, *(str(o.input_line) for o in base)]
    known_keys = list(keys(_tried(config_name, lines)))
    for override in overrides:
        if override not in chosen and not override.is_hydra_override():
            _check_key(override, known_keys, known_groups)
    return _tried(config_name, job)


def _tried(config_name: str, job: list[str]) -> DictConfig:
    try:
        return compose(config_name, job)
    except (HydraException, OmegaConfBaseException) as error:
        raise _refused(error, config_name, job) from error


def _key(override: Override) -> str:
    return str(override.key_or_group)


def _is_free(key: str) -> bool:
    """Whether a key lies below one that takes keys of any name."""
    return key.startswith(tuple(f"{above}." for above in FREE_FORM))


def _check_option(override: Override, known_groups: dict[str, list[str]]) -> None:
    group, option, line = _key(override), override.value(), str(override.input_line)
    offered = known_groups[group]
    if override.is_delete() or (option in offered and not override.is_add()):
        return
    if option in offered:
        plain = line.lstrip("+")
        error = ConfigError(f"{group} has a choice already", f"override {line}", f"write {plain}")
        raise _Fault(error, line, meant=plain)
    near = nearest(str(option), offered)
    cure = f"{did_you_mean(near)}{group} is one of {', '.join(offered)}"
    error = ConfigError(f"no {group} {option!r}", f"override {line}", cure)
    raise _Fault(error, line, meant=near and f"{group}={near}", group="" if near else group)


def _check_key(override: Override, known: list[str], known_groups: dict[str, list[str]]) -> None:
    key, line = _key(override), str(override.input_line)
    adds = override.is_add() or override.is_force_add()
    where = f"override {line}"
    if _is_free(key) or (key in FREE_FORM and override.value()):
        if not adds and (key in FREE_FORM or key not in known):
            what = f"{key} is empty" if key in FREE_FORM else f"unknown key {key!r}"
            raise _Fault(
                ConfigError(what, where, f"an argument that is new here is added: write +{line}"), line
            )
    elif key not in known:
        raise _unknown(override, known, known_groups)
    elif override.is_delete():
        cure = _all_entries(key) if key.rpartition(".")[2].isdigit() else f"give it a value; {SEE_ALL}"
        raise _Fault(ConfigError(f"{key} cannot be left out", where, cure), line)


def _unknown(override: Override, known: list[str], known_groups: dict[str, list[str]]) -> _Fault:
    key, line = _key(override), str(override.input_line)
    what, where = f"unknown key {key!r}", f"override {line}"
    if above := list_above(key, known):
        return _Fault(ConfigError(what, where, _all_entries(f"{above}.0")), line)
    near = nearest(key, [*known, *known_groups])
    error = ConfigError(what, where, did_you_mean(near) + beside(key, known))
    takes_a_value = near in known_groups or not any(k.startswith(f"{near}.") for k in known)
    if not near or "/" in key or override.is_delete() or not takes_a_value:
        return _Fault(error, line)
    return _Fault(error, line, meant=f"{near}={override.get_value_element_as_str()}")


def _all_entries(key: str) -> str:
    above = key.rpartition(".")[0]
    return f"a list keeps its length; to have more or fewer entries give them all: {above}=[..., ...]"


def _refused(error: Exception, config_name: str, job: list[str]) -> _Fault:
    """Hydra wraps what OmegaConf said; the inner error says what is wrong with the value."""
    inner: Any = error.__cause__ or error.__context__
    if not isinstance(inner, OmegaConfBaseException):
        inner = error
    what, cure = first_line(inner), SEE_ALL
    if isinstance(inner, ConfigKeyError | ConfigAttributeError) and is_dataclass(inner.object_type):
        names = [spec.name for spec in fields(inner.object_type)]
        cure = f"{did_you_mean(nearest(str(inner.key), names))}keys: {', '.join(names)}"
    if in_file := _IN_FILE.search(str(error)):
        file = in_file["file"]
        guilty = next((line for line in job if line == file.replace("/", "=")), "")
        return _Fault(ConfigError(what, f"{file}.yaml", cure), guilty, group=file.partition("/")[0])
    named = max((line for line in job if line in str(error)), key=len, default="")
    guilty = named or _failing_alone(config_name, job)
    if guilty.startswith("~"):
        what, cure = f"{guilty.lstrip('~')} cannot be left out", f"choose one; {SEE_ALL}"
    return _Fault(ConfigError(what, f"override {guilty}" if guilty else "the configuration", cure), guilty)


def _failing_alone(config_name: str, job: list[str]) -> str:
    """The first override that cannot be composed even by itself."""
    for line in job:
        try:
            compose(config_name, [line])
        except (HydraException, OmegaConfBaseException):
            return line
    return ""
