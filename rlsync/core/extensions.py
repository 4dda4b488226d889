"""What installed packages add to rlsync: an entry point has a name and is imported when it is used."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from rlsync.core.errors import ConfigError, first_line
from rlsync.core.path import did_you_mean, nearest_name

#: ``tcp = "my_package:TcpTransport"``: what makes a transport, without arguments.
TRANSPORTS = "rlsync.transports"
#: ``mine = "my_package:make"``: ``make(exp_name=..., log_dir=..., **logger.kwargs)`` makes a TorchRL Logger.
LOGGERS = "rlsync.loggers"
#: ``a2c = "my_package:RECIPE"``.
RECIPES = "rlsync.recipes"


def installed(group: str, shipped: Collection[str] = ()) -> dict[str, EntryPoint]:
    """The entry points of a group by name, not imported. A ``shipped`` name cannot be taken over."""
    found = {point.name: point for point in entry_points(group=group)}
    return {name: point for name, point in sorted(found.items()) if name not in shipped}


def imported(point: EntryPoint, what: str, cure: str = "install the package that has it") -> Any:
    """What an entry point names; ConfigError, which calls it ``what``, if it cannot be imported."""
    try:
        return point.load()
    except (ImportError, AttributeError, SyntaxError) as error:
        raise ConfigError(
            f"a {what} cannot be imported: {first_line(error)}",
            f"{what} {point.name!r}, at {point.value}",
            cure,
        ) from error


def unknown(what: str, name: str, where: str, known: Iterable[str]) -> ConfigError:
    """The error for a name that neither rlsync nor an installed package has."""
    names = list(known)
    hint = did_you_mean(nearest_name(name, names))
    return ConfigError(f"no {what} is named {name!r}", where, f"{hint}{what}s: {', '.join(names)}")
