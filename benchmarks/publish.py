"""The cost of a publish for the learner, and when weights arrive: rlsync's board and TorchRL's schemes.

    python benchmarks/publish.py [--models mlp resnet 100mb 400mb many] [--out publish.json]

For each model, in one run with two worker processes, it measures

- how long the hook holds the learner: with the board, with SharedMemWeightSyncScheme and with
  MultiProcessWeightSyncScheme (both wait for the acknowledgement of idle workers), each compared with one
  contiguous copy of the same bytes;
- how long ``collector.update_policy_weights_(weights)`` holds it, which a hand-written loop calls, with a
  tensordict and with a module, on the board; compared with the hook in the same run;
- how long a worker takes to adopt;
- how long it takes until busy workers have adopted, compared with the length of their rollouts.

The figures are medians. Compare ratios, not seconds: machines are shared and noisy.

The learner trains its own module, as on another device. If it trained the policy object that the collector
was given, TorchRL's workers would share its memory, and TorchRL's schemes would copy every tensor onto
itself.
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
from functools import partial
from pathlib import Path

import torch
from publish_parts import (
    MAP,
    MODELS,
    WARM_UP,
    BulkPolicy,
    adoption_s,
    hold,
    make_trainer,
    make_workers,
    timed,
)
from tensordict import TensorDict
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

SCHEMES: dict[str, Callable[[], WeightSyncScheme]] = {
    # its networks output nothing that depends on all weights
    "board": partial(BoardScheme, prove=False),
    "SharedMem": SharedMemWeightSyncScheme,
    "MultiProcess": MultiProcessWeightSyncScheme,
}


def measure_hold(name: str, policy: nn.Module, trials: int) -> dict[str, float]:
    """How long one publish through the hook holds the learner, with idle workers."""
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


def measure_calls(policy: nn.Module, trials: int) -> dict[str, float]:
    """How long ``update_policy_weights_`` holds the learner with each form of weights, beside the hook.

    A loop sends one form again and again, so each form has its own turns.
    """
    collector = make_workers(MultiSyncCollector, policy, BoardScheme(prove=False), 100)
    found = {}
    try:
        learner = deepcopy(policy)
        hook = SyncWeights(MAP, trainer=make_trainer(collector, learner))
        forms = {"tensordict": TensorDict.from_module(learner), "module": learner}
        for name, weights in forms.items():
            calls, hooks = [], []
            for _ in range(WARM_UP + trials):
                hooks.append(timed(hook.publish))
                calls.append(timed(partial(collector.update_policy_weights_, weights)))
            taken = statistics.median(calls[WARM_UP:])
            found[f"{name}_us"] = 1e6 * taken
            found[f"{name}_per_hook"] = taken / statistics.median(hooks[WARM_UP:])
    finally:
        collector.shutdown()
    return found


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
    collector = make_workers(MultiAsyncCollector, policy, BoardScheme(prove=False), 50)
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
    arrived, rollout = (
        statistics.median(arrivals) * 1e6,
        statistics.quantiles(rollouts[5:], n=20)[-1] * 1e6,
    )
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
    row["calls"] = measure_calls(policy, trials)
    row |= {
        f"adopt_{mode}_us": 1e6 * seconds for mode, seconds in adoption_s(policy, trials).items()
    }
    row |= measure_arrival(policy, 15)
    board = row["board"]["hold_us"]
    row["SharedMem_per_board"] = row["SharedMem"]["hold_us"] / board
    row["MultiProcess_per_board"] = row["MultiProcess"]["hold_us"] / board
    return row


HEAD = (
    "| model | bytes | memcpy | board | / memcpy | SharedMem / board | MultiProcess / board "
    "| update(tensordict) / board | update(module) / board "
    "| adopt alias | adopt copy | arrival, busy | / rollout |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|---|---|"
)


def line(row: dict) -> str:
    board = row["board"]
    return (
        f"| {row['model']}, {row['tensors']} tensors | {row['bytes'] / 1e6:.2f} MB "
        f"| {board['memcpy_us']:,.0f} us | {board['hold_us']:,.0f} us "
        f"| {board['hold_per_memcpy']:.2f} | {row['SharedMem_per_board']:.1f} "
        f"| {row['MultiProcess_per_board']:.1f} | {row['calls']['tensordict_per_hook']:.2f} "
        f"| {row['calls']['module_per_hook']:.2f} | {row['adopt_alias_us']:,.0f} us "
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
