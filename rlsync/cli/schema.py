"""The types of every config, for Hydra; and where the YAML files are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore

from rlsync.core.errors import ConfigError
from rlsync.recipes import config as recipe_config
from rlsync.recipes.impala import config as impala_config

#: Config group in which the types are kept; not a choice for users.
SCHEMA = "schema"

#: What the ConfigStore holds when a process has imported Hydra and registered rlsync's types.
_KNOWN = ("hydra", "_dummy_empty_config_.yaml", SCHEMA)


def register() -> None:
    """Put the dataclasses of rlsync.recipes.config into Hydra's ConfigStore, under ``schema/``."""
    store = ConfigStore.instance()
    store.store(
        group=SCHEMA,
        name="config",
        package="_global_",
        # The base class, so that any recipe may take its place.
        node=recipe_config.Config(recipe=recipe_config.RecipeConfig()),
        provider="rlsync",
    )
    parts = {
        "env": recipe_config.EnvConfig,
        "collector": recipe_config.CollectorConfig,
        "sync": recipe_config.SyncConfig,
        "logger": recipe_config.LoggerConfig,
    }
    for name, node in parts.items():
        store.store(group=SCHEMA, name=name, node=node, provider="rlsync")
    recipes = {
        "ppo": recipe_config.PPOConfig,
        "dqn": recipe_config.DQNConfig,
        "impala": impala_config.ImpalaConfig,
    }
    for name, recipe in recipes.items():
        store.store(group=f"{SCHEMA}/recipe", name=name, node=recipe, provider="rlsync")


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
def initialised() -> Iterator[None]:
    """While entered, configs can be composed."""
    with alone(), initialize_config_dir(str(config_dir()), version_base="1.3"):
        yield


def config_dir() -> Path:
    """The folder of the YAML files: in the installed package, else in the checkout.

    Raises:
        ConfigError: it is in neither place.
    """
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "configs", package.parent / "configs"):
        if (folder / "train.yaml").is_file():
            return folder
    raise ConfigError(
        "the config files are missing",
        str(package / "configs"),
        "reinstall rlsync, or run from a complete checkout",
    )
