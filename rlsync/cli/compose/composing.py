"""Composes one job's config: options of groups, tuned settings, the run that is resumed, and keys on top."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import compose
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from rlsync.cli.compose import own_hydra, refusals, resumed, shipped
from rlsync.cli.compose.command_line import CommandLine
from rlsync.cli.compose.refusals import SEE_ALL, key_of, parsed
from rlsync.cli.compose.shipped import ENV, RECIPE, TUNED
from rlsync.core.errors import ConfigError, first_line
from rlsync.recipes.settings import Config, EnvConfig, RenderedConfig

#: The option that was chosen in each config group.
Choices = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Composition:
    """What a job's overrides make."""

    config: Config  # typed; its values are not checked against their bounds
    choices: Choices  # the option that was chosen in each config group
    added: tuple[str, ...]  # what rlsync adds to the user's overrides, so that Hydra composes the same


def composition(line: CommandLine, words: Sequence[str]) -> tuple[Composition | None, list[ConfigError]]:
    """Compose a job, only where Hydra is initialised: what the overrides make without those that name no key,
    or None if Hydra cannot compose them; and all errors that were seen on the way.
    """
    overrides = [parsed(word) for word in words]
    hydras = [str(o.input_line) for o in overrides if o.is_hydra_override()]
    groups = own_hydra.groups(line.config_name, hydras)
    options = [o for o in overrides if key_of(o) in groups]
    errors = [error for o in options for error in refusals.of_option(o, groups[key_of(o)])]
    if errors:  # what the keys are is not known
        return None, errors
    decide = [*options, *(o for o in overrides if key_of(o) == "resume")]
    used = [*hydras, *(str(o.input_line) for o in decide)]
    try:
        base, choices = _composed(line, used)
        added = _added(line, overrides, base, choices, groups.get(TUNED, []))
        used += added
        if added:
            base, choices = _composed(line, used)
        known = list(refusals.keys_of(base))
        for override in overrides:
            if override not in decide and not override.is_hydra_override():
                wrong = list(refusals.of_key(override, known, groups))
                errors += wrong
                used += [] if wrong else [str(override.input_line)]
        config, choices = _composed(line, used)
        return Composition(_typed(config), choices, tuple(added)), errors
    except ConfigError as error:
        return None, [*errors, error]
    except (HydraException, OmegaConfBaseException) as error:
        return None, [*errors, refusals.of_composition(error, words)]


def _added(
    line: CommandLine,
    overrides: list[Override],
    base: DictConfig,
    choices: Choices,
    all_tuned: list[str],
) -> list[str]:
    """The overrides that bring in the run that is resumed, or else the settings that fit the environment."""
    resume = OmegaConf.select(base, "resume")
    before = resumed.config_before(Path(str(resume))) if resume is not None else None
    if before is not None:
        return resumed.on_top_of(before, base, choices, overrides, own_hydra.store)
    if TUNED not in choices or any(key_of(o) == TUNED for o in overrides):
        return []  # the user's primary config is another one, or the user has chosen
    ids = [str(o.value()) for o in overrides if key_of(o) == "env.id"]
    return _tuned(choices, base.env, [base.env.id, *ids][-1], all_tuned, line.config_dir)


def _composed(line: CommandLine, words: Sequence[str]) -> tuple[DictConfig, Choices]:
    """A config without Hydra's part, and the choices that made it."""
    config = compose(line.config_name, list(words), return_hydra_config=True)
    choices = dict(config.hydra.runtime.choices)
    with open_dict(config):
        del config["hydra"]
    return config, choices


def _typed(config: DictConfig) -> Config:
    """The dataclasses in a config that Hydra composed."""
    try:
        typed = OmegaConf.to_object(config)
    except OmegaConfBaseException as error:
        where = error.full_key or "the configuration"
        raise ConfigError(first_line(error), where, SEE_ALL) from error
    assert isinstance(typed, Config)
    return typed


def _tuned(
    choices: Choices, env: DictConfig, env_id: str, options: Collection[str], own: Path | None
) -> list[str]:
    """What chooses the settings that fit the environment, where the defaults list names others.

    A defaults list knows the names of config files only. What fits depends on the keys of ``env``.
    """
    files = {file.name: file.path for file in shipped.groups(own).get(ENV, [])}

    def id_of(name: str) -> str:
        return str(OmegaConf.select(OmegaConf.load(files[name]), "id", default="")) if name in files else ""

    fits = _fitting(choices, env, env_id, options, id_of)
    if fits == (choices[TUNED] if choices[TUNED] in options else None):
        return []
    return [f"~{TUNED}" if fits is None else f"{TUNED}={fits}"]


def _fitting(
    choices: Choices, env: DictConfig, env_id: str, options: Collection[str], id_of: Callable[[str], str]
) -> str | None:
    """The tuned settings for a recipe and an environment; None if none fits.

    Those named ``RECIPE_ENV`` fit if the id is the one in the file ``env/ENV``. Else those named
    ``RECIPE_KIND`` fit, where the kind is :attr:`EnvConfig.kind`. An environment and its picture have one id,
    and are different tasks: files for pictures have names that begin with ``rendered``.
    """
    recipe, chosen = choices.get(RECIPE), choices.get(ENV)
    if chosen and f"{recipe}_{chosen}" in options and id_of(chosen) in ("", env_id):
        return f"{recipe}_{chosen}"
    settings = OmegaConf.get_type(env)
    kind = settings.kind if isinstance(settings, type) and issubclass(settings, EnvConfig) else ""
    for option in options:
        name = option.removeprefix(f"{recipe}_")
        alike = name.startswith(RenderedConfig.kind) == (kind == RenderedConfig.kind)
        if name != option and env_id and alike and id_of(name) == env_id:
            return option
    general = f"{recipe}_{kind}"
    return general if general in options else None


def told(choices: Choices, config: Config, own: Path | None) -> dict[str, str]:
    """Where the settings of a run come from, what it plays, and when it ends."""
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
