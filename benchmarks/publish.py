"""What a publish costs the learner, and when the weights arrive: rlsync's board beside TorchRL's schemes.

    python benchmarks/publish.py [--models mlp resnet 100mb 400mb many] [--out publish.json]

For each model, in one run on two worker processes: the time for which the hook holds the learner with the
board, with SharedMemWeightSyncScheme and with MultiProcessWeightSyncScheme (both acknowledged, workers
idle), each against one contiguous copy of the same bytes timed beside it; the worker's side of an adoption;
and the time until busy workers have adopted, against the length of their rollouts. Medians. Compare
ratios, not seconds: machines are shared and noisy.

The learner trains a module of its own, as on another device: had it the very policy that the collector was
given, TorchRL's workers would share its memory, and its schemes would copy every tensor onto itself.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
import warnings
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import torch
from torch import nn
from torchrl.collectors import MultiAsyncCollector, MultiSyncCollector
from torchrl.trainers import Trainer
from torchrl.trainers import UpdateWeights as StockUpdateWeights
from torchrl.weight_update import (
    MultiProcessWeightSyncScheme,
    SharedMemWeightSyncScheme,
    WeightSyncScheme,
)

from rlsync import BoardScheme, Every, SyncWeights
from rlsync.cli.measure import MAP, MODELS, BulkPolicy, adoption_s, hold, make_trainer, make_workers, timed

SCHEMES: dict[str, Callable[[], WeightSyncScheme]] = {
    "board": BoardScheme,
    "SharedMem": SharedMemWeightSyncScheme,
    "MultiProcess": MultiProcessWeightSyncScheme,
}


def measure_hold(name: str, policy: nn.Module, trials: int) -> dict[str, float]:
    """How long one push holds the learner, workers idle, through the hook."""
    collector = make_workers(MultiSyncCollector, policy, SCHEMES[name](), 100)
    try:
        trainer = make_trainer(collector, deepcopy(policy))
        push = make_push(name, trainer)
        pushed_s, copied_s = hold(push, policy, trials)
    finally:
        collector.shutdown()
    return {
        "hold_us": 1e6 * pushed_s,
        "memcpy_us": 1e6 * copied_s,
        "hold_per_memcpy": pushed_s / copied_s,
    }


def make_push(name: str, trainer: Trainer) -> Callable[[], object]:
    if name != "board":
        return StockUpdateWeights(trainer.collector, 1, weight_update_map=MAP, trainer=trainer)
    hook = SyncWeights(MAP, when=Every(1, "batches"))
    hook.register(trainer)

    def push() -> None:  # the trainer's own post_steps stage: it counts the batch and asks the hook
        trainer._post_steps_hook()

    return push


def measure_arrival(policy: nn.Module, trials: int) -> dict[str, float]:
    """Busy workers: from the end of a publish until the last one acts with it; how long rollouts are.

    A worker adopts when its rollout ends, so the longer rollouts (95th percentile) are the bound to expect.
    """
    collector = make_workers(MultiAsyncCollector, policy, BoardScheme(), 50)
    try:
        trainer = make_trainer(collector, policy)
        hook = SyncWeights(MAP, when=Every(1, "batches"))
        hook.register(trainer)
        rollouts, stop = [], threading.Event()

        def consume() -> None:
            before = time.perf_counter()
            for _ in collector:
                now = time.perf_counter()
                rollouts.append(2 * (now - before))  # two workers deliver in turn
                before = now
                if stop.is_set():
                    return

        consumer = threading.Thread(target=consume)
        consumer.start()
        hook.publish()
        hook.wait(60)
        arrivals = []
        for _ in range(trials):
            hook.publish()
            arrivals.append(timed(lambda: hook.wait(60)))
        stop.set()
        consumer.join()
    finally:
        collector.shutdown()
    arrived, rollout = statistics.median(arrivals) * 1e6, statistics.quantiles(rollouts[5:], n=20)[-1] * 1e6
    return {
        "arrival_busy_us": arrived,
        "rollout_p95_us": rollout,
        "arrival_per_rollout": arrived / rollout,
    }


def measure(model: str) -> dict[str, object]:
    tensors, floats = MODELS[model]
    policy = BulkPolicy(tensors, floats)
    trials = 20 if tensors * floats > 1e7 else 200
    row: dict[str, object] = {"model": model, "tensors": tensors, "bytes": 4 * tensors * floats}
    for name in SCHEMES:
        row[name] = measure_hold(name, policy, max(10, trials if name == "board" else trials // 4))
    row |= {f"adopt_{mode}_us": 1e6 * seconds for mode, seconds in adoption_s(policy, trials).items()}
    row |= measure_arrival(policy, 15)
    board = row["board"]["hold_us"]
    row["SharedMem_per_board"] = row["SharedMem"]["hold_us"] / board
    row["MultiProcess_per_board"] = row["MultiProcess"]["hold_us"] / board
    return row


HEAD = (
    "| model | bytes | memcpy | board | / memcpy | SharedMem / board | MultiProcess / board "
    "| adopt alias | adopt copy | arrival, busy | / rollout |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|"
)


def line(row: dict) -> str:
    board = row["board"]
    return (
        f"| {row['model']}, {row['tensors']} tensors | {row['bytes'] / 1e6:.2f} MB "
        f"| {board['memcpy_us']:,.0f} us | {board['hold_us']:,.0f} us "
        f"| {board['hold_per_memcpy']:.2f} | {row['SharedMem_per_board']:.1f} "
        f"| {row['MultiProcess_per_board']:.1f} | {row['adopt_alias_us']:,.0f} us "
        f"| {row['adopt_copy_us']:,.0f} us | {row['arrival_busy_us']:,.0f} us "
        f"| {row['arrival_per_rollout']:.2f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--out", default="publish.json")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    print(HEAD, flush=True)
    rows = []
    for model in options.models:
        rows.append(measure(model))
        print(line(rows[-1]), flush=True)
    Path(options.out).write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
