"""``rlsync ls``: the recipes and configs that come with rlsync and with installed recipes."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from rlsync.cli.compose import shipped
from rlsync.core.errors import ConfigError
from rlsync.core.path import did_you_mean, nearest_name

_EXAMPLES = """examples:
  rlsync ls
  rlsync ls recipe
  rlsync ls recipe --config-dir my_configs
  rlsync ls --json

choose one with rlsync train GROUP=NAME, copy one out to edit with rlsync cp GROUP/NAME

exit status: 0 listed, 2 no such group or folder
"""


def main(arguments: list[str]) -> int:
    """Print each config with what it says of itself.

    Raises:
        ConfigError: there is no such group.
    """
    parser = argparse.ArgumentParser(
        prog="rlsync ls",
        description="List the shipped recipes and configs.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("group", nargs="?", help="list this group alone")
    parser.add_argument("--config-dir", type=Path, metavar="DIR", help="list the configs of this folder, too")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    given = parser.parse_args(arguments)
    groups = _chosen(given.group, given.config_dir)
    found = [config for options in groups.values() for config in options]
    if given.json:
        rows = [
            {"group": c.group, "name": c.name, "description": c.description(), "path": str(c.path)}
            for c in found
        ]
        print(json.dumps(rows, indent=2))
        return 0
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column()
    for config in found:
        table.add_row(str(config), config.description())
    Console(highlight=False, markup=False).print(table)
    return 0


def _chosen(group: str | None, own: Path | None) -> dict[str, list[shipped.Shipped]]:
    if own is not None and not own.is_dir():
        raise ConfigError(f"no folder {str(own)!r}", "--config-dir", "check the path")
    groups = shipped.groups(own)
    if group is None:
        return groups
    if group not in groups:
        hint = did_you_mean(nearest_name(group, groups))
        raise ConfigError(f"no group {group!r}", "rlsync ls GROUP", f"{hint}groups: {', '.join(groups)}")
    return {group: groups[group]}
