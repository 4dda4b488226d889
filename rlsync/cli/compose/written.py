"""The config that a run wrote, read back with its types."""

from __future__ import annotations

from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from omegaconf import Container, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlsync.cli.compose.own_recipes import KEY, look_beside
from rlsync.core.errors import ConfigError, first_line
from rlsync.recipes.env_settings import settings_with
from rlsync.recipes.registry import recipe_named
from rlsync.recipes.settings import Config


def written(file: Path) -> Config:
    """The config in a run's ``config.yaml``. Keys that are newer than the run get their defaults.

    A key that rlsync no longer has is left out where the run had null for it. Values are not checked against
    their bounds. A recipe that lies beside a folder of the user's is imported from there; the run has noted
    where.

    Args:
        file: the run's ``config.yaml``.

    Raises:
        ConfigError: its recipe is unknown, or it is unreadable: a value is missing, or of the wrong type.
    """
    try:
        found = OmegaConf.load(file)
        own, at = (OmegaConf.select(found, key) for key in ("config_dir", f"recipe.{KEY}"))
        if own is not None and at is not None:
            look_beside(Path(own))
        name = str(OmegaConf.select(found, "recipe.name"))
        recipe = recipe_named(name, f"{file}, recipe.name", at)
        settings = recipe.settings()
        of_its_kind = settings_with(OmegaConf.select(found, "env", default={}))
        known = writable(Config(env=of_its_kind, recipe=settings))
        _leave_out_what_has_gone(found, known)
        config = OmegaConf.to_object(OmegaConf.merge(known, found))
    except (OmegaConfBaseException, OSError) as error:
        what = f"cannot read the run's configuration: {first_line(error)}"
        raise ConfigError(what, str(file), "use the rlsync that wrote it") from error
    assert isinstance(config, Config)
    return config


def _leave_out_what_has_gone(found: Any, known: Any) -> None:
    if not isinstance(found, DictConfig) or not isinstance(known, DictConfig):
        return
    for key in list(found):
        if key in known:
            _leave_out_what_has_gone(found[key], known[key])
        elif found[key] is None and is_dataclass(OmegaConf.get_type(known)):
            del found[key]


def writable(settings: Any) -> DictConfig:
    """A structured config whose keys may be overridden, also those of frozen dataclasses.

    OmegaConf makes the node of a frozen dataclass read-only. A config that is being composed must not be; the
    dataclass that comes out of it in the end is frozen all the same.

    Args:
        settings: a dataclass, or an instance of one.
    """
    node = OmegaConf.structured(settings)
    _unlock(node)
    assert isinstance(node, DictConfig)
    return node


def _unlock(node: Container) -> None:
    if OmegaConf.is_readonly(node):
        OmegaConf.set_readonly(node, None)
    for key in node if isinstance(node, DictConfig) else range(len(node)):  # type: ignore[arg-type]
        if not OmegaConf.is_missing(node, key) and isinstance(below := node[key], Container):
            _unlock(below)
