"""``rlsync compare``: find the first version and leaf in which two runs differ."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from rlsync.runs.cli.main import parser_of, print_document
from rlsync.runs.life.output import EXIT_FAILED
from rlsync.runs.life.run_folder import RecordedRun
from rlsync.runs.plain import json_of
from rlsync.seams import schedule

_EXAMPLES = """examples:
  rlsync compare runs/a runs/b
  rlsync compare runs/a runs/a/rerun-1 --json

Versions are compared that were published after as many optimizer steps, also where a resumed run gave them
other numbers.

exit status: 0 all digests of both are equal, 1 one differs, or a run has some for which the other has none,
2 a schedule cannot be read or a wrong command line
"""


def main(arguments: list[str]) -> int:
    about = "Compare the recorded digests of two runs, version by version and leaf by leaf."
    parser = parser_of("compare", about, _EXAMPLES)
    parser.add_argument("one", type=Path, help="a run's folder")
    parser.add_argument("other", type=Path, help="another one's")
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")
    options = parser.parse_args(arguments)
    runs = []
    for folder in (options.one, options.other):
        run = RecordedRun(folder)
        run.tell_without_end(run.lives[-1])
        runs.append(run)
    one, other = runs
    comparison = schedule.runs_compared(one.lives, other.lives)
    if options.json:
        print_document(json_of(asdict(comparison), None))
    else:
        print(comparison)
    if comparison.is_equal:
        return 0
    return EXIT_FAILED
