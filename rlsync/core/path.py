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
from rlsync.core.user_input import did_you_mean, nearest_name, short


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
    """A parsed path; ``parse(str(path)) == path``."""

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
    """Parse ``text`` into a :class:`Path`; PathSyntaxError names the character that breaks the grammar."""
    if not isinstance(text, str):
        cure = "write where it stands, in quotes: 'loss_module.actor_network', or 'policy' on a collector"
        raise PathSyntaxError(f"a path is a string, got {type(text).__name__}", short(text), cure)
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
        segment = Index(int(integer.group()))
        end = integer.end()
    elif string := _STRING.match(text, inside):
        if string.group(1) is not None:
            raw = string.group(1)
        else:
            raw = string.group(2)
        segment = MappingKey(_ESCAPED.sub(r"\1", raw))
        end = string.end()
    else:
        raise _syntax(text, inside, "between '[' and ']' write an integer or a quoted key")
    if text[end : end + 1] != "]":
        raise _syntax(text, end, "close the bracket with ']'")
    return segment, end + 1


def _syntax(text: str, at: int, cure: str) -> PathSyntaxError:
    character = repr(text[at]) if at < len(text) else "the end"
    return PathSyntaxError(
        f"cannot read the path {text!r}", f"character {at + 1}, at {character}", cure
    )


def walk(
    root: Any, path: Path, *, error: type[SyncMapError], root_name: str, where: str = ""
) -> Any:
    """Follow ``path`` from ``root``; ``error`` tells which segment leads nowhere, and what exists there."""
    here = root
    for depth, segment in enumerate(path.segments):
        try:
            here = _step(here, segment)
        except (AttributeError, LookupError, TypeError) as cause:
            reached = str(Path(path.segments[:depth])) if depth else root_name
            refusal = _not_found(path, depth, here, reached=reached, where=where)
            raise error(*refusal) from cause
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
    path: Path, depth: int, here: Any, *, reached: str, where: str
) -> tuple[str, str, str]:
    """What is not there, where, and what is: the three lines of an error."""
    segment = path.segments[depth]
    after = path.segments[depth + 1 : depth + 2]
    wanted = _bare(segment)
    siblings = _siblings(here, segment)
    holders = [name for name, value in siblings.items() if _holds(value)]
    below = {
        f"{name}.{child}": child
        for name in holders
        for child, value in _siblings(siblings[name], segment).items()
        if _holds(value)
    }
    names = [*siblings, *(n for n in dir(here) if isinstance(segment, Attr) and n[0] != "_")]
    if after and _bare(after[0]) in names:
        cure = f"leave out {wanted!r}; "
    elif close := nearest_name(wanted, holders) or _begins(wanted, holders):
        cure = did_you_mean(close)
    elif close := nearest_name(wanted, below.values()) or _begins(wanted, below.values()):
        cure = did_you_mean(next(full for full, child in below.items() if child == close))
    else:
        cure = did_you_mean(nearest_name(wanted, names, 0.8))
    # What there is to choose from, the most alike first where it is much.
    has = holders or list(siblings)
    if len(has) > _SHOWN:
        has = sorted(has, key=lambda name: -difflib.SequenceMatcher(None, wanted, name).ratio())
    shown = ", ".join(has[:_SHOWN])
    if len(has) > _SHOWN:
        shown += ", ..."
    if has:
        cure += f"{reached} has: {shown}"
    else:
        cure += f"{reached} has nothing to choose from"
    place = f"path {str(path)!r}"
    if where:
        place += f", {where}"
    return f"no {wanted!r} on {reached} ({type(here).__name__})", place, cure


_SHOWN = 12


def _holds(held: Any) -> bool:
    """Whether weights are likely to be found here: it is a module, a tensor, or has some in it."""
    if isinstance(held, list | tuple | Mapping):
        return any(map(_holds, held.values() if isinstance(held, Mapping) else held))
    return hasattr(held, "_modules") or hasattr(held, "data_ptr")


def _begins(wanted: str, names: Iterable[str]) -> str:
    """The shortest name that begins like ``wanted``; or nothing."""
    return min((name for name in names if name.startswith(wanted)), key=len, default="")


def _siblings(here: Any, segment: Segment) -> dict[str, Any]:
    """What stands on an object, by name. No property is evaluated."""
    if isinstance(here, Mapping):
        return {str(key): here[key] for key in here.keys()}  # noqa: SIM118 - a tensordict iterates over its batch
    if isinstance(segment, Index) and isinstance(here, (list, tuple)):
        if here:
            return {f"[0] to [{len(here) - 1}]": None}
        return {}
    named: dict[str, Any] = {}
    for store in ("_modules", "_parameters", "_buffers", "__dict__"):
        attributes = getattr(here, store, None)
        if isinstance(attributes, Mapping):
            named |= {str(name): value for name, value in attributes.items()}
    named = named or dict.fromkeys(dir(here))
    return {name: value for name, value in named.items() if name[0] != "_" and name != "training"}
