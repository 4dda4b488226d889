"""The configs that rlsync ships, by group and name, and what each says of itself."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import rlsync
from rlsync import ConfigError
from rlsync.runs.recipes.registry import installed_config_folders

RECIPE = "recipe"
ENV = "env"
TUNED = "tuned"
CLUSTER = "cluster"

#: The JSON schemas of config files, by group; RUN: of files that have the whole config, as those of these groups.
SCHEMAS = Path(__file__).parent / "schemas"
RUN = "run"
_WHOLE = (RECIPE, TUNED)

#: How the line begins by which editors find the schema of a YAML file.
_FOR_EDITORS = "# yaml-language-server: $schema="


def config_dir() -> Path:
    """The folder of the YAML files: in the installed package, else in the checkout."""
    package = Path(rlsync.__file__).resolve().parent
    for folder in (package / "configs", package.parent / "configs"):
        if (folder / "train.yaml").is_file():
            return folder
    cure = "reinstall rlsync, or run from a complete checkout"
    raise ConfigError("the config files are missing", str(package / "configs"), cure)


def look_beside(folder: Path) -> None:
    """Put the parent of a config folder on ``sys.path``, as Python does for a script. Workers inherit it."""
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
            if comment.startswith("@package") or line.startswith(_FOR_EDITORS):
                continue
            if not line.startswith("#") or not comment:
                break
            words.append(comment)
        return " ".join(words).partition(". ")[0].rstrip(".:")


def text_for_editors(config: Shipped) -> str:
    """What a file says, with a line by which editors complete and check it; Hydra reads the first line."""
    name = RUN if config.group in _WHOLE else config.group
    schema = SCHEMAS / f"{name}.json"
    first, _, rest = config.path.read_text().partition("\n")
    if not schema.is_file():  # a group of an installed package
        return f"{first}\n{rest}"
    line = f"{_FOR_EDITORS}{schema.as_uri()}"
    if first.startswith("# @package"):
        return f"{first}\n{line}\n{rest}"
    return f"{line}\n{first}\n{rest}"


def groups(own: Path | None = None) -> dict[str, list[Shipped]]:
    """Every group with its options, also of installed recipes and of ``own``: recipes first, then by name."""
    folders = [config_dir(), *installed_config_folders()]
    if own is not None:
        folders.append(own)
    options: dict[str, list[Shipped]] = {}
    for folder in folders:
        for path in sorted(folder.glob("*/*.yaml")):
            group = path.parent.name
            options.setdefault(group, []).append(Shipped(group, path.stem, path))
    return dict(sorted(options.items(), key=lambda item: (item[0] != RECIPE, item[0])))
