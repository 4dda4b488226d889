"""``rlsync cp``: copy a shipped config, for the user to edit."""

from __future__ import annotations

import re
import shlex
from itertools import chain
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from rlsync import ConfigError
from rlsync.runs.cli.main import parser_of
from rlsync.runs.config import shipped
from rlsync.runs.config.shipped import CLUSTER, ENV, RECIPE, TUNED, Shipped
from rlsync.runs.recipes import registry
from rlsync.runs.recipes.lag import THIS_MACHINE
from rlsync.seams import user_input

_EXAMPLES = """examples:
  rlsync cp recipe/ppo
  rlsync cp env/pong configs --as my_breakout

The copy needs a new name, because Hydra searches the shipped configs first. rlsync cp prints the commands
that use the copy.

exit status: 0 copied, 2 no such config, an impossible name, or the file exists already
"""

#: An environment of each kind that settings are tuned for; see ``EnvConfig.kind``.
_OF_A_KIND = {
    "pixels": [f"{ENV}=atari", f"{ENV}.id=ALE/Breakout-v5"],
    "rendered": [f"{ENV}=rendered", f"{ENV}.id=Acrobot-v1"],
}


def main(arguments: list[str]) -> int:
    parser = parser_of("cp", "Copy a shipped config, to edit it.", _EXAMPLES)
    folder = "my_configs"
    parser.add_argument("config", metavar="GROUP/NAME", help="as rlsync ls lists it")
    parser.add_argument(
        "folder", metavar="FOLDER", nargs="?", default=folder, help=f"default: {folder}"
    )
    parser.add_argument(
        "--as", dest="name", metavar="NAME", help="the copy's name; default: my_NAME"
    )
    parser.add_argument("--force", action="store_true", help="replace the file if it exists")
    options = parser.parse_args(arguments)
    config = find(options.config)
    name = _checked_name(options.name or f"my_{config.name}", config)
    copy = Path(options.folder) / config.group / f"{name}.yaml"  # shown as it was written
    if copy.exists() and not options.force:
        raise ConfigError(f"{copy} exists", "rlsync cp", "add --force to replace it, or --as NAME")
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.write_text(shipped.text_for_editors(config))
    print(f"copied {config} to {copy}; use it with")
    command = ["rlsync", "train", "--config-dir", options.folder, f"{config.group}={name}"]
    for beside in companions(config):
        print(f"  {shlex.join([*command, *beside])}")
    return 0


def find(name: str) -> Shipped:
    known = {str(config): config for config in chain.from_iterable(shipped.groups().values())}
    if name in known:
        return known[name]
    same_end = [full for full in known if full.endswith("/" + name)]
    if same_end:
        hint = user_input.did_you_mean(same_end[0])
    else:
        hint = user_input.did_you_mean(user_input.nearest_name(name, known))
    raise ConfigError(
        f"no shipped config {name!r}", "GROUP/NAME", f"{hint}rlsync ls lists them all"
    )


def _checked_name(name: str, config: Shipped) -> str:
    if not re.fullmatch(r"[A-Za-z_][\w-]*", name):
        raise ConfigError(
            f"a config cannot be named {name!r}", "--as", "use letters, digits, _ and -"
        )
    if name in [other.name for other in shipped.groups()[config.group]]:
        problem = f"a shipped config is already named {config.group}/{name}, and Hydra would find that one first"
        raise ConfigError(problem, f"--as {name}", f"choose another name, for example my_{name}")
    return name


def companions(config: Shipped) -> list[list[str]]:
    """The overrides that a copy of ``config`` needs beside it: others choose the original by its name."""
    overrides = _by_tuned_settings(config)
    for recipe in shipped.groups()[RECIPE]:
        if {f"override /{config.group}": config.name} in _defaults(recipe):
            overrides.append([f"{RECIPE}={recipe.name}"])
    if config.group == CLUSTER and OmegaConf.load(config.path).kind != THIS_MACHINE:
        for name in registry.SHIPPED:
            if registry.recipe_named(name).settings().acts_on_clusters():
                overrides.append([f"{RECIPE}={name}"])
    # A recipe, and a config that no recipe chooses by its name, can also be used alone.
    if config.group == RECIPE or not overrides:
        return [[], *overrides]
    return overrides


def _by_tuned_settings(config: Shipped) -> list[list[str]]:
    """What brings tuned settings to a copy: recipe and environment choose them by the original's name."""
    names = [config.name]
    # what is tuned for a kind is also for a file that builds on that kind's
    if config.group == ENV:
        names += map(str, _defaults(config))
    choices = {f"{config.group}={name}" for name in names}
    overrides: list[list[str]] = []
    for tuned in shipped.groups()[TUNED]:
        recipe, env = _tuned_for(tuned)
        if config == tuned:
            overrides.append(recipe + env)
        elif choices.intersection(env) and recipe not in overrides:
            overrides.append(recipe)
        elif [f"{config.group}={config.name}"] == recipe:
            overrides.append([*env, f"{TUNED}={tuned.name}"])
    return overrides


def _tuned_for(tuned: Shipped) -> tuple[list[str], list[str]]:
    """The overrides that choose the recipe and the environment of tuned settings, ``RECIPE_ENVIRONMENT``."""
    groups = shipped.groups()
    for recipe in groups[RECIPE]:
        name = tuned.name.removeprefix(f"{recipe.name}_")
        if name == tuned.name:
            continue
        if name in _OF_A_KIND:
            return [f"{RECIPE}={recipe.name}"], _OF_A_KIND[name]
        if name in [env.name for env in groups[ENV]]:
            return [f"{RECIPE}={recipe.name}"], [f"{ENV}={name}"]
    return [], []


def _defaults(config: Shipped) -> list[Any]:
    """What a config builds on, and what it overrides."""
    return list(OmegaConf.select(OmegaConf.load(config.path), "defaults", default=[]))
