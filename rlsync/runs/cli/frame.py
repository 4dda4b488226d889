"""``rlsync frame``: make one frame of a run again, and tell who acted in it, on what, and how."""

from __future__ import annotations

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor

from rlsync import ConfigError, Rerun
from rlsync.record.schedule import named
from rlsync.runs.actors.envs.actions import DiscreteActions
from rlsync.runs.actors.envs.specs import make_venv
from rlsync.runs.cli.main import parser_of, print_document
from rlsync.runs.config import trust
from rlsync.runs.life.again import jobs_again, trainer_again, wanted
from rlsync.runs.life.kept import config_of
from rlsync.runs.life.output import EXIT_FAILED, output_read
from rlsync.runs.plain import json_of
from rlsync.runs.recipes.parts import making
from rlsync.runs.recipes.rerun import frame_of, kept_frame, lives_to_repeat, watch_frame
from rlsync.runs.recipes.settings import EnvConfig

_DESCRIPTION = """Tell which version acted in one frame of a run, what it saw, and what it did. The run is
made again up to that batch, as by rlsync rerun; what the run has kept of the frame is compared."""

_EXAMPLES = """examples:
  rlsync frame runs/2026-11-20/18-00-00-000000 83412
  rlsync frame runs/2026-11-20/18-00-00-000000 --worker 1 --rollout 12 --step 3 --json

exit status: 0 all that the run has kept is equal, 1 something differs or the rerun failed, 2 no such frame,
the run cannot be made again, or a wrong command line, 130 after Ctrl-C
"""


def main(arguments: list[str]) -> int:
    parser = parser_of("frame", _DESCRIPTION, _EXAMPLES)
    parser.add_argument("run", type=Path, help="the run's folder, as rlsync train prints it")
    parser.add_argument(
        "number", type=int, nargs="?", metavar="NUMBER", help="from 1, in order of use"
    )
    for name, meaning in (
        ("worker", "who made it"),
        ("rollout", "of the worker"),
        ("step", "of the rollout"),
    ):
        parser.add_argument(
            f"--{name}", type=int, metavar=name[0].upper(), help=f"{meaning}, from 0"
        )
    parser.add_argument(
        "--env", type=int, default=0, metavar="E", help="of the worker, from 0 (default 0)"
    )
    parser.add_argument(
        "--from", type=int, metavar="LIFE", dest="first", help="the run's life (default 1)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")
    parser.add_argument(trust.FLAG, action="store_true", help=trust.HELP)
    given = parser.parse_intermixed_args(arguments, argparse.Namespace(until=None))
    place = (given.worker, given.rollout, given.step, given.env)
    if (given.number is None) == (None in place):
        cure = "give NUMBER alone, or --worker, --rollout and --step"
        raise ConfigError("no frame is named, or two are", "the command line", cure)
    chosen = wanted(lives_to_repeat(given.run, lambda at: config_of(at, given.trust)), given)[:1]
    ((life, recorded),) = chosen
    frame = frame_of(life, recorded, given.number, place)
    with TemporaryDirectory() as folder, output_read(Path(folder)):
        (job,) = jobs_again(chosen, Path(folder), given.trust)
        trainer = trainer_again(life, job, Path(folder))
        seen = watch_frame(trainer, frame)
        found = Rerun(life).run(trainer)
    made = frame.rollout
    kept = kept_frame(given.run, recorded, frame)
    told: dict[str, Any] = {"frame": frame.number, "worker": named(made.worker), "life": made.life}
    told |= {"rollout": made.number, "step": frame.step, "env": frame.env}
    told["prefill"] = recorded.resume is None and frame.number <= recorded.recipe.prefill_frames()
    told |= {name: value.tolist() for name, value in seen.items()}
    if "action" in seen:
        told["sent"] = sent(job.config.env, seen["action"]).tolist()
    told["digests"] = {
        leaf: f"{it:016x}" for leaf, it in life.digests.get(made.version, {}).items()
    }
    told["equal"] = {
        f"stored {name}": torch.equal(kept[name], seen[name]) for name in seen if name in kept
    }
    told["equal"]["recorded version"] = bool(seen.get("policy_version", -1) == made.version)
    told["rerun"] = str(found)
    lines = (
        f"{name:<18} {shorten(str(value), 400, placeholder=' ...')}" for name, value in told.items()
    )
    if given.json:
        print_document(json_of(told, None))
    else:
        print("\n".join(lines))
    if found.unequal or not all(told["equal"].values()):
        return EXIT_FAILED
    return 0


def sent(env: EnvConfig, action: Tensor) -> Tensor:
    """What the environment got for a stored action, which may be one-hot."""
    with making(env):
        envs = make_venv(env.spec(), 1)
    envs.close()
    if isinstance(envs.actions, DiscreteActions) and action.ndim:
        action = action.to(torch.int64).argmax()
    return envs.actions.sent(action)
