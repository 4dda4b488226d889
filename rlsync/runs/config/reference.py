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
from rlsync.runs.config.composing import composition
from rlsync.runs.recipes.bounds import refuse
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


def reference(words: list[str], own: Path | None = None) -> list[ConfigKey]:
    """The keys of a run, in the order of the dataclasses, or those of a ``GROUP`` or ``GROUP=NAME``."""
    choices = [word for word in words if "=" in word]
    flags = [] if own is None else ["--config-dir", str(own)]
    line = command_line.read([*flags, *choices])
    with own_hydra.initialised():
        made, errors = composition(line, line.jobs[0])
    refuse([*line.errors, *errors])
    assert made is not None
    files = list(_files(made.choices, own))
    comments: dict[str, str] = {}
    for _, found in files:
        comments |= {key: text for key, text in found.items() if text or key not in comments}
    keys = list(_walk(made.config, "", comments))
    if not words:
        return keys
    named = {word.partition("=")[0] for word in words}
    set_there = {key for group, found in files if group in named for key in found}
    return [key for key in keys if key.name.partition(".")[0] in named or key.name in set_there]


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
    return " or ".join(_word(part) for part in parts if not (part == "int" and "float" in parts))


def _word(part: str) -> str:
    if part.startswith("dict["):
        return "mapping"
    if part.startswith("list["):
        inner = part[len("list[") : -1]
        if inner == RouteConfig.__name__:
            return "list of {" + ", ".join(spec.name for spec in fields(RouteConfig)) + "}"
        return f"list of {_word(inner)}"
    return _WORDS.get(part, part)


def _files(choices: Mapping[str, Any], own: Path | None) -> Iterator[tuple[str, dict[str, str]]]:
    """(group, comments) of all files that make a config, but tuned ones; the most special file comes last."""
    yield "", comments_in(shipped.config_dir() / f"{own_hydra.CONFIG_NAME}.yaml")
    groups = {group: {c.name: c for c in found} for group, found in shipped.groups(own).items()}
    for group in sorted(
        set(choices) & set(groups) - {shipped.TUNED}, key=lambda g: g == shipped.RECIPE
    ):
        yield from ((group, found) for found in _chain(groups[group], str(choices[group])))


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
    whole = option.path.read_text().startswith("# @package _global_")
    yield comments_in(option.path, "" if whole else f"{option.group}.")


def comments_in(file: Path, prefix: str = "") -> dict[str, str]:
    """Dotted key -> comment: what stands behind its value, or the block above it and the keys close below."""
    found: dict[str, str] = {}
    above: list[tuple[int, str]] = []  # the sections that the present line is in, by indent
    block: list[str] = []
    ended = False  # whether a key has ended the block of comment lines
    for line in file.read_text().splitlines():
        words = line.strip()
        if not words:
            block = []
            ended = False
        elif words.startswith("#"):
            block = [*([] if ended else block), words.removeprefix("#").removeprefix(" ")]
            ended = False
        elif match := _KEY.match(line):
            indent = len(match["indent"])
            above = [section for section in above if section[0] < indent]
            key = ".".join([*(name for _, name in above), match["key"]])
            _, behind, own = (match["value"] or "").partition(" # ")
            if behind:
                found[prefix + key] = own
            else:
                found[prefix + key] = "\n".join(block).strip("\n")
            ended = True
            if not match["value"]:
                above.append((indent, match["key"]))
                block = []
    return found


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
