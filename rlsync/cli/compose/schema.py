"""The types of every config, for Hydra."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hydra import version
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_automatic_config_search_path
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.initialize import get_gh_backup, restore_gh_from_backup

from rlsync.cli.compose.config_dir import config_dir
from rlsync.cli.compose.once import ComposeOnce
from rlsync.cli.compose.own_recipes import look_beside, named_in
from rlsync.cli.compose.written import writable
from rlsync.core.errors import ConfigError
from rlsync.recipes import registry, settings

#: Config group in which the types are kept; not a choice for users.
SCHEMA = "schema"

#: What the ConfigStore holds when a process has imported Hydra and registered rlsync's types.
_KNOWN = ("hydra", "_dummy_empty_config_.yaml", SCHEMA)

_PROVIDER = "rlsync"


def register(own: Path | None = None) -> dict[str, ConfigError]:
    """Put the settings of runs and of all recipes into Hydra's ConfigStore, under ``schema/``.

    Args:
        own: the folder that ``--config-dir`` names; recipes that its YAML files name are registered, too.

    Returns:
        For each YAML file of a recipe that cannot be imported, by its name, why. It matters to those who
        choose it.
    """
    store = ConfigStore.instance()
    # The base class of the recipes, so that any of them may take its place.
    whole = settings.Config(recipe=settings.RecipeConfig())
    store.store(group=SCHEMA, name="config", package="_global_", node=writable(whole), provider=_PROVIDER)
    parts = {
        "env": settings.EnvConfig,
        "atari": settings.AtariConfig,
        "rendered": settings.RenderedConfig,
        "collector": settings.CollectorConfig,
        "cluster": settings.ClusterConfig,
        "sync": settings.SyncConfig,
        "logger": settings.LoggerConfig,
    }
    for name, node in parts.items():
        store.store(group=SCHEMA, name=name, node=writable(node), provider=_PROVIDER)
    wanted: dict[str, tuple[str, str | None]] = {name: (name, None) for name in registry.names()}
    if own is not None:
        look_beside(own)
        wanted |= named_in(own)
    failed = {}
    for file, (name, at) in wanted.items():
        try:
            of_recipe = registry.recipe_named(name, at=at).settings
        except ConfigError as error:
            failed[file] = error
        else:
            group = f"{SCHEMA}/recipe"
            store.store(group=group, name=name, node=writable(of_recipe), provider=_PROVIDER)
    return failed


@contextmanager
def alone() -> Iterator[None]:
    """While entered, Hydra knows rlsync's configs and its own, and no other package's.

    Hydra merges whatever has the same group and name: TorchRL's ``collector/sync``, where a process has
    registered it, would become the type of rlsync's.
    """
    store = ConfigStore.instance()
    everything = store.repo
    store.repo = {name: node for name, node in everything.items() if name in _KNOWN}
    try:
        yield
    finally:
        store.repo = everything


@contextmanager
def initialised(config_path: str | None = None) -> Iterator[Hydra]:
    """While entered, configs can be composed, each of them once; see :class:`ComposeOnce`.

    Args:
        config_path: the folder or package of the primary config; None: rlsync's own.
    """
    before = get_gh_backup()
    GlobalHydra.instance().clear()
    version.setbase("1.3")
    found = create_automatic_config_search_path(None, "rlsync.cli.train", config_path or str(config_dir()))
    hydra = Hydra(task_name="train", config_loader=ComposeOnce(found))
    GlobalHydra.instance().initialize(hydra)
    try:
        with alone():
            yield hydra
    finally:
        restore_gh_from_backup(before)
