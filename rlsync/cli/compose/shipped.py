"""The configs that rlsync ships, by group and name, and what each says of itself.

Listing them reads the comments only. OmegaConf is loaded by :func:`companions`, which reads values.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import rlsync
from rlsync.core.errors import ConfigError
from rlsync.core.path import did_you_mean, nearest_name
from rlsync.recipes.registry import installed_config_folders

RECIPE, ENV, TUNED, CLUSTER = "recipe", "env", "tuned", "cluster"

#: An environment of each kind that settings are tuned for; see ``EnvConfig.kind``.
_OF_A_KIND = {
    "pixels": [f"{ENV}=atari", f"{ENV}.id=ALE/Breakout-v5"],
    "rendered": [f"{ENV}=rendered", f"{ENV}.id=Acrobot-v1"],
}


def config_dir() -> Path:
    """The folder of the YAML files: in the installed package, else in the checkout."""
    package = Path(rlsync.__file__).resolve().parent
    for folder in (package / "configs", package.parent / "configs"):
        if (folder / "train.yaml").is_file():
            return folder
    cure = "reinstall rlsync, or run from a complete checkout"
    raise ConfigError("the config files are missing", str(package / "configs"), cure)


def look_beside(folder: Path) -> None:
    """Let modules that lie beside a config folder be imported: its parent goes to the front of ``sys.path``.

    It is what Python does for the folder of a script, and worker processes inherit it.
    """
    parent = str(folder.resolve().parent)
    if parent not in sys.path:
        sys.path.insert(0, parent)


@dataclass(frozen=True, slots=True)
class Shipped:
    """One file: an option of one config group, for example ``recipe/ppo``."""

    group: str
    name: str
    path: Path

    def __str__(self) -> str:
        return f"{self.group}/{self.name}"

    def description(self) -> str:
        """The first sentence of the file's first comment."""
        words: list[str] = []
        for line in self.path.read_text().splitlines():
            comment = line.removeprefix("#").strip()
            if comment.startswith("@package"):
                continue
            if not line.startswith("#") or not comment:
                break
            words.append(comment)
        return " ".join(words).partition(". ")[0].rstrip(".:")


def groups(own: Path | None = None) -> dict[str, list[Shipped]]:
    """Every group with its options: recipes first, then by name. Those of installed recipes and of ``own``, a
    folder of the user's, are among them.

    Example:
        >>> [str(config) for config in groups()["logger"]]
        ['logger/csv', 'logger/none', 'logger/tensorboard', 'logger/wandb']
    """
    found: dict[str, list[Shipped]] = {}
    folders = [config_dir(), *installed_config_folders(), *([own] if own else [])]
    for path in [path for folder in folders for path in sorted(folder.glob("*/*.yaml"))]:
        found.setdefault(path.parent.name, []).append(Shipped(path.parent.name, path.stem, path))
    return dict(sorted(found.items(), key=lambda item: (item[0] != RECIPE, item[0])))


def find(name: str) -> Shipped:
    """The config that ``GROUP/NAME`` names."""
    known = {str(config): config for options in groups().values() for config in options}
    if name in known:
        return known[name]
    same_end = [full for full in known if full.endswith("/" + name)]
    hint = did_you_mean(same_end[0] if same_end else nearest_name(name, known))
    raise ConfigError(f"no shipped config {name!r}", "GROUP/NAME", f"{hint}rlsync ls lists them all")


def companions(config: Shipped) -> list[list[str]]:
    """The overrides that a copy of ``config`` needs beside it to replace the original.

    A recipe chooses its sync map by name, and tuned settings by the name of its own file. A copy has another
    name, so the command line must name them. Tuned settings find an environment by its id or its kind, which
    a copy keeps.

    Example:
        >>> companions(find("env/pong"))[0]
        ['recipe=impala']
        >>> companions(find("tuned/impala_pong"))
        [['recipe=impala', 'env=pong']]
        >>> companions(find("cluster/ray"))
        [['recipe=ppo'], ['recipe=dqn'], ['recipe=sac'], ['recipe=td3'], ['recipe=impala']]
        >>> companions(find("env/gymnasium"))
        [[]]
    """
    from omegaconf import OmegaConf  # 0.2 s, which rlsync ls does not need

    from rlsync.recipes import registry
    from rlsync.recipes.settings import THIS_MACHINE

    all_groups = groups()
    envs = {env.name: [f"{ENV}={env.name}"] for env in all_groups[ENV]} | _OF_A_KIND
    pairs = {
        f"{recipe.name}_{name}": (f"{RECIPE}={recipe.name}", words)
        for recipe in all_groups[RECIPE]
        for name, words in envs.items()
    }
    names = [config.name]
    if config.group == ENV:  # what is tuned for a kind is also for a file that builds on that kind's
        names += [str(base) for base in OmegaConf.select(OmegaConf.load(config.path), "defaults", default=[])]
    chosen_by = {f"{config.group}={name}" for name in names}
    found = []
    for tuned in all_groups[TUNED]:
        recipe, env = pairs.get(tuned.name, ("", []))
        itself = f"{config.group}={config.name}"
        if config == tuned:
            found.append([word for word in (recipe, *env) if word])
        elif chosen_by & {*env} and [recipe] not in found:
            found.append([recipe])
        elif itself == recipe:
            found.append([*env, f"{TUNED}={tuned.name}"])
    for file in all_groups[RECIPE]:
        chosen = OmegaConf.select(OmegaConf.load(file.path), "defaults", default=[])
        if {f"override /{config.group}": config.name} in chosen:
            found.append([f"{RECIPE}={file.name}"])
    if config.group == CLUSTER and OmegaConf.load(config.path).kind != THIS_MACHINE:
        able = (
            name for name in registry.SHIPPED if registry.recipe_named(name).settings().acts_on_clusters()
        )
        found += [[f"{RECIPE}={name}"] for name in able]
    # A recipe, and a config that no recipe chooses by its name, can also be used alone.
    return [[], *found] if config.group == RECIPE or not found else found
