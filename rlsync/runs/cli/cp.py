"""``rlsync cp``: copy a shipped config, for the user to edit."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

from omegaconf import OmegaConf

from rlsync import ConfigError
from rlsync.core.path import did_you_mean, nearest_name
from rlsync.runs.cli.main import parser_of
from rlsync.runs.config import shipped
from rlsync.runs.config.shipped import CLUSTER, ENV, RECIPE, TUNED, Shipped
from rlsync.runs.recipes import registry
from rlsync.runs.recipes.settings import THIS_MACHINE

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
    own = "my_configs"
    parser.add_argument("config", metavar="GROUP/NAME", help="as rlsync ls lists it")
    parser.add_argument("folder", metavar="FOLDER", nargs="?", default=own, help=f"default: {own}")
    parser.add_argument(
        "--as", dest="name", metavar="NAME", help="the copy's name; default: my_NAME"
    )
    parser.add_argument("--force", action="store_true", help="replace the file if it exists")
    given = parser.parse_args(arguments)
    config = find(given.config)
    name = _checked_name(given.name or f"my_{config.name}", config)
    copy = Path(given.folder) / config.group / f"{name}.yaml"  # shown as it was written
    if copy.exists() and not given.force:
        raise ConfigError(f"{copy} exists", "rlsync cp", "add --force to replace it, or --as NAME")
    copy.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(config.path, copy)
    print(f"copied {config} to {copy}; use it with")
    for beside in companions(config):
        command = [
            "rlsync",
            "train",
            "--config-dir",
            str(given.folder),
            f"{config.group}={name}",
            *beside,
        ]
        print(f"  {shlex.join(command)}")
    return 0


def find(name: str) -> Shipped:
    known = {str(config): config for options in shipped.groups().values() for config in options}
    if name in known:
        return known[name]
    same_end = [full for full in known if full.endswith("/" + name)]
    hint = did_you_mean(same_end[0] if same_end else nearest_name(name, known))
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
    all_groups = shipped.groups()
    envs = {env.name: [f"{ENV}={env.name}"] for env in all_groups[ENV]} | _OF_A_KIND
    pairs = {
        f"{recipe.name}_{name}": (f"{RECIPE}={recipe.name}", words)
        for recipe in all_groups[RECIPE]
        for name, words in envs.items()
    }
    names = [config.name]
    # what is tuned for a kind is also for a file that builds on that kind's
    if config.group == ENV:
        names += [
            str(base)
            for base in OmegaConf.select(OmegaConf.load(config.path), "defaults", default=[])
        ]
    chosen_by = {f"{config.group}={name}" for name in names}
    found = []
    for tuned in all_groups[TUNED]:
        recipe, env = pairs.get(tuned.name, ("", []))
        if config == tuned:
            found.append([word for word in (recipe, *env) if word])
        elif chosen_by & {*env} and [recipe] not in found:
            found.append([recipe])
        elif f"{config.group}={config.name}" == recipe:
            found.append([*env, f"{TUNED}={tuned.name}"])
    for file in all_groups[RECIPE]:
        chosen = OmegaConf.select(OmegaConf.load(file.path), "defaults", default=[])
        if {f"override /{config.group}": config.name} in chosen:
            found.append([f"{RECIPE}={file.name}"])
    if config.group == CLUSTER and OmegaConf.load(config.path).kind != THIS_MACHINE:
        settings = {name: registry.recipe_named(name).settings() for name in registry.SHIPPED}
        found += [
            [f"{RECIPE}={name}"] for name, of_it in settings.items() if of_it.acts_on_clusters()
        ]
    # A recipe, and a config that no recipe chooses by its name, can also be used alone.
    if config.group == RECIPE or not found:
        return [[], *found]
    return found
