"""What the proofs of behaviour cost, in processor time, for policies of several sizes.

    python benchmarks/behaviour.py [--blocks 6] [--batches 40] [--json behaviour.json]

Before the first frame: one examination of the policy of an in-process collector, median of 15.

During a run: two workers on a board step CartPole-v1, and the learner's weights move and are published after
each batch. Blocks of batches take turns: without a question, with one for each batch that compares digests,
and with one that compares outputs, too. The difference to the blocks without a question is what a question
costs: of the learner's processor time, and of a worker's. A recipe asks once a minute.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from itertools import cycle, pairwise
from pathlib import Path

import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors import Collector, MultiSyncCollector
from torchrl.envs import GymEnv
from torchrl.modules import OneHotCategorical, ProbabilisticActor

from rlsync import BoardScheme
from rlsync.core.trigger import Counters
from rlsync.sync.bound_map import BoundMap
from rlsync.torchrl_plugin.collectors.choose import endpoint_of

SIZES = {"2 x 64": [64, 64], "2 x 256": [256, 256], "4 x 1024": [1024] * 4}
WORKERS = 2
KINDS = ("none", "digests", "outputs")
EVERY_S = 60.0


def make_env() -> GymEnv:
    return GymEnv("CartPole-v1", categorical_action_encoding=False)


def make_actor(widths: list[int]) -> ProbabilisticActor:
    sizes = [4, *widths]
    layers = [part for a, b in pairwise(sizes) for part in (nn.Linear(a, b), nn.Tanh())]
    net = nn.Sequential(*layers, nn.Linear(sizes[-1], 2))
    return ProbabilisticActor(
        TensorDictModule(net, ["observation"], ["logits"]),
        ["logits"],
        distribution_class=OneHotCategorical,
    )


class Learner:
    """What a map's source paths begin at."""

    def __init__(self, actor: nn.Module) -> None:
        self.actor = actor


def examination_ms(widths: list[int]) -> float:
    """Processor milliseconds of one look at which leaves act."""
    collector = Collector(make_env, make_actor(widths), frames_per_batch=10, total_frames=-1)
    took = []
    for _ in range(15):
        endpoint = endpoint_of(collector)
        began = time.process_time()
        BoundMap({"policy": "actor"}, Learner(make_actor(widths)), endpoint)
        took.append(time.process_time() - began)
    collector.shutdown()
    return 1e3 * statistics.median(took)


def worker_s(pids: list[int]) -> float:
    """Nanoseconds that the kernel has let the threads of some processes run, in seconds."""
    tasks = [task for pid in pids for task in Path(f"/proc/{pid}/task").iterdir()]
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def questions_ms(widths: list[int], blocks: int, batches: int) -> dict[str, dict[str, float]]:
    """By kind of question: milliseconds that one costs the learner, and a worker."""
    learner = Learner(make_actor(widths))
    collector = MultiSyncCollector(
        [make_env] * WORKERS,
        make_actor(widths),
        frames_per_batch=200,
        total_frames=-1,
        weight_sync_schemes={"policy": BoardScheme()},
    )
    bound = BoundMap(
        {"policy": "actor"}, learner, endpoint_of(collector), max_unchanged_publishes=None
    )
    verification, stream = bound.endpoint.verification(), iter(collector)
    pids = [process.pid for process in collector.procs]
    spent: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    now = Counters()

    factors = cycle((1.05, 1 / 1.05))  # enough to show in small logits

    def batch(kind: str) -> None:
        factor = next(factors)
        with torch.no_grad():
            for parameter in learner.actor.parameters():
                parameter.mul_(factor)
        bound.publish("call", now)
        if kind != "none":
            verification.ask(bound.judge if kind == "outputs" else None)
        next(stream)
        if kind != "none":
            found = verification.hear()
            assert found.done, found.waiting
            assert not found.deviations, found.deviations
            assert kind != "outputs" or all(judged.held for judged in found.behaviour)

    for kind in KINDS:
        for _ in range(5):
            batch(kind)
    for _ in range(blocks):
        for kind in KINDS:
            began = time.process_time(), worker_s(pids)
            for _ in range(batches):
                batch(kind)
            ended = time.process_time(), worker_s(pids)
            spent[kind].append(tuple((b - a) / batches for a, b in zip(began, ended, strict=True)))
    collector.shutdown()
    means = {
        kind: [statistics.median(column) for column in zip(*rows, strict=True)]
        for kind, rows in spent.items()
    }
    return {
        kind: {
            "learner": 1e3 * (means[kind][0] - means["none"][0]),
            "worker": 1e3 * (means[kind][1] - means["none"][1]) / WORKERS,
        }
        for kind in KINDS[1:]
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--batches", type=int, default=40)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    results = {}
    heads = (
        "policy",
        "examined",
        "digests",
        "in a worker",
        "outputs",
        "in a worker",
        "share of a minute",
    )
    print("  ".join(f"{head:>12}" for head in heads))
    for name, widths in SIZES.items():
        ms = questions_ms(widths, given.blocks, given.batches)
        # A difference below 0 is noise, and takes nothing off the other one.
        share = sum(max(0.0, cost) for cost in ms["outputs"].values()) / 1e3 / EVERY_S
        results[name] = {
            "examination_ms": examination_ms(widths),
            "questions_ms": ms,
            "share": share,
        }
        row = [results[name]["examination_ms"], *ms["digests"].values(), *ms["outputs"].values()]
        cells = [name, *(f"{value:.2f} ms" for value in row), f"{share:.4%}"]
        print("  ".join(f"{cell:>12}" for cell in cells), flush=True)
    if given.json is not None:
        given.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
