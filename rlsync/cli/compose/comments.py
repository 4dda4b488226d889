"""The comments of a YAML file, by key. They are the one place that explains a key to a person."""

from __future__ import annotations

import re
from pathlib import Path

_KEY = re.compile(r"(?P<indent> *)(?P<key>[\w.]+):(?P<value> .*)?$")


def comments_in(file: Path, prefix: str = "") -> dict[str, str]:
    """What a file says of its keys.

    A comment belongs to the key below it, and to all keys that follow without an empty line. A comment behind
    a value belongs to that key alone. Entries of lists have no comments of their own.

    Args:
        file: of a config.
        prefix: is written before every key, for example ``"recipe."``.

    Returns:
        dotted key -> comment, its lines as in the file. Keys without a comment map to an empty text.

    Example:
        >>> from rlsync.cli.compose.config_dir import config_dir
        >>> found = comments_in(config_dir() / "recipe" / "impala.yaml")
        >>> found["recipe.unroll_length"], found["recipe.model.lstm"]
        ('Steps in one unroll. The paper has 20.', 'Units of the LSTM; 0: no LSTM.')
    """
    found: dict[str, str] = {}
    above: list[tuple[int, str]] = []  # the sections that the present line is in, by indent
    block: list[str] = []
    ended = False  # whether a key has ended the block of comment lines
    for line in file.read_text().splitlines():
        words = line.strip()
        if not words:
            block, ended = [], False
        elif words.startswith("#"):
            block = [words] if ended else [*block, words]
            ended = False
        elif match := _KEY.match(line):
            indent = len(match["indent"])
            above = [section for section in above if section[0] < indent]
            key = ".".join([*(name for _, name in above), match["key"]])
            _, behind, own = (match["value"] or "").partition(" # ")
            found[prefix + key] = own if behind else _text(block)
            ended = True
            if not match["value"]:
                above.append((indent, match["key"]))
                block = []
    return found


def _text(block: list[str]) -> str:
    lines = [line.removeprefix("#").removeprefix(" ").rstrip() for line in block]
    return "\n".join(lines).strip("\n")


def as_paragraphs(comment: str) -> list[str]:
    """A comment as paragraphs: each is one long line, or lines of code, which are indented.

    Example:
        >>> as_paragraphs("Arguments for\\ngymnasium. Add one:\\n  +env.kwargs.a=1")
        ['Arguments for gymnasium. Add one:', '  +env.kwargs.a=1']
    """
    paragraphs: list[str] = []
    joins = False
    for line in comment.splitlines():
        if not line.strip():
            joins = False
        elif line.startswith("  "):
            paragraphs.append(line)
            joins = False
        elif joins:
            paragraphs[-1] += " " + line
        else:
            paragraphs.append(line)
            joins = True
    return paragraphs
