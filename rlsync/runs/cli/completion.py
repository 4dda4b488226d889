"""What a shell completes after ``rlsync``, for argcomplete: verbs, options, groups, choices and keys.

It is asked at each press of the tab key, so it loads neither torch nor Hydra: keys come from the schemas of config
files, which are made from the dataclasses, and the options of a verb from its source.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
from argparse import Namespace
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import argcomplete
from argcomplete.completers import DirectoriesCompleter, FilesCompleter

from rlsync.runs.cli.main import VERBS
from rlsync.runs.config import shipped

#: Verbs that take overrides, as ``rlsync train`` does.
_COMPOSE = ("train", "check", "explain")

#: Options of Hydra's and of rlsync that they hand on, and whether a folder follows.
_OF_COMPOSE = {"--config-dir": True, "--cfg": False, "--trust": False, "--multirun": False}


def complete() -> None:
    """Answer the shell that has set ``_ARGCOMPLETE``, and end this process; return in any other process."""
    argcomplete.autocomplete(_parser())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rlsync")
    parser.add_argument("--version", action="store_true")
    verbs = parser.add_subparsers()
    for verb, about in VERBS.items():
        of_verb = verbs.add_parser(verb, help=about.partition(":")[0])
        for names, keywords in _options(verb):
            action = of_verb.add_argument(*names, **keywords)
            _set_completer(action, FilesCompleter() if "action" not in keywords else None)
        if verb in _COMPOSE:
            for option, takes_folder in _OF_COMPOSE.items():
                if option not in of_verb._option_string_actions:
                    _add_option(of_verb, option, takes_folder)
        _set_completer(of_verb.add_argument("words", nargs="*"), _completer_of(verb))
    return parser


def _add_option(parser: argparse.ArgumentParser, option: str, takes_folder: bool) -> None:
    if takes_folder:
        _set_completer(parser.add_argument(option), DirectoriesCompleter())
    elif option == "--cfg":
        parser.add_argument(option, choices=("job", "hydra", "all"))
    else:
        parser.add_argument(option, action="store_true")


def _set_completer(action: Any, completer: Any) -> None:
    """As argcomplete wants it: an attribute that argparse does not know."""
    action.completer = completer


def _options(verb: str) -> Iterator[tuple[list[str], dict[str, Any]]]:
    """The options of a verb's parser, and which of them take no value; to import the verb would take seconds."""
    source = Path(__file__).with_name(f"{verb}.py").read_text()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Attribute(attr="add_argument"), args=args, keywords=keywords):
                names = [_literal(arg) for arg in args]
                is_flag = any(keyword.arg == "action" for keyword in keywords)
                if names and names[0].startswith("-"):
                    yield names, {"action": "store_true"} if is_flag else {}


def _literal(argument: ast.expr) -> str:
    """An argument as text: a literal, or the one name that verbs share, ``trust.FLAG``."""
    if isinstance(argument, ast.Constant):
        return str(argument.value)
    return "--trust"


def _completer_of(verb: str) -> Any:
    """What completes the words after a verb."""
    if verb in _COMPOSE:
        return lambda prefix, parsed_args, **_: overrides(prefix, _typed(parsed_args))
    match verb:
        case "ls":
            return lambda prefix, **_: [*shipped.groups(), *_configs("=")]
        case "cp":
            return lambda prefix, **_: _configs("/")
        case "doctor":
            return FilesCompleter((".py",))
    return DirectoriesCompleter()


def _typed(parsed: Namespace) -> list[str]:
    return list(getattr(parsed, "words", None) or [])


def _configs(between: str) -> list[str]:
    every = chain.from_iterable(shipped.groups().values())
    return [f"{config.group}{between}{config.name}" for config in every]


def overrides(prefix: str, typed: Sequence[str] = ()) -> list[str]:
    """The overrides that begin with ``prefix``: groups and keys, and behind a ``=`` what they accept.

    Args:
        prefix: what stands before the cursor.
        typed: the overrides before it, which say which recipe has the keys.

    Example:
        >>> overrides("recipe=d")
        ['recipe=dqn', 'recipe=dreamer_v1', 'recipe=dreamer_v3']
        >>> overrides("recipe.pace.", ["recipe=dqn"])
        ['recipe.pace.ratio=', 'recipe.pace.burst=', 'recipe.pace.prefill=']
        >>> overrides("recipe.compile=")
        ['recipe.compile=auto', 'recipe.compile=on', 'recipe.compile=off']
    """
    groups = shipped.groups()
    recipe = "ppo"
    for word in typed:
        if word.startswith(f"{shipped.RECIPE}="):
            recipe = word.partition("=")[2]
    key, is_set, _ = prefix.partition("=")
    if is_set and key in groups:
        return _beginning(prefix, (f"{key}={config.name}" for config in groups[key]))
    keys = dict(_keys(recipe))
    if is_set:
        return _beginning(prefix, (f"{key}={value}" for value in _values(keys.get(key, {}))))
    return _beginning(prefix, (f"{name}=" for name in (*groups, *keys)))


def _beginning(prefix: str, words: Iterator[str]) -> list[str]:
    return [word for word in words if word.startswith(prefix)]


@cache
def _schema() -> dict[str, Any]:
    whole: dict[str, Any] = json.loads((shipped.SCHEMAS / f"{shipped.RUN}.json").read_text())
    return whole


def _keys(recipe: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every key of a run with this recipe, and its schema; of an own recipe only the keys of all runs."""
    for name, schema in _schema()["properties"].items():
        if name == shipped.RECIPE:
            known = _schema()["definitions"].get(_settings_of(recipe))
            yield from _below(name, known or {"properties": {}})
        elif name == shipped.ENV:
            sections = [dict(_below(name, kind)) for kind in schema["anyOf"]]
            yield from {key: kind for section in sections for key, kind in section.items()}.items()
        elif name not in ("defaults", "hydra"):
            yield from _below(name, schema)


def _settings_of(recipe: str) -> str:
    """The recipe whose keys a config of the group ``recipe`` has, as its defaults list says; or nothing."""
    for config in shipped.groups()[shipped.RECIPE]:
        if config.name == recipe:
            text = config.path.read_text()
            if built_on := re.search(
                rf"^  - (?:/schema/recipe/)?(\w+)(?:@{shipped.RECIPE})?$", text, re.M
            ):
                base = built_on[1]
                return base if base == recipe else _settings_of(base)
    return recipe


def _below(name: str, schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    if "properties" not in schema:
        yield name, schema
    for below, of_key in schema.get("properties", {}).items():
        yield from _below(f"{name}.{below}", of_key)


def _values(schema: dict[str, Any]) -> Iterator[str]:
    """The values that a key accepts, where they can be listed."""
    for kind in schema.get("anyOf", []):
        if kind.get("type") == "boolean":
            yield from ("true", "false")
        if kind.get("type") == "null":
            yield "null"
        yield from kind.get("enum", kind.get("examples", []))
