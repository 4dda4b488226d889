"""What installed packages add to rlsync, by entry points: found by name, imported when it is used."""

from __future__ import annotations

import sys
from collections.abc import Collection
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from rlsync.core.errors import ConfigError, first_line

#: ``a2c = "my_package:RECIPE"``.
RECIPES = "rlsync.recipes"
#: ``tcp = "my_package:TcpTransport"``: what makes a transport, without arguments.
TRANSPORTS = "rlsync.transports"

BOARD = "board"  #: rlsync's own transport, the default

#: Packages of 0.1 that have moved, and where to.
MOVED = {
    "rlsync.recipes": "rlsync.runs.recipes",
    "rlsync.workers": "rlsync.runs.actors",
    "rlsync.evaluation": "rlsync.runs.evaluation",
    "rlsync.cli": "rlsync.runs.cli",
}


def installed(group: str, shipped: Collection[str] = ()) -> dict[str, EntryPoint]:
    """The entry points of a group by name, not imported. A ``shipped`` name cannot be taken over."""
    points = {point.name: point for point in _points(group, *sys.path)}
    return {name: point for name, point in sorted(points.items()) if name not in shipped}


@cache
def _points(group: str, *_: str) -> tuple[EntryPoint, ...]:  # 12 ms, and one command asks ten times
    return tuple(entry_points(group=group))


def imported(point: EntryPoint, what: str, cure: str = "") -> Any:
    """What an entry point names; ConfigError, which calls it ``what``, if it cannot be imported."""
    where = f"{what} {point.name!r}, at {point.value}"
    try:
        return point.load()
    except (ImportError, AttributeError) as error:
        ours = f"install what is missing; python -c 'import {point.module}' shows the line"
        if isinstance(error, AttributeError):
            ours = f"name what {point.module} has, in the entry point"
        if isinstance(error, ModuleNotFoundError) and error.name in MOVED:
            cure = f"write {MOVED[error.name]} in {point.module}: {error.name} has moved"
        raise ConfigError(
            f"a {what} cannot be imported: {first_line(error)}", where, cure or ours
        ) from error
    except Exception as error:  # the code of the module may raise anything
        problem = f"importing a {what} raised {type(error).__name__}: {first_line(error)}"
        cure = f"correct the module; python -c 'import {point.module}' shows the line"
        raise ConfigError(problem, where, cure) from error


def transports() -> dict[str, EntryPoint]:
    """Every transport that can be chosen by its name, not imported."""
    board = EntryPoint(BOARD, "rlsync.transport.board:BoardWriter", TRANSPORTS)
    return {BOARD: board, **installed(TRANSPORTS, [BOARD])}
