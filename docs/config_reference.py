"""Writes the lists of docs/config_keys.md. Sphinx calls it when it builds the page."""

from __future__ import annotations

import re

from rlsync.runs.config import shipped
from rlsync.runs.config.reference import ConfigKey, as_paragraphs, reference

#: A block of the page: ``GROUP=NAME``, or ``GROUP`` for all its options, or nothing for the keys of no group.
BLOCK = re.compile(r"^```\{config-keys\}\n(.*?)\n?```$", re.MULTILINE)


def with_keys(page: str) -> str:
    """The page with a list of keys in the place of each block."""
    return BLOCK.sub(lambda block: listed(block[1]), page)


def listed(word: str) -> str:
    """The Markdown list that one block stands for."""
    groups = shipped.groups()
    if not word:
        return as_markdown(
            [key for key in reference([]) if key.name.partition(".")[0] not in groups]
        )
    if "=" in word:
        return as_markdown(reference([word]))
    parts: list[str] = []
    shown: list[ConfigKey] = []
    for option in groups[word]:
        keys = reference([f"{word}={option.name}"])
        told = [key for key in keys if key not in shown]
        but = f"; all other keys are as with `{word}={groups[word][0].name}`" if shown else ""
        parts.append(
            f"**{word}={option.name}**: {option.description()}{but}.\n\n{as_markdown(told)}"
        )
        shown = shown or keys
    return "\n\n".join(parts)


def as_markdown(keys: list[ConfigKey]) -> str:
    """A definition list: the key, then its type, range and default, then its comment."""
    return "\n\n".join(f"`{key.name}`\n: " + "\n\n  ".join(_lines(key)) for key in keys)


def _lines(key: ConfigKey) -> list[str]:
    facts = key.facts().replace("default ", "default `") + "`" if key.facts() else "(a section)"
    words = [
        f"`{line.strip()}`" if line.startswith("  ") else line
        for line in as_paragraphs(key.comment)
    ]
    return [
        facts.replace("<", "&lt;"),
        *(line.replace("<", "&lt;").replace("*", "\\*") for line in words),
    ]
