"""``rlsync status``: which version each worker of a running training acts with, asked from outside.

Loads torch for the board's memory file, and nothing of TorchRL: it answers while a machine is busy.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from rlsync.core.errors import ConfigError
from rlsync.recipes.run_files import BOARD
from rlsync.transport.board.handle import BoardHandle
from rlsync.transport.board.watch import BoardWatch
from rlsync.transport.shared_file import FileAddress

_EXAMPLES = """examples:
  rlsync status runs/2026-11-20/18-00-00-000000
  rlsync status --json runs/2026-11-20/18-00-00-000000

exit status: 0 all workers live, 1 one is dead or the run has ended, 2 not a run folder
"""


def main(arguments: list[str]) -> int:
    """Print one line a worker, or JSON.

    Raises:
        ConfigError: the folder is not that of a run with a board.
        BoardClosed: the run has ended.
    """
    parser = argparse.ArgumentParser(
        prog="rlsync status",
        description="Tell which version each worker of a running training acts with, and whether it lives.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, help="the run's folder, as rlsync train prints it")
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")
    given = parser.parse_args(arguments)
    watch = BoardWatch(*handle_in(given.run).open())
    workers = watch.status()
    if given.json:
        print(json.dumps({"version": watch.version, "workers": [asdict(w) for w in workers]}, indent=2))
    else:
        print(f"newest version {watch.version}")
        for worker in workers:
            print(worker)
    return 0 if workers and all(worker.alive for worker in workers) else 1


def handle_in(run: Path) -> BoardHandle:
    """The address of the board that a run left in its folder.

    Raises:
        ConfigError: there is none.
    """
    file = run / BOARD
    if not file.is_file():
        raise ConfigError(
            f"no {BOARD} in {run}", "rlsync status", "name the folder that rlsync train printed as 'run'"
        )
    found = json.loads(file.read_text())
    return BoardHandle(FileAddress(**found["address"]), found["board_id"])
