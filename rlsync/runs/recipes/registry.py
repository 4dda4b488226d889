"""The one list of recipes by name: shipped, installed, or of a config file; imported when used."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from inspect import signature
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any, NamedTuple

from rlsync import ConfigError
from rlsync.seams import extensions, user_input

if TYPE_CHECKING:  # imports torch: not needed to list names
    from torch import nn
    from torchrl.trainers import Trainer

    from rlsync.runs.actors.player import Player
    from rlsync.runs.actors.replay.shared import SharedReplayHandle
    from rlsync.runs.evaluation.checkpoint import CheckpointPlayer
    from rlsync.runs.recipes.run import Run
    from rlsync.runs.recipes.settings import Config, EnvConfig, RecipeConfig
    from rlsync.runs.recipes.spaces import Takes
    from rlsync.seams import schedule

#: rlsync's own recipes, written as an entry point is.
SHIPPED: Mapping[str, str] = {
    "ppo": "rlsync.runs.recipes.ppo:RECIPE",
    "dqn": "rlsync.runs.recipes.dqn:RECIPE",
    "sac": "rlsync.runs.recipes.sac:RECIPE",
    "td3": "rlsync.runs.recipes.td3:RECIPE",
    "crossq": "rlsync.runs.recipes.sac:CROSSQ",
    "impala": "rlsync.runs.recipes.impala.recipe:RECIPE",
    "dreamer_v1": "rlsync.runs.recipes.dreamer.v1:RECIPE",
    "dreamer_v3": "rlsync.runs.recipes.dreamer.v3:RECIPE",
}


class Acting(NamedTuple):
    """What acts with a checkpoint's weights.

    Example:
        >>> from torch import nn
        >>> from rlsync.runs.actors.envs.actions import DiscreteActions
        >>> from rlsync.runs.actors.players.q import EpsilonGreedyPlayer
        >>> network = nn.Linear(4, 2)
        >>> Acting(network, EpsilonGreedyPlayer(network, DiscreteActions(2), (4,))).weights
        Linear(in_features=4, out_features=2, bias=True)
    """

    weights: nn.Module  #: the module into which a checkpoint's policy is loaded
    player: Player  #: acts with these weights


@dataclass(frozen=True, slots=True)
class Recipe:
    """All that rlsync must know of a recipe to train, evaluate, resume and list it.

    Example:
        >>> recipe = recipe_named("dqn")
        >>> recipe.settings().name
        'dqn'
    """

    name: str  #: what ``recipe.name`` says in a config, and the name of its YAML file
    #: The dataclass of its settings, a :class:`~rlsync.runs.recipes.settings.RecipeConfig`.
    settings: type[RecipeConfig]
    #: Makes one environment, looks at it, closes it, and returns what the networks must know of it. Raises
    #: ConfigError where the environment cannot serve.
    probe: Callable[[EnvConfig], Any]
    #: Makes the trainer of a :class:`~rlsync.runs.recipes.run.Run`, whose config has been checked. Its
    #: workers run, and its sync map is resolved.
    trainer: Callable[[Run[Any]], Trainer]
    #: What acts with the weights of a checkpoint, new, for ``rlsync eval``: called with a run, and whether to
    #: take the likeliest action. TorchRL's Trainer saves the policy of the loss module's ``actor_network``,
    #: else of its ``value_network``.
    acting: Callable[[Run[Any], bool], Acting]

    @property
    def takes(self) -> Takes | None:
        """Which observations and actions it takes; None: it has a probe of its own, which does not say."""
        from rlsync.runs.recipes.spaces import Takes

        match self.probe:
            case MethodType(__self__=Takes() as takes):
                return takes
        return None

    def build(
        self,
        config: Config,
        spaces: Any = None,
        again: schedule.Life | None = None,
        shared: SharedReplayHandle | None = None,
    ) -> Trainer:
        """A trainer that is ready to ``train()``: its workers run and its sync map is resolved.

        Args:
            config: what to train.
            spaces: what ``probe`` returned, if the config was checked before; None: check and probe here.
            again: the recorded life of a run whose rollouts are made again; see
                :mod:`rlsync.runs.recipes.rerun`.
            shared: the replay of the population that the run is an agent of.

        Raises:
            ConfigError: a value, the environment or the kind of recipe does not fit.
            SyncMapError: the sync map cannot be carried out.

        Example:
            >>> from rlsync.runs.recipes.settings import Config
            >>> trainer = recipe_named("ppo").build(Config(seed=1))  # doctest: +SKIP
            >>> trainer.train()  # doctest: +SKIP
        """
        from rlsync.runs.actors.worker import seed_all
        from rlsync.runs.recipes.checks import check
        from rlsync.runs.recipes.run import Run

        self.settings.of(config)
        if spaces is None:
            check(config)
            spaces = self.probe(config.env)
        run: Run[Any] = Run(config, spaces, again, shared)
        seed_all(config.seed)  # workers are seeded by the trainer, through their collector
        if (trainer := self.trainer(run)) is None:
            raise ConfigError(
                "the builder returned None", f"recipe {self.name!r}", "let it return a trainer"
            )
        return trainer

    def player(self, config: Config, spaces: Any, deterministic: bool) -> CheckpointPlayer:
        """What acts with a checkpoint's weights, once they are loaded into it.

        ``spaces`` is what ``probe`` returned; ``deterministic`` takes the likeliest action. It acts in the
        dtype in which workers do. ConfigError: settings of another recipe.
        """
        from rlsync.runs.actors.player import Player
        from rlsync.runs.evaluation.checkpoint import CheckpointPlayer
        from rlsync.runs.recipes.networks import cast_as_workers
        from rlsync.runs.recipes.run import Run

        self.settings.of(config)
        run: Run[Any] = Run(config, spaces)
        where = f"recipe {self.name!r}"
        try:
            signature(self.acting).bind(run, deterministic)
        except TypeError as error:
            cure = (
                "write def acting(run, deterministic), which returns parts.Acting(weights, player)"
            )
            raise ConfigError(f"acting cannot be called: {error}", where, cure) from error
        acting: Any = self.acting(run, deterministic)
        if not isinstance(acting, Acting) or not isinstance(acting.player, Player):
            cure = "let it return parts.Acting(weights, player)"
            raise ConfigError(
                f"acting returned a value of type {type(acting).__name__}", where, cure
            )
        cast_as_workers(config.sync, acting.player)
        return CheckpointPlayer(acting.weights, acting.player, config.env.spec())


def installed() -> dict[str, EntryPoint]:
    """The recipes of installed packages by name, not imported. A shipped name cannot be taken over."""
    return extensions.installed(extensions.RECIPES, SHIPPED)


def names() -> list[str]:
    return [*SHIPPED, *installed()]


def recipe_named(name: str, where: str = "recipe.name", at: str | None = None) -> Recipe:
    """The recipe of this name, at a ``module:OBJECT``, shipped or installed; ConfigError names ``where``."""
    if at is not None and name in SHIPPED:
        raise ConfigError(
            f"a recipe of rlsync's own is named {name!r}", where, f"name {at} otherwise"
        )
    value = at or SHIPPED.get(name)
    if value is not None:
        return loaded(EntryPoint(name, value, extensions.RECIPES))
    user_input.check_choice("recipe", name, names(), where)
    return loaded(installed()[name])


def recipe_of(config: Config) -> Recipe:
    """The recipe that a config names; ConfigError if there is none, or the config has the keys of another."""
    name = config.recipe.name
    recipe = recipe_named(name, at=config.recipe._recipe_)
    if not isinstance(config.recipe, recipe.settings):
        problem = f"the recipe is named {name!r} and has the keys of another"
        cure = (
            f"choose recipe={name}, and leave recipe.name alone; a YAML file of your own needs "
            f"/schema/recipe/{name}@recipe in its defaults"
        )
        raise ConfigError(problem, "recipe.name", cure)
    return recipe


def loaded(point: EntryPoint) -> Recipe:
    """Import the recipe that an entry point names; ConfigError if that is none, or has another name."""
    where = f"recipe {point.name!r}, at {point.value}"
    recipe = extensions.imported(
        point,
        "recipe",
        "name it as module:OBJECT; the module is looked for in installed packages and, with --config-dir "
        "FOLDER, beside FOLDER; an installed recipe needs no _recipe_",
    )
    if not isinstance(recipe, Recipe):
        raise ConfigError(
            f"not a Recipe: {recipe!r}", where, "make one: RECIPE = Recipe(name, settings, ...)"
        )
    if recipe.name != point.name:
        problem = f"the recipe calls itself {recipe.name!r}"
        raise ConfigError(
            problem, where, "give the Recipe, its YAML file and its entry point one name"
        )
    from rlsync.runs.recipes.settings import RecipeConfig

    if not (isinstance(recipe.settings, type) and issubclass(recipe.settings, RecipeConfig)):
        problem = f"its settings are {recipe.settings!r}"
        raise ConfigError(problem, where, "let them inherit parts.RecipeConfig")
    namespace = vars(recipe.settings)
    if namespace.get("__annotations__") and "__dataclass_fields__" not in namespace:
        problem = f"its settings {recipe.settings!r} are no dataclass"
        raise ConfigError(problem, where, "write @dataclass above them")
    return recipe


def installed_config_folders() -> Iterator[Path]:
    """The folders ``configs/`` beside ``__init__.py`` of packages with recipes, which are not imported."""
    packages = {point.module.partition(".")[0] for point in installed().values()}
    for package in sorted(packages):
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            continue
        folder = Path(spec.origin).parent / "configs"
        if folder.is_dir():
            yield folder
