"""A row of a table: its name, and what fills it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Cells = dict[str, str]


@dataclass(frozen=True)
class Row:
    """One row.

    Args:
        table: which table it is in.
        name: its first columns.
        observe: runs it, and says what was seen, by column.
    """

    table: str
    name: tuple[str, ...]
    observe: Callable[[], Cells]
