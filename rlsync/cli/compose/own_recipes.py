"""Recipes that lie in a folder of the user's, which ``--config-dir`` names."""

from __future__ import annotations

import sys
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

#: The key that says where a recipe lies, as ``module:OBJECT``; beside ``name``, in the recipe's YAML.
KEY = "_recipe_"


def look_beside(folder: Path) -> None:
    """Let modules that lie beside a config folder be imported: its parent goes to the front of ``sys.path``.

    It is what Python does for the folder of a script, and worker processes inherit it.
    """
    parent = str(folder.resolve().parent)
    if parent not in sys.path:
        sys.path.insert(0, parent)


def named_in(folder: Path) -> dict[str, tuple[str, str]]:
    """The recipes that the YAML files of a config folder name.

    Args:
        folder: as ``--config-dir`` names it; the files lie in ``folder/recipe``.

    Returns:
        For each file that has the key ``_recipe_``, by its name: the recipe's name, and where it lies.
    """
    found = {}
    for file in sorted((folder / "recipe").glob("*.yaml")):
        content = OmegaConf.load(file)
        if not isinstance(content, DictConfig):
            continue
        # With the header "@package _global_" the keys stand under "recipe"; without it they do not.
        for prefix in ("recipe.", ""):
            at = OmegaConf.select(content, prefix + KEY)
            if isinstance(at, str):
                found[file.stem] = (str(OmegaConf.select(content, prefix + "name") or file.stem), at)
    return found
