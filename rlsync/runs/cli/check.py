"""``rlsync check``: lists all that is wrong with a config, or what its run will do; nothing is trained."""

from __future__ import annotations

import itertools
import sys
from contextlib import redirect_stdout
from copy import deepcopy
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from rlsync import ConfigError, RlsyncError
from rlsync.runs.cli import planned
from rlsync.runs.cli.main import parser_of, print_document
from rlsync.runs.config import command_line
from rlsync.runs.life.job import Job, examined_jobs, try_checkpoints
from rlsync.runs.life.output import EXIT_USAGE
from rlsync.runs.life.training import prepare_process, shut_down
from rlsync.runs.plain import json_of
from rlsync.runs.recipes import registry
from rlsync.runs.recipes.evaluating import (
    tried_by_evaluations,
    tried_by_workers,
    warn_if_not_decided,
    whether_episodes_end,
    whether_episodes_go_on,
)
from rlsync.runs.recipes.impala.settings import ImpalaConfig
from rlsync.runs.recipes.overview import Overview, warn_of_disk, warn_of_memory
from rlsync.runs.recipes.settings import ClusterConfig, Config, LoggerConfig
from rlsync.runs.recipes.timeline import Timeline, timeline
from rlsync.seams import trainers

_ABOUT = "List all that is wrong with a config, or print what its run will do, and when. Nothing is trained."

_EXAMPLES = """examples:
  rlsync check                                   the defaults
  rlsync check recipe=dqn recipe.lr=0.001        what rlsync train would be given
  rlsync check -m recipe=ppo,dqn seed=0,1        every job of a sweep
  rlsync check --config-dir FOLDER recipe=mine   a config of your own
  rlsync check --json resume=runs/DATE/TIME      for machines

It checks keys, options, types, bounds, the trigger, the folder (by writing what a checkpoint needs), and the
checkpoint to resume from. Then it takes some steps in the environment, as workers and as evaluations do. If
nothing is wrong with those, it builds the trainer in this process and resolves the sync map. If you give a
sync map, a recipe or an environment (module:Id) of your own, it starts workers for that, as the run will; in an
environment of your own, they play one batch. "looked at" says which of these it has done.

If nothing is wrong, it prints what the networks see of an observation, part by part, what they choose, how large
they are, and what a replay takes; then what the run will do, and when: prefill, updates, publishes, evaluations.
A run may end before its plan does, when it reaches its target. --json says what the words of a plan mean.

exit status: 0 nothing is wrong, 2 something is
"""


def main(arguments: list[str]) -> int:
    usage = "rlsync check [-h] [--json] [-m] [--config-dir DIR] [--trust] [group=option | key=value ...]"
    parser = parser_of("check", _ABOUT, _EXAMPLES, usage)
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")
    options, rest = parser.parse_known_args(arguments)
    line = command_line.read(rest)
    jobs, errors = examined_jobs(line)
    facts = [dict(job.told) for job in jobs]
    overviews: list[Overview] = []
    for job, of_job in zip(jobs, facts, strict=True):
        if errors:
            break
        try:
            overviews.append(_tried(job, of_job, line.config_dir))
        except RlsyncError as error:
            errors.append(error)
    plans = []
    if errors:
        overviews = []
    else:
        plans = [_plan(job.config) for job in jobs]
    if options.json:
        print_document(as_json(errors, facts, overviews, plans))
    else:
        print(as_text(errors, facts))
        # neither of the two, if anything is wrong
        for job, overview, plan in zip(jobs, overviews, plans, strict=False):
            print(f"\nnetworks of {job.config.recipe.name} on {job.config.env.name}\n{overview}")
            if isinstance(plan, Timeline):
                plan = planned.as_text(job.config, plan)
            print(f"\n{plan}")
    if errors:
        return EXIT_USAGE
    return 0


def _plan(config: Config) -> Timeline | str:
    """What a run will do; or why nobody can tell."""
    try:
        return timeline(config)
    except ConfigError as error:
        return f"no plan: {error.what}"


def _is_own(job: Job, own: Path | None) -> bool:
    """Whether a job may have a sync map, a recipe or an environment that is not shipped."""
    return (
        job.recipe.name not in registry.SHIPPED
        or job.config.env.names_module
        or any(_may_map(word, own) for word in job.words)
    )


def _may_map(word: str, own: Path | None) -> bool:
    """Whether an override may bring a sync map that is not shipped: its keys, or a recipe of one's own."""
    key, _, option = word.lstrip("+~").partition("=")
    mine = own is not None and key == "recipe" and (own / "recipe" / f"{option}.yaml").is_file()
    return mine or key == "sync" or key.startswith("sync.map")


def _tried(job: Job, facts: dict[str, str], config_dir: Path | None) -> Overview:
    """Try a job; adds to ``facts`` what was looked at.

    Raises:
        RlsyncError: something is wrong with it.
    """
    config = job.config
    looked_at = ["settings"]
    if job.checkpoint is not None:
        looked_at.append("the checkpoint")
    if (folder := _folder(job)) is not None:
        try_checkpoints(folder)
        looked_at.append(f"whether {folder} can have checkpoints")
    with redirect_stdout(sys.stderr):  # an environment may print
        trials = [tried_by_workers(config)]
        warn_if_not_decided(config)
        is_own = _is_own(job, config_dir)
        overview = _built(job, in_process=not is_own)
        if is_own:
            looked_at.append("the start of the workers")
        trials.append(tried_by_evaluations(config, job.recipe, job.spaces))
        going_on = whether_episodes_go_on(config)
    warn_of_memory(config, overview.replay)
    if folder is not None:
        warn_of_disk(config, overview.replay, folder)
    looked_at += [*map(str, trials), whether_episodes_end(config, trials)]
    if going_on:
        looked_at.append(going_on)
    facts["looked at"] = "; ".join(looked_at)
    return overview


def _folder(job: Job) -> Path | None:
    """Where the run will write; or the folder in which Hydra makes one, unless a key of Hydra's names it."""
    if job.config.run_dir is not None:
        return Path(job.config.run_dir)
    if any(word.startswith("hydra.") for word in job.words):
        return None
    return Path.cwd()


def _built(job: Job, *, in_process: bool) -> Overview:
    """Build a job in a folder that is thrown away, with workers here, and look at its networks.

    In an environment of one's own the workers play one batch, for a step may raise there.

    Args:
        job: nothing was found to be wrong with it.
        in_process: start no process, neither a worker nor one that evaluates.
    """
    with TemporaryDirectory() as folder:
        config = replace(
            job.config, run_dir=folder, cluster=ClusterConfig(), logger=LoggerConfig("none")
        )
        if in_process:
            config = _without_processes(config)
        prepare_process()
        with shut_down(replace(job, config=config).build()) as trainer:
            if config.env.names_module and not in_process:
                next(iter(trainer.collector))
            acting = job.recipe.player(job.config, job.spaces, deterministic=True)
            overview = Overview.of(job.config, job.spaces, acting.player, trainer.loss_module)
            trainers.ShutdownStage.of(trainer)()  # an evaluator still writes into the folder
    return overview


def _without_processes(config: Config) -> Config:
    """The same run in this process alone, without evaluations; it writes nothing."""
    device = config.collector.device
    if not isinstance(device, str):
        device = device[0]
    recipe = deepcopy(config.recipe)
    if isinstance(recipe, ImpalaConfig):
        recipe.replay.path = None
    recipe.evaluations().every_frames = 0
    recipe.evaluations().video_every = None
    collector = replace(config.collector, num_workers=0, device=device)
    return replace(config, collector=collector, recipe=recipe, run_dir=None)


def as_text(errors: list[RlsyncError], facts: list[dict[str, str]]) -> str:
    if errors:
        count = "1 error" if len(errors) == 1 else f"{len(errors)} errors"
        return "\n\n".join([*map(str, errors), count])
    if len(facts) == 1:
        lines = ["nothing is wrong with this config"]
    else:
        lines = [f"nothing is wrong with these {len(facts)} configs"]
    for of_job in facts:
        lines += itertools.starmap("{} {}".format, of_job.items())
    return "\n".join(dict.fromkeys(lines))  # jobs may have facts in common


def as_json(
    errors: list[RlsyncError],
    facts: list[dict[str, str]],
    overviews: list[Overview],
    plans: list[Timeline | str],
) -> str:
    """What was found, as a document: the keys that ``docs/command_line.md`` lists."""
    wrong = [
        {"kind": type(e).__name__, "what": e.what, "where": e.where, "cure": e.cure} for e in errors
    ]
    drawn_up = [asdict(plan) if isinstance(plan, Timeline) else None for plan in plans]
    document = {
        "ok": not errors,
        "errors": wrong,
        "configs": facts,
        "networks": list(map(asdict, overviews)),
        "plans": drawn_up,
        "glossary": planned.GLOSSARY,
    }
    return json_of(document)
