"""What every key of a config is: its type, its value, what it accepts, and its comment in a YAML file."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rlsync.runs.config import command_line, own_hydra, shipped
from rlsync.runs.config.composing import Composition, composition
from rlsync.runs.recipes.bounds import refuse
from rlsync.runs.recipes.registry import recipe_of
from rlsync.runs.recipes.settings import RouteConfig

#: A line of a YAML file that sets a key.
_KEY = re.compile(r"(?P<indent> *)(?P<key>[\w.]+):(?P<value> .*)?$")

#: Types as a person writes their values in YAML.
_WORDS = {
    "str": "text",
    "bool": "true or false",
    "int": "whole number",
    "float": "number",
    "None": "null",
}
_WORDS |= {"DeviceOrList": "text or list of text"}


@dataclass(frozen=True, slots=True)
class ConfigKey:
    """One key of a config, or one section of keys."""

    name: str  # dotted, as an override names it
    type: str  # in words; empty for a section
    value: Any  # what a run has if nobody overrides it
    accepts: str  # its bounds, or the choices; empty if there are none beyond the type
    comment: str  # of the YAML file, its lines as they stand there

    @property
    def is_section(self) -> bool:
        """Whether it has keys below it, and no value."""
        return not self.type

    def facts(self) -> str:
        """Type, range and default in one line; empty for a section."""
        if self.is_section:
            return ""
        if isinstance(self.value, str) and self.value:
            value = self.value
        else:
            value = json.dumps(self.value)
        accepts = self.accepts
        if not accepts.startswith("one of"):
            if accepts:
                accepts = f"{self.type}, {accepts.removeprefix('a number ')}"
            else:
                accepts = self.type
        return f"{accepts}; default {value}"


def reference(words: list[str], config_dir: Path | None = None) -> list[ConfigKey]:
    """The keys of a run, in the order of the dataclasses, or those of a ``GROUP`` or ``GROUP=NAME``."""
    composed = _composed([word for word in words if "=" in word], config_dir)
    named = {word.partition("=")[0] for word in words}
    comments: dict[str, str] = {}
    set_there: set[str] = set()  # by the files of a group that is named
    for group, of_file in _files(composed.choices, config_dir):
        for key, comment in of_file.items():
            if comment or key not in comments:
                comments[key] = comment
        if group in named:
            set_there.update(of_file)
    keys = list(_walk(composed.config, "", comments))
    if not words:
        return keys
    return [key for key in keys if key.name.partition(".")[0] in named or key.name in set_there]


def _composed(words: list[str], config_dir: Path | None) -> Composition:
    arguments = [*words]
    if config_dir is not None:
        arguments += ["--config-dir", str(config_dir)]
    line = command_line.read(arguments)
    with own_hydra.initialised():
        composed, errors = composition(line, line.jobs[0])
    refuse([*line.errors, *errors])
    assert composed is not None
    return composed


def spaces_of(recipe: shipped.Shipped, config_dir: Path | None = None) -> dict[str, str]:
    """Which observations and actions the recipe of a config takes, by column; empty where it takes none.

    Args:
        recipe: a config of the group ``recipe``.
        config_dir: a folder with further configs.

    Raises:
        ConfigError: the file cannot be read, or names no recipe.
    """
    config = _composed([f"{shipped.RECIPE}={recipe.name}"], config_dir).config
    takes = recipe_of(config).takes
    row = {"recipe": recipe.name}
    if takes is None:
        row["vectors, choices, Dict"] = "its own probe says"
    else:
        row |= takes.cells()
    keys = {key.name for key in _walk(config.recipe, "", {})}
    row["LSTM"] = "yes" if "model.lstm" in keys else ""
    return row


def _walk(config: Any, prefix: str, comments: dict[str, str]) -> Iterator[ConfigKey]:
    for spec in fields(config):
        name = prefix + spec.name
        value = getattr(config, spec.name)
        comment = comments.get(name, "")
        if spec.name.startswith("_"):
            continue
        if is_dataclass(value):
            if comment:
                yield ConfigKey(name, "", None, "", comment)
            yield from _walk(value, name + ".", comments)
        else:
            accepts = str(spec.metadata.get("bound", ""))
            yield ConfigKey(name, _in_words(spec.type), _plain(value), accepts, comment)


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return value


def _in_words(annotation: Any) -> str:
    """A field's type, as text: ``list[int] | None`` is "list of whole number or null"."""
    if isinstance(annotation, str):
        text = annotation
    else:
        text = inspect.formatannotation(annotation)
    parts = text.split(" | ")
    if "float" in parts and "int" in parts:
        parts.remove("int")
    return " or ".join(map(_word, parts))


def _word(part: str) -> str:
    if part.startswith("dict["):
        return "mapping"
    if part.startswith("list["):
        inner = part[len("list[") : -1]
        if inner == RouteConfig.__name__:
            return "list of {" + ", ".join(spec.name for spec in fields(RouteConfig)) + "}"
        return f"list of {_word(inner)}"
    return _WORDS.get(part, part)


def _files(
    choices: Mapping[str, Any], config_dir: Path | None
) -> Iterator[tuple[str, dict[str, str]]]:
    """(group, comments) of all files that make a config, but tuned ones; the most special file comes last."""
    yield "", comments_in(shipped.config_dir() / f"{own_hydra.CONFIG_NAME}.yaml")
    groups = shipped.groups(config_dir)
    chosen = set(choices) & set(groups) - {shipped.TUNED}
    for group in sorted(chosen, key=lambda g: g == shipped.RECIPE):
        options = {option.name: option for option in groups[group]}
        for comments in _chain(options, str(choices[group])):
            yield group, comments


def _chain(options: dict[str, shipped.Shipped], name: str) -> Iterator[dict[str, str]]:
    """The comments of an option's file, after those of the files of its group that it builds on."""
    if name not in options:
        return
    option = options[name]
    content = OmegaConf.load(option.path)
    assert isinstance(content, DictConfig)
    for entry in content.get("defaults", []):
        if isinstance(entry, str) and entry in options and entry != name:
            yield from _chain(options, entry)
    if option.path.read_text().startswith("# @package _global_"):
        yield comments_in(option.path)
    else:
        yield comments_in(option.path, f"{option.group}.")


def comments_in(file: Path, prefix: str = "") -> dict[str, str]:
    """Dotted key -> comment: what stands behind its value, or the block above it and the keys close below."""
    comments: dict[str, str] = {}
    above: list[tuple[int, str]] = []  # the sections that the present line is in, by indent
    block: list[str] = []
    ended = False  # whether a key has ended the block of comment lines
    for line in file.read_text().splitlines():
        words = line.strip()
        if not words:
            block = []
            ended = False
        elif words.startswith("#"):
            if ended:
                block = []
            block.append(words.removeprefix("#").removeprefix(" "))
            ended = False
        elif match := _KEY.match(line):
            indent = len(match["indent"])
            while above and above[-1][0] >= indent:
                above.pop()
            key = ".".join([*(name for _, name in above), match["key"]])
            _, behind, comment = (match["value"] or "").partition(" # ")
            if not behind:
                comment = "\n".join(block).strip("\n")
            comments[prefix + key] = comment
            ended = True
            if not match["value"]:
                above.append((indent, match["key"]))
                block = []
    return comments


def as_paragraphs(comment: str) -> list[str]:
    """A comment as paragraphs: each is one long line, or lines of code, which are indented."""
    paragraphs: list[str] = []
    joins = False
    for line in comment.splitlines():
        is_text = bool(line.strip()) and not line.startswith("  ")
        if is_text and joins:
            paragraphs[-1] += " " + line
        elif line.strip():
            paragraphs.append(line)
        joins = is_text
    return paragraphs
