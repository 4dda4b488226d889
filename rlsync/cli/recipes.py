"""The recipes that the launcher knows, and what it can tell of a config before workers start."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torchrl.trainers import Trainer

from rlsync.cli.resume import checkpoint_in
from rlsync.core.errors import ConfigError, RlsyncError
from rlsync.core.path import did_you_mean, nearest_name
from rlsync.recipes import config as recipe_config
from rlsync.recipes import dqn, parts, ppo
from rlsync.recipes.bounds import caught
from rlsync.recipes.config import Config, DQNConfig, EnvConfig, PPOConfig, RecipeConfig
from rlsync.recipes.impala import recipe as impala
from rlsync.recipes.impala.config import ImpalaConfig


@dataclass(frozen=True, slots=True)
class Recipe:
    """A builder of trainers, and a look at the environment before it builds.

    Args:
        settings: the type of its config.
        build: makes the trainer that a config describes.
        probe: raises ConfigError where the environment of a config cannot serve.
    """

    settings: type[RecipeConfig]
    build: Callable[[Config], Trainer]
    probe: Callable[[EnvConfig], object]


def _probe_vectors(config: EnvConfig) -> None:
    impala.probe(config).close()


RECIPES = {
    "ppo": Recipe(PPOConfig, ppo.build, parts.probe),
    "dqn": Recipe(DQNConfig, dqn.build, parts.probe),
    "impala": Recipe(ImpalaConfig, impala.build, _probe_vectors),
}


def recipe_named(name: str, where: str) -> Recipe:
    """The recipe of this name.

    Args:
        name: it.
        where: how an error calls the place that the name stands at.

    Raises:
        ConfigError: there is no such recipe.
    """
    if name not in RECIPES:
        hint = did_you_mean(nearest_name(name, RECIPES))
        raise ConfigError(f"no recipe is named {name!r}", where, f"{hint}recipes: {', '.join(RECIPES)}")
    return RECIPES[name]


def recipe_of(config: Config) -> Recipe:
    """The recipe that a config names.

    Raises:
        ConfigError: there is no such recipe, or the config has the keys of another.
    """
    name = config.recipe.name
    recipe = recipe_named(name, "recipe.name")
    if not isinstance(config.recipe, recipe.settings):
        raise ConfigError(
            f"the recipe is named {name!r} and has the keys of another",
            "recipe.name",
            f"choose recipe={name}, and leave recipe.name alone",
        )
    return recipe


def errors(config: Config) -> Iterator[RlsyncError]:
    """All that can be known to be wrong with a config without a worker.

    Its values; and the names that lead nowhere: of the recipe, of the environment, of a checkpoint.
    """
    yield from recipe_config.errors(config)
    wrong_name = list(caught(lambda: recipe_of(config)))
    yield from wrong_name
    if config.env.id and not wrong_name:
        yield from caught(lambda: recipe_of(config).probe(config.env))
    if config.resume is not None:
        resume = config.resume
        yield from caught(lambda: checkpoint_in(resume, config))
