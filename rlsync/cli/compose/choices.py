"""The names that a command line may use: config groups, their options, and keys."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Iterator

from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from omegaconf import DictConfig, ListConfig, OmegaConf

from rlsync.cli.compose import schema

SEE_ALL = "rlsync train --cfg job prints all keys"


def groups(config_name: str, own: list[str]) -> dict[str, list[str]]:
    """Every config group with its options; only where Hydra is initialised.

    Args:
        config_name: the primary config.
        own: overrides of Hydra's own keys, among them the search path.
    """
    loader = GlobalHydra.instance().config_loader()
    found = {}
    for folder in sorted(schema.config_dir().iterdir()):
        if folder.is_dir():
            found[folder.name] = loader.get_group_options(folder.name, ObjectType.CONFIG, config_name, own)
    return found


def keys(node: DictConfig | ListConfig, prefix: str = "") -> Iterator[str]:
    """Every key under ``node``, dotted; an entry of a list by its number.

    Example:
        >>> list(keys(OmegaConf.create({"map": [{"source": "a"}]})))
        ['map', 'map.0', 'map.0.source']
    """
    names = list(node) if isinstance(node, DictConfig) else range(len(node))
    for name in names:
        key = f"{prefix}{name}"
        yield key
        if OmegaConf.is_missing(node, name):
            continue
        below = node[name]
        if isinstance(below, DictConfig | ListConfig):
            yield from keys(below, key + ".")


def nearest(wanted: str, offered: Iterable[str]) -> str:
    """The offered dotted name whose last part is closest to that of ``wanted``; or nothing.

    A name that was put under another parent must be closer than one that was not.

    Example:
        >>> nearest("num_epoch", ["recipe.lr", "recipe.num_epochs"])
        'recipe.num_epochs'
    """
    parent, _, last = wanted.rpartition(".")

    def closeness(name: str) -> float:
        other, _, end = name.rpartition(".")
        ratio = difflib.SequenceMatcher(None, last, end).ratio()
        needed = 0.6 if parent in ("", other) else 0.85
        return ratio + (parent == other) / 10 if ratio >= needed else 0.0

    best = max(offered, key=closeness, default="")
    return best if best and closeness(best) else ""


def beside(key: str, known: Collection[str]) -> str:
    """The keys beside an unknown key, as text.

    Example:
        >>> beside("when.evry", ["when", "when.every", "when.unit"])
        'when has: every, unit'
    """
    parent = key.rpartition(".")[0]
    split = (name.rpartition(".") for name in sorted(known))
    names = [last for other, _, last in split if parent and other == parent]
    return f"{parent} has: {', '.join(names)}" if names else SEE_ALL


def list_above(key: str, known: Collection[str]) -> str:
    """The list that a key names an entry of, beyond its end; or nothing.

    Example:
        >>> list_above("map.1.source", ["map", "map.0", "map.0.source"])
        'map'
    """
    parts = key.split(".")
    for depth, part in enumerate(parts):
        above = ".".join(parts[:depth])
        if part.isdigit() and f"{above}.0" in known and f"{above}.{part}" not in known:
            return above
    return ""
