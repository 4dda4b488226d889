"""``rlsync rerun``: make a run again from its schedule, and compare what was published."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from itertools import count
from pathlib import Path

from omegaconf import OmegaConf
from torchrl.trainers import Trainer

from rlsync import Rerun
from rlsync.cli import trust
from rlsync.cli.eval import config_of
from rlsync.cli.job import Job, examined
from rlsync.cli.main import EXIT_FAILED, output_read, parser_of, print_document
from rlsync.cli.resume import load
from rlsync.cli.run_folder import tell_without_end
from rlsync.cli.train import prepare_process
from rlsync.core.errors import ConfigError
from rlsync.core.schedule import Comparison, Life
from rlsync.core.whole_file import json_of, require_place
from rlsync.recipes.bounds import refuse
from rlsync.recipes.rerun import config_of_rerun, lives_to_repeat, number_versions
from rlsync.recipes.run_files import RESOLVED, SCHEDULE
from rlsync.recipes.settings import Config
from rlsync.torchrl_plugin.ending.last_checkpoint import CollectorState

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
    first = "begin with this life of a run with life_frames, or resumed in its folder; 1 is the first"
    parser.add_argument("--from", type=int, metavar="LIFE", dest="first", help=first)
    into = "the folder that the rerun writes to; new (default: rerun-1, -2, ... in the run's folder)"
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
    if found.unequal and found.equal < 3:  # as where an environment draws from elsewhere than its seed
        print(f"look at the environment: rlsync doctor --env env.id={chosen[0][1].env.id}", file=sys.stderr)
    if given.json:
        print_document(json_of({"run": str(given.run), "rerun": str(folder), **asdict(found)}, None))
    else:
        print(found)
    return EXIT_FAILED if found.unequal or not found.equal else 0


def jobs_again(chosen: list[tuple[Life, Config]], folder: Path, trusted: bool) -> list[Job]:
    prepare_process()
    found = [examined(config_of_rerun(recorded, life, folder), trusted=trusted) for life, recorded in chosen]
    refuse(error for _, errors in found for error in errors)
    return [job for job, _ in found if job is not None]


def trainer_again(life: Life, job: Job, folder: Path) -> Trainer:
    """The trainer of a rerun, its workers started; the folder is there."""
    OmegaConf.save(OmegaConf.structured(job.config), folder / RESOLVED)
    number_versions(life, folder)
    trainer = job.recipe.build(job.config, job.spaces, life)
    CollectorState.of(trainer)
    if job.checkpoint is not None:
        load(trainer, job.checkpoint, job.changes)
    return trainer


def wanted(lives: dict[int, tuple[Life, Config]], given: argparse.Namespace) -> list[tuple[Life, Config]]:
    """The lives to make again; ConfigError if the one that is asked for, or the version, is not there."""
    if given.first is not None and given.first not in lives:
        cure = f"give one of {', '.join(map(str, lives))}; a checkpoint inside a life will not do: it "
        cure += "lacks the environments, the workers' random numbers, and the rollouts not learned from yet; "
        cure += "life_frames=N makes a life of every N frames of a run"
        raise ConfigError(f"the run has no life {given.first} that can be made again", "--from", cure)
    chosen = [each for number, each in lives.items() if given.first is None or number >= given.first]
    if given.until is None:
        return chosen
    for number, (life, _) in enumerate(chosen, 1):
        if given.until in {publish.version for publish in life.publishes}:
            return chosen[:number]
    what, newest = f"no version {given.until} was recorded", chosen[-1][0].publishes[-1].version
    raise ConfigError(what, "--until", f"the newest version is {newest}")


def _new_folder(run: Path, into: Path | None) -> Path:
    """The folder of the rerun; ConfigError if the one that was asked for is there already."""
    numbered = (run / f"rerun-{number}" for number in count(1))
    folder = next(path for path in numbered if not path.exists()) if into is None else into
    if folder.exists():
        raise ConfigError(f"{folder} is there already", "--into", "name a new folder: nothing is overwritten")
    require_place(folder, "--into", "name a folder that you may write to")
    return folder
