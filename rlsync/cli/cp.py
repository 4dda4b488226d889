"""``rlsync cp``: copy a shipped config, for the user to edit."""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
from pathlib import Path

from rlsync.cli.compose import shipped
from rlsync.cli.compose.shipped import Shipped
from rlsync.core.errors import ConfigError

_EXAMPLES = """examples:
  rlsync cp recipe/ppo
  rlsync cp env/pong configs --as my_breakout

The copy needs a new name, because Hydra searches the shipped configs first. rlsync cp prints the commands
that use the copy.

exit status: 0 copied, 2 no such config, an impossible name, or the file exists already
"""


def main(arguments: list[str]) -> int:
    """Copy one file, and print the commands that use the copy."""
    parser = argparse.ArgumentParser(
        prog="rlsync cp",
        description="Copy a shipped config, to edit it.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", metavar="GROUP/NAME", help="as rlsync ls lists it")
    parser.add_argument(
        "folder",
        metavar="FOLDER",
        type=Path,
        nargs="?",
        default=Path("my_configs"),
        help="default: my_configs",
    )
    parser.add_argument("--as", dest="name", metavar="NAME", help="the copy's name; default: my_NAME")
    parser.add_argument("--force", action="store_true", help="replace the file if it exists")
    given = parser.parse_args(arguments)
    config = shipped.find(given.config)
    name = _checked_name(given.name or f"my_{config.name}", config)
    copy = given.folder / config.group / f"{name}.yaml"
    if copy.exists() and not given.force:
        raise ConfigError(f"{copy} exists", "rlsync cp", "add --force to replace it, or --as NAME")
    copy.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(config.path, copy)
    print(f"copied {config} to {copy}; use it with")
    for beside in shipped.companions(config):
        command = ["rlsync", "train", "--config-dir", str(given.folder), f"{config.group}={name}", *beside]
        print(f"  {shlex.join(command)}")
    return 0


def _checked_name(name: str, config: Shipped) -> str:
    if not re.fullmatch(r"[A-Za-z_][\w-]*", name):
        raise ConfigError(f"a config cannot be named {name!r}", "--as", "use letters, digits, _ and -")
    if name in [other.name for other in shipped.groups()[config.group]]:
        raise ConfigError(
            f"a shipped config is already named {config.group}/{name}, and Hydra would find that one first",
            f"--as {name}",
            f"choose another name, for example my_{name}",
        )
    return name
