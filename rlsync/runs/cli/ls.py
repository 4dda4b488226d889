"""``rlsync ls``: the recipes and configs of rlsync and of installed recipes, and the keys of a run."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from rlsync import ConfigError
from rlsync.runs.cli.main import parser_of, print_document
from rlsync.runs.config import shipped
from rlsync.runs.plain import json_of
from rlsync.seams import user_input

_EXAMPLES = """examples:
  rlsync ls
  rlsync ls recipe
  rlsync ls --spaces
  rlsync ls recipe=impala --keys
  rlsync ls recipe=mine --keys --config-dir my_configs
  rlsync ls --keys
  rlsync ls --json

choose one with rlsync train GROUP=NAME, copy one out to edit with rlsync cp GROUP/NAME

exit status: 0 listed, 2 no such group, config or folder
"""


def main(arguments: list[str]) -> int:
    about = "List the shipped recipes and configs, or the keys of a run, each with its comment."
    parser = parser_of("ls", about, _EXAMPLES)
    group = "list this group alone; GROUP=NAME or GROUP/NAME: this config alone"
    parser.add_argument("group", nargs="*", type=lambda word: word.replace("/", "=", 1), help=group)
    keys = "list keys: type, range, default and what each is for"
    parser.add_argument("--keys", action="store_true", help=keys)
    spaces = "list which observations and actions each recipe takes"
    parser.add_argument("--spaces", action="store_true", help=spaces)
    parser.add_argument(
        "--config-dir", type=Path, metavar="DIR", help="list the configs of this folder, too"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(arguments)
    folder = options.config_dir
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"no folder {str(folder)!r}", "--config-dir", "check the path")
    groups = shipped.groups(folder)
    configs: list[shipped.Shipped] = []
    words = options.group or groups
    if options.spaces:
        words = options.group or [shipped.RECIPE]
    for word in words:
        configs += _matching(word, groups)
    if options.spaces:
        _print_spaces(configs, folder, as_json=options.json)
    elif options.keys:
        _print_keys(options.group, folder, as_json=options.json)
    elif options.json:
        print_document(json_of(list(map(_facts, configs))))
    else:
        table = Table.grid(Column(no_wrap=True), Column(), padding=(0, 2))
        for config in configs:
            table.add_row(str(config), config.description())
        Console(highlight=False, markup=False).print(table)
    return 0


def _facts(config: shipped.Shipped) -> dict[str, str]:
    return {
        "group": config.group,
        "name": config.name,
        "description": config.description(),
        "path": str(config.path),
    }


def _print_keys(words: list[str], own: Path | None, *, as_json: bool) -> None:
    # It imports Hydra and torch, which listing files does not need.
    from rlsync.runs.config.reference import as_paragraphs, reference

    keys = reference(words, own)
    if as_json:
        print_document(json_of(list(map(asdict, keys))))
        return
    console = Console(highlight=False, markup=False)
    for key in keys:
        console.print(Text(key.name, "bold"), Text(key.facts()), sep="  ", soft_wrap=True)
        for paragraph in as_paragraphs(key.comment):
            console.print(Padding(Text(paragraph), (0, 0, 0, 4)))
        console.print()


def _print_spaces(configs: list[shipped.Shipped], own: Path | None, *, as_json: bool) -> None:
    # It imports Hydra and torch, as above.
    from rlsync.runs.config.reference import spaces_of

    rows = [spaces_of(config, own) for config in configs if config.group == shipped.RECIPE]
    if as_json:
        print_document(json_of(rows))
        return
    heads = list(dict.fromkeys(head for row in rows for head in row))
    table = Table(*heads, box=None, padding=(0, 2, 0, 0))
    for row in rows:
        table.add_row(*(row.get(head, "") for head in heads))
    Console(highlight=False, markup=False).print(table)


def _matching(word: str, groups: dict[str, list[shipped.Shipped]]) -> list[shipped.Shipped]:
    """The configs that ``GROUP`` or ``GROUP=NAME`` means."""
    group, _, name = word.partition("=")
    user_input.check_choice("group", group, groups, "rlsync ls GROUP")
    configs = groups[group]
    if not name:
        return configs
    user_input.check_choice(group, name, [config.name for config in configs], f"rlsync ls {word}")
    return [config for config in configs if config.name == name]
