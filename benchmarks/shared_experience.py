"""Do agents with different learning rates gain from each other's experience? LASER on CartPole.

    python benchmarks/shared_experience.py [--lrs 1e-3 3e-3 1e-2] [--seeds 0 1 2 3 4] [--jobs 1]
                                           [--max-steps 200000] [--out FILE.json] [--table FILE.md]

A run is one process with the settings of laser_cartpole.py. The agents take turns: each makes one unroll in
its own eight environments, and one update. "alone": each agent has its own replay. "sharing": all write to
and sample from one replay, with the total capacity of the others. A run ends when every agent has reached a
mean return of 450, or has made ``--max-steps`` steps. "steps" are those of one agent. All agents make equally
many.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path

import torch
from laser_cartpole import LASER, Learner, Reached, Run, Worker

from rlsync.runs.actors.replay.unrolls import UnrollReplay

ALONE, SHARING = "alone", "sharing"


@dataclass(frozen=True, slots=True)
class Population:
    """Agents that differ in their learning rates.

    Args:
        lrs: the learning rate of each agent.
        shared: whether the agents share a replay.
        seed: each agent's seed is derived from it.
        max_steps: the limit of each agent.
    """

    lrs: tuple[float, ...]
    shared: bool
    seed: int
    max_steps: int


def train(population: Population) -> list[int | None]:
    """The steps of each agent until it reached the return; None for an agent that did not."""
    torch.set_num_threads(1)
    first = Run("laser", population.seed, 0.0, 3, population.max_steps, 0.01, LASER)
    count = len(population.lrs)
    common = UnrollReplay(count * first.replay.capacity_steps, seed=population.seed)
    rules, workers, learners = [], [], []
    for agent, lr in enumerate(population.lrs):
        run = replace(first, lr=lr, seed=population.seed * count + agent)
        rules.append(Reached())
        workers.append(Worker(run.seed, rules[-1]))
        learners.append(Learner(run, common, agent) if population.shared else Learner(run))
    while workers[0].env_steps < population.max_steps and any(
        rule.env_steps is None for rule in rules
    ):
        for worker, learner in zip(workers, learners, strict=True):
            learner.update(worker.unroll(*learner.weights()))
    return [rule.env_steps for rule in rules]


def table(lrs: Sequence[float], found: dict[str, list[list[int | None]]], max_steps: int) -> str:
    """A Markdown table of medians over the seeds: of each agent, and of the first and last to reach it."""
    heads = [*(f"lr {lr:g}" for lr in lrs), "first of them", "last of them"]
    lines = ["| replay | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    for name, runs in found.items():
        steps = [[float("inf") if one is None else one for one in run] for run in runs]
        columns = [list(column) for column in zip(*steps, strict=True)]
        columns += [[min(run) for run in steps], [max(run) for run in steps]]
        cells = [_cell(statistics.median(column), max_steps) for column in columns]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(steps: float, max_steps: int) -> str:
    return f"> {max_steps:,}" if steps == float("inf") else f"{steps:,.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lrs", nargs="+", type=float, default=[1e-3, 3e-3, 1e-2])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--max-steps", type=int, default=200_000)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path)
    options = parser.parse_args()
    populations = [
        Population(tuple(options.lrs), shared, seed, options.max_steps)
        for seed in options.seeds
        for shared in (False, True)
    ]
    found: dict[str, list[list[int | None]]] = {ALONE: [], SHARING: []}
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        for population, steps in zip(populations, pool.map(train, populations), strict=True):
            name = SHARING if population.shared else ALONE
            found[name].append(steps)
            print(f"seed {population.seed} {name:>7}: {steps}", flush=True)
    written = table(options.lrs, found, options.max_steps)
    print(written)
    if options.out:
        record = {
            "lrs": options.lrs,
            "seeds": options.seeds,
            "max_steps": options.max_steps,
            "steps": found,
        }
        options.out.write_text(json.dumps(record, indent=2) + "\n")
    if options.table:
        options.table.write_text(written)


if __name__ == "__main__":
    main()
