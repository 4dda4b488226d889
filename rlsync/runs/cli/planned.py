"""What ``rlsync check`` says of a run that can begin: what it will do, and when."""

from __future__ import annotations

from rlsync.runs.recipes.checks import more_frames
from rlsync.runs.recipes.settings import CHECKPOINT_REST_S, Config
from rlsync.runs.recipes.timeline import RunPhase, Timeline

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


def as_text(config: Config, plan: Timeline) -> str:
    """The plan of a run as a table, a line for each thing that happens."""
    if plan.publishes is None:
        published = ""
    else:
        published = f": {_of(plan.publishes, 'version')} after the first"
    frames = plan.evaluation_every_frames
    if frames:
        apart = f"at least {frames:,} frames apart"
    else:
        apart = "never"
    if config.life_length is not None:
        rest = ", the length of a life"
    elif config.checkpoint_every_frames:
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
    rollouts = _of(batches.rollouts, "rollout")
    facts = f"{workers} {envs}: {calls} for a rollout, {rollouts} for a batch; {config.lag_facts()}"
    if more is None:
        return facts
    return f"{facts}; more frames a second: {more}"


def _title(config: Config) -> str:
    return f"plan of {config.recipe.name} on {config.env.facts()}"


def _phase(phase: RunPhase, frames_per_batch: int) -> tuple[str, str]:
    name = f"frames {phase.first_frame:,} to {phase.last_frame:,}"
    rounds = f"({_of(phase.rounds, 'round')})"
    if phase.name == "prefill":
        return name, f"prefill: random actions, no update {rounds}"
    updates = _of(phase.most, "update")
    if phase.fewest != phase.most:
        updates = f"{phase.fewest} to {updates}"
    batch = f"batch of {_of(frames_per_batch, 'frame')}"
    return name, f"learning: {updates} after each {batch} {rounds}"


def _of(count: int, noun: str) -> str:
    if count == 1:
        return f"1 {noun}"
    return f"{count:,} {noun}s"
