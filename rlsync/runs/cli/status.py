"""``rlsync status``: which version each worker of a running training acts with, or how the run has ended.

Loads torch for the board's memory file, and nothing of TorchRL: it answers while a machine is busy.
"""

from __future__ import annotations

from pathlib import Path

from rlsync import ConfigError, RlsyncError
from rlsync.runs.cli.main import parser_of, print_document
from rlsync.runs.life.accounts import told_with_account
from rlsync.runs.life.state import status_of
from rlsync.runs.plain import json_of
from rlsync.runs.recipes import run_files as files
from rlsync.seams import first_line, printable

_EXAMPLES = """examples:
  rlsync status runs/2026-11-20/18-00-00-000000
  rlsync status --watch runs/2026-11-20/18-00-00-000000   until the run has ended
  rlsync status --json runs/2026-11-20/18-00-00-000000
  rlsync status --schema

exit status: 0 no worker is dead, 1 one is or the run does not go on, 2 not a run folder;
with --watch 0 the run ended well, 1 it failed or was killed, 130 after Ctrl-C
"""


def main(arguments: list[str]) -> int:
    parser = parser_of(
        "status",
        "Tell which version each worker of a running training acts with, and whether it lives. "
        "Of a run that has ended, tell when and how.",
        _EXAMPLES,
    )
    parser.add_argument(
        "run", type=Path, nargs="?", help="the run's folder, as rlsync train prints it"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--watch", action="store_true", help="show it again and again, until the run has ended"
    )
    form.add_argument("--json", action="store_true", help="print JSON instead of lines")
    schema = "print the JSON schema of the statistics that a run writes"
    form.add_argument("--schema", action="store_true", help=schema)
    options = parser.parse_args(arguments)
    if options.schema:
        print_document(json_of(files.statistics_schema()))
        return 0
    if options.run is None:
        parser.error("the following arguments are required: run")
    try:
        if options.watch:
            from rlsync.runs.cli.watch import watch

            return watch(options.run)
        status = status_of(options.run)
    except RlsyncError:
        raise
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        problem = f"cannot read what the run wrote of itself: {first_line(error)}"
        raise ConfigError(problem, str(options.run), "use the rlsync that wrote it") from error
    if options.json:
        print_document(json_of(status.to_dict()))
    else:
        print(printable(told_with_account(options.run, status)))
    if status.healthy:
        return 0
    return 1
