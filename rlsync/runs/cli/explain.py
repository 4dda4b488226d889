"""``rlsync explain``: what a sync map moves, leaf by leaf, without training."""

from __future__ import annotations

import contextlib
import sys

from torchrl.trainers import Trainer

from rlsync import ConfigError, RlsyncError, SyncPlan, SyncWeights
from rlsync.runs.cli.main import parser_of, print_document
from rlsync.runs.config import command_line, trust
from rlsync.runs.life import users_trainer
from rlsync.runs.life.apart import TIMEOUT_S, Failed, Say, run_apart
from rlsync.runs.life.job import jobs_of
from rlsync.runs.life.training import prepare_process, shut_down
from rlsync.runs.life.users_trainer import FORM, MEANING, NamedTrainer
from rlsync.seams import trainers

_EXAMPLES = """examples:
  rlsync explain
  rlsync explain recipe=dqn --json
  rlsync explain train.py:build

A file is run in a process of its own, which is ended with all that it started.

exit status: 0 the map can be carried out, 1 the function failed, 2 the map cannot be carried out, or the
arguments name no trainer
"""


def main(arguments: list[str]) -> int:
    parser = parser_of(
        "explain", "Print what a sync map moves, leaf by leaf, without training.", _EXAMPLES
    )
    folder = "a folder of your own configs, as for rlsync train"
    parser.add_argument("--config-dir", metavar="DIR", help=folder)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    limit = f"seconds that running your file, and building the trainer, may take (default {TIMEOUT_S:g})"
    parser.add_argument("--timeout-s", type=float, default=TIMEOUT_S, metavar="S", help=limit)
    parser.add_argument(trust.FLAG, action="store_true", help=trust.HELP)
    parser.add_argument(
        "target", nargs="*", help=f"overrides as for rlsync train, or {FORM}: {MEANING}"
    )
    options = parser.parse_args(arguments)
    flags = []
    if options.config_dir is not None:
        flags += ["--config-dir", options.config_dir]
    if options.trust:
        flags.append(trust.FLAG)
    target = named_target(options.target)
    if target is None:
        plan = plan_of_config([*flags, *options.target])
    else:
        plan = plan_apart(target, options.timeout_s)
    if options.json:
        print_document(plan.to_json())
    else:
        print(plan.table())
    return 0


def named_target(words: list[str]) -> NamedTrainer | None:
    """The trainer in a file that the words name; None if they are overrides."""
    files = [word for word in words if "=" not in word and not word.startswith("~")]
    if not files:
        return None
    if len(words) > 1:
        cure = f"give overrides (key=value) alone, or {FORM} alone"
        raise ConfigError(f"{files[0]!r} is no override", " ".join(words), cure)
    return users_trainer.target_of(files[0], "; or give overrides (key=value)")


def plan_of_config(arguments: list[str]) -> SyncPlan:
    job, *more = jobs_of(command_line.read(arguments))
    if more:
        raise ConfigError("a sweep has many plans", "rlsync explain", "name one config")
    for word, text in job.told.items():
        print(f"{word} {text}", file=sys.stderr)
    prepare_process()
    # What a build prints is not the plan.
    with contextlib.redirect_stdout(sys.stderr), shut_down(job.build()) as trainer:
        return plan_of(trainer)


def plan_apart(target: NamedTrainer, timeout_s: float) -> SyncPlan:
    """The plan of a user's trainer, which is built in another process."""
    plan = run_apart(_plan, target, timeout_s)
    if isinstance(plan, Failed):
        raise RlsyncError(plan.why, target.where, plan.cure)
    assert isinstance(plan, SyncPlan)
    return plan


def _plan(target: NamedTrainer, timeout_s: float, say: Say) -> None:
    with shut_down(users_trainer.build(target, timeout_s, say)) as trainer:
        say(plan_of(trainer))


def plan_of(trainer: Trainer) -> SyncPlan:
    """The plan of the SyncWeights hook that a trainer has for its own collector; or else for another."""
    syncs = [
        module for module in trainers.registered_modules(trainer) if isinstance(module, SyncWeights)
    ]
    for sync in sorted(syncs, key=lambda sync: sync.feeds is not trainer.collector):
        return sync.plan
    cure = "SyncWeights({...}).register(trainer) before the function returns"
    raise ConfigError("the trainer has no SyncWeights hook", type(trainer).__name__, cure)
