"""Paths: how a sync map names a module, on the trainer and on the collector.

Grammar (no code is ever evaluated)::

    path     = name { "." name | "." digits | "[" integer "]" | "[" string "]" }
    name     = a Python identifier that does not begin with "__"
    string   = a quoted key, '...' or "...", with \\\\ and \\' escaped

``a.module[0].b`` and ``a.module.0.b`` are the same path.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rlsync.core.errors import PathSyntaxError, SyncMapError


@dataclass(frozen=True, slots=True)
class Attr:
    """An attribute, ``.name``."""

    name: str

    def __str__(self) -> str:
        return f".{self.name}"


@dataclass(frozen=True, slots=True)
class Index:
    """A position, ``[0]`` or ``.0``."""

    at: int

    def __str__(self) -> str:
        return f"[{self.at}]"


@dataclass(frozen=True, slots=True)
class MappingKey:
    """A mapping key, ``['k']``."""

    key: str

    def __str__(self) -> str:
        escaped = self.key.replace("\\", "\\\\").replace("'", "\\'")
        return f"['{escaped}']"


Segment = Attr | Index | MappingKey


@dataclass(frozen=True, slots=True)
class Path:
    """A parsed path; ``parse(str(path)) == path``.

    Example:
        >>> parse("loss_module.actor_network")
        Path('loss_module.actor_network')
        >>> parse("a.module.0.b") == parse("a.module[0].b")
        True
    """

    segments: tuple[Segment, ...]

    def __str__(self) -> str:
        return "".join(str(s) for s in self.segments).removeprefix(".")

    def __repr__(self) -> str:
        return f"Path({str(self)!r})"

    def startswith(self, other: Path) -> bool:
        """Whether ``other`` is this path or an ancestor of it."""
        return self.segments[: len(other.segments)] == other.segments

    def leaf_prefix(self) -> str:
        """This path as ``nn.Module.named_parameters`` would write it: names joined by dots."""
        return ".".join(_bare(s) for s in self.segments)

    def below(self, ancestor: Path) -> Path:
        """The part of this path that comes after ``ancestor``."""
        return Path(self.segments[len(ancestor.segments) :])


def _bare(segment: Segment) -> str:
    match segment:
        case Attr(name):
            return name
        case Index(at):
            return str(at)
        case MappingKey(key):
            return key


_DIGITS = re.compile(r"[0-9]{1,600}")  # int() refuses texts of 640 digits or more
_INTEGER = re.compile(r"-?[0-9]{1,600}")
_STRING = re.compile(r"""'((?:[^'\\]|\\.)*)'|"((?:[^"\\]|\\.)*)\"""", re.DOTALL)
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)


def parse(text: str) -> Path:
    """Parse ``text`` into a :class:`Path`; PathSyntaxError names the character that breaks the grammar.

    Example:
        >>> str(parse("a['k'].module.0"))
        "a['k'].module[0]"
    """
    if not isinstance(text, str):
        raise PathSyntaxError(
            f"a path is a string, got {type(text).__name__}", repr(text), "write it in quotes"
        )
    segments: list[Segment] = []
    at = 0
    while at < len(text) or not segments:
        segment, at = _next_segment(text, at, first=not segments)
        segments.append(segment)
    return Path(tuple(segments))


def _next_segment(text: str, at: int, *, first: bool) -> tuple[Segment, int]:
    if text[at : at + 1] == "[" and not first:
        return _bracket(text, at)
    if not first:
        if text[at] != ".":
            raise _syntax(text, at, "write '.' before a name, or '[...]' for an index or a key")
        at += 1
    if not first and (digits := _DIGITS.match(text, at)):
        return Index(int(digits.group())), digits.end()
    end = at
    while end < len(text) and ("_" * (end > at) + text[end]).isidentifier():
        end += 1
    if end == at:
        raise _syntax(text, at, "a name is expected here; quote other keys like ['this']")
    if text.startswith("__", at):
        raise _syntax(text, at, "names that begin with '__' are refused")
    return Attr(text[at:end]), end


def _bracket(text: str, at: int) -> tuple[Segment, int]:
    inside = at + 1
    segment: Segment
    if integer := _INTEGER.match(text, inside):
        segment, end = Index(int(integer.group())), integer.end()
    elif string := _STRING.match(text, inside):
        raw = string.group(1) if string.group(1) is not None else string.group(2)
        segment, end = MappingKey(_ESCAPED.sub(r"\1", raw)), string.end()
    else:
        raise _syntax(text, inside, "between '[' and ']' write an integer or a quoted key")
    if text[end : end + 1] != "]":
        raise _syntax(text, end, "close the bracket with ']'")
    return segment, end + 1


def _syntax(text: str, at: int, cure: str) -> PathSyntaxError:
    found = repr(text[at]) if at < len(text) else "the end"
    return PathSyntaxError(f"cannot read the path {text!r}", f"character {at + 1}, at {found}", cure)


def walk(root: Any, path: Path, *, error: type[SyncMapError], root_name: str, where: str = "") -> Any:
    """Follow ``path`` from ``root``, the trainer or the collector, and return the object at its end.

    Properties on the path are evaluated, as in any attribute access. No other code runs. If a segment leads
    nowhere, an ``error`` is raised that names it, what exists there, and the nearest match; it calls the root
    ``root_name``, and the place in the user's map ``where``.
    """
    here = root
    for depth, segment in enumerate(path.segments):
        try:
            here = _step(here, segment)
        except (AttributeError, LookupError, TypeError) as cause:
            reached = str(Path(path.segments[:depth])) if depth else root_name
            raise _not_found(path, segment, here, reached, error, where) from cause
    return here


def _step(here: Any, segment: Segment) -> Any:
    match segment:
        case Attr(name):
            return getattr(here, name)
        case MappingKey(key):
            return here[key]
        case Index(at):
            try:
                return here[at]
            except (LookupError, TypeError):
                return getattr(here, str(at))  # a module's child may be named "0"


def _not_found(
    path: Path,
    segment: Segment,
    here: Any,
    reached: str,
    error: type[SyncMapError],
    where: str,
) -> SyncMapError:
    wanted = _bare(segment)
    siblings = _siblings(here, segment)
    nearest = nearest_name(wanted, siblings)
    if not nearest and isinstance(segment, Attr):
        nearest = nearest_name(wanted, [n for n in dir(here) if not n.startswith("_")])
    cure = did_you_mean(nearest)
    if len(siblings) > _SHOWN:
        siblings = sorted(siblings, key=lambda name: -_likeness(wanted, name))
    shown = ", ".join(siblings[:_SHOWN]) + (", ..." if len(siblings) > _SHOWN else "")
    cure += f"{reached} has: {shown}" if siblings else f"{reached} has nothing to choose from"
    what = f"no {wanted!r} on {reached} ({type(here).__name__})"
    place = f"path {str(path)!r}" + (f", {where}" if where else "")
    return error(what, place, cure)


_SHOWN = 12


def _likeness(wanted: str, name: str) -> float:
    return difflib.SequenceMatcher(None, wanted, name).ratio()


def _siblings(here: Any, segment: Segment) -> list[str]:
    if isinstance(here, Mapping):
        return [str(k) for k in here.keys()]  # noqa: SIM118 - a tensordict iterates over its batch
    if isinstance(segment, Index) and isinstance(here, (list, tuple)):
        return [f"[0] to [{len(here) - 1}]"] if here else []
    names: dict[str, None] = {}
    for store in ("_modules", "_parameters", "_buffers"):
        held = getattr(here, store, None)
        if isinstance(held, Mapping):
            names.update(dict.fromkeys(str(k) for k in held))
    names.update(dict.fromkeys(getattr(here, "__dict__", {})))
    if not names:
        names.update(dict.fromkeys(dir(here)))
    return [n for n in names if not n.startswith("_") and n != "training"]


def nearest_name(wanted: str, offered: Iterable[str]) -> str:
    """The offered name closest to ``wanted``, or an empty string."""
    close = difflib.get_close_matches(wanted, list(offered), n=1, cutoff=0.6)
    return close[0] if close else ""


def did_you_mean(name: str) -> str:
    """The first words of a cure; an empty string if no name is near."""
    return f"did you mean {name!r}? " if name else ""
