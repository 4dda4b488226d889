"""Writes the JSON schemas of config files, by which editors complete and check them, from the dataclasses.

One for each config group whose files stand below its name, and ``run`` for files of the whole config: recipes,
tuned settings, a primary config. ``make configs`` calls it; the wheel has what it writes.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

sys.path.insert(0, str(Path(__file__).parent))
from configs import comments_of, paragraphs, plain
from rlsync.runs.config.own_hydra import KEY, PARTS
from rlsync.runs.config.shipped import RUN, SCHEMAS
from rlsync.runs.recipes import registry, settings
from rlsync.runs.recipes.bounds import Bound

#: Of OmegaConf: the value of another key, whatever the type.
_ELSEWHERE = {"type": "string", "pattern": r"^\$\{.*\}$"}

#: What every file may have beside its keys.
_HYDRAS = {
    "defaults": {"type": "array", "description": "The files that this one is merged with."},
    "hydra": {"type": "object", "description": "Hydra's own part."},
}

_TYPES: dict[Any, dict[str, Any]] = {
    str: {"type": "string"},
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    NoneType: {"type": "null"},
}


def schema_of(name: str) -> dict[str, Any]:
    """The schema of the files of a group, or with ``run`` of the whole config; draft 7, which editors know."""
    recipes: dict[str, Any] = {}
    if name == RUN:
        recipes = {recipe: recipe_object(recipe) for recipe in registry.SHIPPED}
        body = section(settings.Config)
        # a recipe of one's own has keys of its own
        own = {"type": "object", "required": [KEY], "properties": {KEY: {"type": "string"}}}
        named = [{"$ref": f"#/definitions/{recipe}"} for recipe in recipes]
        body["properties"]["recipe"] = {"anyOf": [*named, own]}
        body["properties"]["env"] = {"anyOf": [section(kind) for kind in ENVS]}
    elif name == "env":
        body = merged([section(kind) for kind in ENVS])
    else:
        body = section(PARTS[name])
    body["properties"] = _HYDRAS | body["properties"]
    head = {"$schema": "http://json-schema.org/draft-07/schema#", "title": f"rlsync: {name}"}
    if recipes:
        body["definitions"] = recipes
    return head | body


#: The kinds of environments, each with more keys.
ENVS = (settings.EnvConfig, settings.AtariConfig, settings.RenderedConfig)


def merged(objects: list[dict[str, Any]]) -> dict[str, Any]:
    """An object that may have the keys of all of these."""
    properties = {}
    for each in objects:
        properties |= each["properties"]
    return objects[0] | {"properties": properties}


def recipe_object(name: str) -> dict[str, Any]:
    body = section(registry.recipe_named(name).settings)
    body["properties"]["name"] = {"const": name}
    return body


def section(kind: type) -> dict[str, Any]:
    """A dataclass as an object. No key is required: a file sets those that it changes."""
    types = get_type_hints(kind)
    properties = {}
    for spec in fields(kind):
        if spec.name != KEY:
            properties[spec.name] = described(kind, spec, types[spec.name])
    return {"type": "object", "properties": properties, "additionalProperties": False}


def described(kind: type, spec: Field[Any], of_type: Any) -> dict[str, Any]:
    value = default_of(spec)
    if is_dataclass(of_type) and isinstance(of_type, type):
        # a recipe may have more keys in a section than its base class
        body = section(type(value) if is_dataclass(value) else of_type)
    else:
        kinds = [*bounded(of_type, spec.metadata.get("bound"))]
        if spec.type == "DeviceOrList":  # for which there is no type but Any
            kinds = [_TYPES[str], {"type": "array", "items": _TYPES[str]}]
        body = {"anyOf": [*kinds, _ELSEWHERE]}
    comments = (comments_of(cls).get(spec.name) for cls in kind.__mro__ if is_dataclass(cls))
    comment = next((text for text in comments if text), "")
    if comment:
        body = {"description": "\n".join(paragraphs(comment)).strip()} | body
    if not is_dataclass(value) and value is not MISSING and is_json(value):
        body["default"] = plain(value)
    return body


def default_of(spec: Field[Any]) -> Any:
    if spec.default_factory is not MISSING:
        return spec.default_factory()
    return spec.default


def is_json(value: Any) -> bool:
    return not (isinstance(value, float) and not math.isfinite(value))


def bounded(of_type: Any, bound: Bound | None) -> Iterator[dict[str, Any]]:
    """The schemas that a type stands for, each within the bound."""
    if get_origin(of_type) in (Union, UnionType):
        for each in get_args(of_type):
            yield from bounded(each, bound)
    elif get_origin(of_type) is list:
        yield listed(get_args(of_type)[0], bound)
    elif get_origin(of_type) is dict:
        yield {"type": "object"}
    elif of_type is Any:
        yield {}
    elif bound is not None and bound.group:  # an installed package may add a choice
        yield _TYPES[of_type] | {"examples": list(bound.choices)}
    elif bound is not None and bound.choices and of_type is str:
        yield {"enum": list(bound.choices)}
    elif bound is not None and of_type in (int, float):
        yield _TYPES[of_type] | limits(bound)
    else:
        yield _TYPES[of_type]


def listed(of_type: Any, bound: Bound | None) -> dict[str, Any]:
    body: dict[str, Any] = {"type": "array"}
    if is_dataclass(of_type) and isinstance(of_type, type):
        body["items"] = section(of_type)
    elif of_type is not Any:
        body["items"] = _TYPES[of_type]
    if bound is not None and bound.widths:
        body |= {"minItems": 1, "items": _TYPES[int] | {"minimum": 1}}
    return body


def limits(bound: Bound) -> dict[str, float]:
    words = {}
    if math.isfinite(bound.low):
        words["exclusiveMinimum" if bound.low_excluded else "minimum"] = bound.low
    if math.isfinite(bound.high):
        words["exclusiveMaximum" if bound.high_excluded else "maximum"] = bound.high
    return words


def texts() -> dict[Path, str]:
    """What each schema's file has to say."""
    names = (RUN, *(name for name in PARTS if name not in ("atari", "rendered")))
    return {
        SCHEMAS / f"{name}.json": json.dumps(schema_of(name), indent=1) + "\n" for name in names
    }
