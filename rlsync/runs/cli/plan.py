"""``rlsync plan``: prints or draws what a run will do, and when."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from rlsync.core.whole_file import json_of
from rlsync.runs.cli.main import parser_of, print_document
from rlsync.runs.cli.pictures import panels_for
from rlsync.runs.config import command_line
from rlsync.runs.life.job import jobs_of
from rlsync.runs.recipes.checks import more_frames
from rlsync.runs.recipes.settings import CHECKPOINT_REST_S, Config
from rlsync.runs.recipes.timeline import RunPhase, Timeline, timeline

_EXAMPLES = """examples:
  rlsync plan recipe=dqn                              what rlsync train recipe=dqn will do
  rlsync plan recipe=sac env=gymnasium env.id=Pendulum-v1 recipe.pace.ratio=0.5
  rlsync plan --json recipe=dqn                       for machines
  rlsync plan --plot plan.png recipe=dqn              draws it, too

Nothing is trained, and no worker is started. A run may end before its plan does, when it reaches its target.

exit status: 0 the plan is printed, 1 the disk is full, 2 the config is wrong, its recipe has no plan, the
picture cannot be written, or no matplotlib
"""

#: The words of a plan, which mean the same in logs and in configs.
GLOSSARY = {
    "frame": "one step of one environment; what other libraries call an environment step or a policy step",
    "batch": "the frames that the learner takes from the workers at a time (collector.frames_per_batch)",
    "round": "the learner takes one batch and updates as often as the recipe says; also called an iteration",
    "update": "one step of the optimizer; rlsync's recipes take recipe.batch_size frames for it "
    "(impala and laser unrolls, dreamer_v1 and dreamer_v3 sequences)",
    "ratio": "updates for each frame, those of the prefill not counted; pace/ratio in logs of recipes that "
    "have recipe.pace",
    "publish": "a new version of the weights becomes visible to all workers",
    "rollout": "the steps that a worker makes in all its environments with one version of the weights",
    "lag": "how many rollouts of each worker may be ahead of the learner (collector.lag)",
}


def main(arguments: list[str]) -> int:
    usage = "rlsync plan [-h] [--json] [--plot FILE] [-m] [--config-dir DIR] [--trust] [key=value ...]"
    about = "Print what a run will do, and when: prefill, updates, publishes, evaluations."
    parser = parser_of("plan", about, _EXAMPLES, usage)
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the plan into a picture, too")
    given, rest = parser.parse_known_args(arguments)
    configs = [job.config for job in jobs_of(command_line.read(rest))]
    plans = [timeline(config) for config in configs]
    if given.plot is not None:
        panels = panels_for("rlsync plan --plot", given.plot)
        panels.draw_plans([_title(config) for config in configs], plans).savefig(given.plot)
    if given.json:
        print_document(json_of({"plans": [asdict(plan) for plan in plans], "glossary": GLOSSARY}))
        return 0
    for config, plan in zip(configs, plans, strict=True):
        print(as_text(config, plan), end="\n\n")
    print("words")
    print("\n".join(f"  {word:<10} {meaning}" for word, meaning in GLOSSARY.items()))
    return 0


def as_text(config: Config, plan: Timeline) -> str:
    if plan.publishes is None:
        published = ""
    else:
        published = f": {_of(plan.publishes, 'version')} after the first"
    frames = plan.evaluation_every_frames
    versions = plan.evaluation_every_versions
    if frames:
        apart = f"at least {frames:,} frames apart, which are {_of(versions, 'version')}"
    else:
        apart = "never"
    if config.checkpoint_every_frames:
        rest = ""
    else:
        rest = f" and {CHECKPOINT_REST_S:g} s"
    rows = [_phase(phase, config.collector.frames_per_batch) for phase in plan.phases]
    if plan.update:
        rows.append(("update", plan.update))
    rows += [
        ("publish", f"{plan.publish_every}{published}"),
        ("evaluation", apart),
        ("checkpoint", f"every {plan.checkpoint_every_frames:,} frames{rest}, and at the end"),
        ("workers", _workers(config)),
        ("end", f"{plan.frames:,} frames, {_of(plan.updates, 'update')}, ratio {plan.ratio:g}"),
    ]
    wide = max(len(name) for name, _ in rows) + 4
    return "\n".join([_title(config), *(f"  {name:<{wide}}{text}" for name, text in rows)])


def _workers(config: Config) -> str:
    batches = config.recipe.batches(config)
    more = more_frames(config)
    if config.in_process:
        workers = "none, the learner has its"
    else:
        workers = f"{config.workers_per_node}, each with"
    envs = _of(config.env.num_envs, "environment")
    calls = _of(batches.steps, "policy call")
    told = f"{workers} {envs}: {calls} for a rollout, {_of(batches.rollouts, 'rollout')} for a batch; "
    told += config.lag_facts()
    if more is None:
        return told
    return f"{told}; more frames a second: {more}"


def _title(config: Config) -> str:
    return f"plan of {config.recipe.name} on {config.env.facts()}"


def _phase(phase: RunPhase, frames_per_batch: int) -> tuple[str, str]:
    name = f"frames {phase.first_frame:,} to {phase.last_frame:,}"
    rounds = f"({_of(phase.rounds, 'round')})"
    if phase.name == "prefill":
        return name, f"prefill: random actions, no update {rounds}"
    fewest = "" if phase.fewest == phase.most else f"{phase.fewest} to "
    batch = f"batch of {_of(frames_per_batch, 'frame')}"
    return name, f"learning: {fewest}{_of(phase.most, 'update')} after each {batch} {rounds}"


def _of(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}"
