"""``rlsync rerun``: make a run again from its schedule, and compare what was published."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

from rlsync.runs.cli.main import parser_of, print_document
from rlsync.runs.config import trust
from rlsync.runs.life.again import RunAgain, made_again
from rlsync.runs.life.output import EXIT_FAILED, output_read
from rlsync.runs.plain import json_of
from rlsync.runs.recipes.run_files import SCHEDULE

_DESCRIPTION = f"""Make a run again, bit by bit, from its config, its seed and its {SCHEDULE}. The same
workers act with the same versions, in lives of the same length, and the learner takes their rollouts in the
same order. Each version whose digest the run has recorded is compared, leaf by leaf."""

_EXAMPLES = """examples:
  rlsync rerun runs/2026-11-20/18-00-00-000000
  rlsync rerun runs/2026-11-20/18-00-00-000000 --until 4200
  rlsync rerun runs/2026-11-20/18-00-00-000000 --into again --json

exit status: 0 all digests are equal, 1 one differs or the rerun failed, 2 the run cannot be made again or a
wrong command line, 130 after Ctrl-C
"""


def main(arguments: list[str]) -> int:
    parser = parser_of("rerun", _DESCRIPTION, _EXAMPLES)
    parser.add_argument("run", type=Path, help="the run's folder, as rlsync train prints it")
    until = "stop when this version is published, with a checkpoint of that moment"
    parser.add_argument("--until", type=int, metavar="VERSION", help=until)
    first = (
        "begin with this life of a run with life_frames, or resumed in its folder; 1 is the first"
    )
    parser.add_argument("--from", type=int, metavar="LIFE", dest="first", help=first)
    into = (
        "the folder that the rerun writes to; new (default: rerun-1, -2, ... in the run's folder)"
    )
    parser.add_argument("--into", type=Path, metavar="FOLDER", help=into)
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")
    parser.add_argument(trust.FLAG, action="store_true", help=trust.HELP)
    options = parser.parse_args(arguments)
    run = RunAgain(options.run, options.trust)
    lives = run.chosen(options.first, options.until)
    folder = run.new_folder(options.into)
    ready = run.ready(lives, folder)
    folder.mkdir(parents=True)
    trust.claim(folder, options.trust)
    if not options.json:
        print(f"rerun {folder}", flush=True)
    with output_read(folder):
        comparison = made_again(ready, options.until)
    if options.until is None:
        last, _ = lives[-1]
        run.tell_without_end(last)
    # as where an environment draws from elsewhere than its seed
    if comparison.unequal and comparison.equal < 3:
        _, config = lives[0]
        print(f"look at the environment: rlsync doctor --env {config.env.word}", file=sys.stderr)
    if options.json:
        facts = {"run": str(options.run), "rerun": str(folder), **asdict(comparison)}
        print_document(json_of(facts, None))
    else:
        print(comparison)
    if comparison.is_equal:
        return 0
    return EXIT_FAILED
