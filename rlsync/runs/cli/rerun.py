"""``rlsync rerun``: make a run again from its schedule, and compare what was published."""

from __future__ import annotations

import sys
from dataclasses import asdict
from itertools import count
from pathlib import Path

from rlsync import ConfigError, Rerun
from rlsync.record.schedule import Comparison
from rlsync.runs.cli.main import parser_of, print_document
from rlsync.runs.config import trust
from rlsync.runs.life.again import jobs_again, trainer_again, wanted
from rlsync.runs.life.kept import config_of
from rlsync.runs.life.output import EXIT_FAILED, output_read
from rlsync.runs.life.run_folder import tell_without_end
from rlsync.runs.machine import require_place
from rlsync.runs.plain import json_of
from rlsync.runs.recipes.rerun import lives_to_repeat
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
    given = parser.parse_args(arguments)
    chosen = wanted(lives_to_repeat(given.run, lambda at: config_of(at, given.trust)), given)
    folder = _new_folder(given.run, given.into)
    jobs = jobs_again(chosen, folder, given.trust)
    folder.mkdir(parents=True)
    trust.claim(folder, given.trust)
    if not given.json:
        print(f"rerun {folder}", flush=True)
    found: Comparison | None = None
    with output_read(folder):
        for (life, _), job in zip(chosen, jobs, strict=True):
            found = Rerun(life, given.until).run(trainer_again(life, job, folder)).after(found)
            if found.unequal:
                break
    assert found is not None, "there is a life"
    if given.until is None:
        tell_without_end(given.run, chosen[-1][0])
    # as where an environment draws from elsewhere than its seed
    if found.unequal and found.equal < 3:
        print(
            f"look at the environment: rlsync doctor --env env.id={chosen[0][1].env.id}",
            file=sys.stderr,
        )
    if given.json:
        print_document(
            json_of({"run": str(given.run), "rerun": str(folder), **asdict(found)}, None)
        )
    else:
        print(found)
    if found.unequal or not found.equal:
        return EXIT_FAILED
    return 0


def _new_folder(run: Path, into: Path | None) -> Path:
    """The folder of the rerun; ConfigError if the one that was asked for is there already."""
    numbered = (run / f"rerun-{number}" for number in count(1))
    if into is None:
        folder = next(path for path in numbered if not path.exists())
    else:
        folder = into
    if folder.exists():
        raise ConfigError(
            f"{folder} is there already", "--into", "name a new folder: nothing is overwritten"
        )
    require_place(folder, "--into", "name a folder that you may write to")
    return folder
