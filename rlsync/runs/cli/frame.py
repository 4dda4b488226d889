"""``rlsync frame``: make one frame of a run again, and tell who acted in it, on what, and how."""

from __future__ import annotations

import argparse
from pathlib import Path
from textwrap import shorten

from rlsync import ConfigError
from rlsync.runs.cli.main import parser_of, print_document
from rlsync.runs.config import trust
from rlsync.runs.life.again import RunAgain, frame_again
from rlsync.runs.life.output import EXIT_FAILED
from rlsync.runs.plain import json_of

_DESCRIPTION = """Tell which version acted in one frame of a run, what it saw, and what it did. The run is
made again up to that batch, as by rlsync rerun; what the run has kept of the frame is compared."""

_EXAMPLES = """examples:
  rlsync frame runs/2026-11-20/18-00-00-000000 83412
  rlsync frame runs/2026-11-20/18-00-00-000000 --worker 1 --rollout 12 --step 3 --json

exit status: 0 all that the run has kept is equal, 1 something differs or the rerun failed, 2 no such frame,
the run cannot be made again, or a wrong command line, 130 after Ctrl-C
"""


def main(arguments: list[str]) -> int:
    options = _parser().parse_intermixed_args(arguments)
    place = (options.worker, options.rollout, options.step, options.env)
    if (options.number is None) == (None in place):
        cure = "give NUMBER alone, or --worker, --rollout and --step"
        raise ConfigError("no frame is named, or two are", "the command line", cure)
    run = RunAgain(options.run, options.trust)
    frame = frame_again(run, options.first, options.number, place)
    facts = frame.to_dict()
    if options.json:
        print_document(json_of(facts, None))
    else:
        for name, value in facts.items():
            print(f"{name:<18} {shorten(str(value), 400, placeholder=' ...')}")
    if frame.is_equal:
        return 0
    return EXIT_FAILED


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("frame", _DESCRIPTION, _EXAMPLES)
    parser.add_argument("run", type=Path, help="the run's folder, as rlsync train prints it")
    parser.add_argument(
        "number", type=int, nargs="?", metavar="NUMBER", help="from 1, in order of use"
    )
    parser.add_argument("--worker", type=int, metavar="W", help="who made it, from 0")
    parser.add_argument("--rollout", type=int, metavar="R", help="of the worker, from 0")
    parser.add_argument("--step", type=int, metavar="S", help="of the rollout, from 0")
    parser.add_argument(
        "--env", type=int, default=0, metavar="E", help="of the worker, from 0 (default 0)"
    )
    parser.add_argument(
        "--from", type=int, metavar="LIFE", dest="first", help="the run's life (default 1)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")
    parser.add_argument(trust.FLAG, action="store_true", help=trust.HELP)
    return parser
