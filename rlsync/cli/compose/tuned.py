"""Which tuned settings fit the environment of a job, and what the first lines of a run say of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rlsync.cli.compose import shipped
from rlsync.cli.compose.shipped import ENV, RECIPE, TUNED
from rlsync.recipes.settings import Config, EnvConfig, RenderedConfig

#: The file that was chosen in each config group.
Choices = Mapping[str, Any]


def is_chosen(overrides: Collection[str]) -> bool:
    """Whether the user has chosen tuned settings, or none.

    Example:
        >>> is_chosen(["env=pong", "~tuned"]), is_chosen(["env=pong"])
        (True, False)
    """
    return any(word.lstrip("+~").partition("=")[0] == TUNED for word in overrides)


def fitting(config: DictConfig, options: Collection[str], id_of: Callable[[str], Any]) -> str | None:
    """The tuned settings for a config's recipe and environment.

    Those named ``RECIPE_ENV`` fit if the config's id is the one in the file ``env/ENV``. Else those named
    ``RECIPE_KIND`` fit, where the kind is :attr:`EnvConfig.kind`. An environment and its picture have one id,
    and are different tasks: files for pictures have names that begin with ``rendered``.

    Args:
        config: composed, with the node ``hydra``.
        options: the names of all tuned settings.
        id_of: the id that an environment's file gives, by the file's name.

    Returns:
        One of the options; None if none fits.
    """
    choices, name = config.hydra.runtime.choices, config.env.id
    recipe, chosen = choices.get(RECIPE), choices.get(ENV)
    if chosen and f"{recipe}_{chosen}" in options and id_of(chosen) in (None, "", name):
        return f"{recipe}_{chosen}"
    found = OmegaConf.get_type(config, ENV)
    kind = found.kind if isinstance(found, type) and issubclass(found, EnvConfig) else ""
    for option in options:
        env = option.removeprefix(f"{recipe}_")
        alike = env.startswith(RenderedConfig.kind) == (kind == RenderedConfig.kind)
        if env != option and name and alike and id_of(env) == name:
            return option
    general = f"{recipe}_{kind}"
    return general if general in options else None


def told(choices: Choices, config: Config, own: Path | None) -> dict[str, str]:
    """Where the settings of a run come from, what it plays, and when it ends.

    Args:
        choices: what was chosen.
        config: composed from them.
        own: the folder that ``--config-dir`` names.
    """
    recipe = config.recipe
    files = {file.name: file for file in shipped.groups(own).get(TUNED, [])}
    tuned = files.get(str(choices.get(TUNED)))
    origin = f"{RECIPE}/{choices.get(RECIPE)}"
    if config.resume is not None:
        origin = f"those of the run that is resumed, recipe {recipe.variant()}"
    elif tuned is None:
        origin += f" alone: general settings, not tuned for {config.env.id}"
    else:
        about = tuned.description()
        origin += f" with {tuned}" + (f" ({about})" if about else "")
    ends = f"after {recipe.total_frames:,} frames"
    goal = recipe.goal()
    ends = f"{goal}, or {ends}" if goal else f"{ends}; no target return is set"
    return {"settings": origin, "plays": config.env.facts(), "ends": ends}
