"""The types of every config, for Hydra; and where the YAML files are."""

from __future__ import annotations

from pathlib import Path

from hydra.core.config_store import ConfigStore

from rlsync.core.errors import ConfigError
from rlsync.recipes import config as recipe_config
from rlsync.recipes.impala import config as impala_config

#: Config group in which the types are kept; not a choice for users.
SCHEMA = "schema"


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
