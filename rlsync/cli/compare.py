"""``rlsync compare``: find the first version and leaf in which two runs differ."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from rlsync.cli.main import EXIT_FAILED, parser_of
from rlsync.cli.run_folder import tell_without_end
from rlsync.core.schedule import Life, compared, lives_in
from rlsync.recipes.run_files import SCHEDULE

_EXAMPLES = """examples:
  rlsync compare runs/a runs/b
  rlsync compare runs/a runs/a/rerun-1 --json

exit status: 0 all versions that both have digests of are equal, 1 one differs or there is none, 2 a schedule
cannot be read or a wrong command line
"""


def main(arguments: list[str]) -> int:
    about = "Compare the recorded digests of two runs, version by version and leaf by leaf."
    parser = parser_of("compare", about, _EXAMPLES)
    parser.add_argument("one", type=Path, help="a run's folder")
    parser.add_argument("other", type=Path, help="another one's")
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")
    given = parser.parse_args(arguments)
    found = compared(_whole(given.one), _whole(given.other))
    print(json.dumps(asdict(found)) if given.json else found)
    return EXIT_FAILED if found.unequal or not found.equal else 0


def _whole(run: Path) -> Life:
    """All lives of a run as one: version numbers never come twice."""
    whole, *later = lives = lives_in(run / SCHEDULE)
    tell_without_end(run, lives[-1])
    for life in later:
        whole.events += life.events
        whole.digests |= life.digests
    return whole
