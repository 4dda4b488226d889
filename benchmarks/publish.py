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
from functools import partial
from pathlib import Path

import torch
from tensordict.nn import TensorDictModuleBase
from torch import nn
from torchrl.collectors import BaseCollector, MultiAsyncCollector, MultiSyncCollector
from torchrl.envs import GymEnv
from torchrl.trainers import Trainer
from torchrl.trainers import UpdateWeights as StockUpdateWeights
from torchrl.weight_update import (
    MultiProcessWeightSyncScheme,
    SharedMemWeightSyncScheme,
    WeightSyncScheme,
)

from rlsync import BoardScheme, Every, SyncWeights
from rlsync.tensors.layout import Layout
from rlsync.tensors.leaves import Leaves
from rlsync.tensors.target import Target
from rlsync.transport.board import BoardReader, WeightBoard

#: name: (number of tensors, floats in each)
MODELS = {
    "mlp": (12, 1_700),
    "resnet": (34, 46_000),
    "100mb": (300, 83_333),
    "400mb": (150, 666_667),
    "many": (1_000, 1_000),
}
SCHEMES: dict[str, Callable[[], WeightSyncScheme]] = {
    "board": BoardScheme,
    "SharedMem": SharedMemWeightSyncScheme,
    "MultiProcess": MultiProcessWeightSyncScheme,
}
MAP = {"policy": "loss_module.actor_network"}


class BulkPolicy(TensorDictModuleBase):
    """As many parameters as one likes, of which the action reads one number."""

    def __init__(self, tensors: int, floats: int) -> None:
        super().__init__()
        self.in_keys, self.out_keys = ["observation"], ["action"]
        self.weights = nn.ParameterList(torch.zeros(floats) for _ in range(tensors))

    def forward(self, tensordict):
        action = torch.zeros(*tensordict.batch_size, 2, dtype=torch.int64)
        action[..., int(self.weights[0][0] > 1e9)] = 1
        return tensordict.set("action", action)


class Loss(nn.Module):
    """A place for the policy to stand on a trainer."""

    def __init__(self, actor_network: nn.Module) -> None:
        super().__init__()
        self.actor_network = actor_network

    def forward(self, tensordict):
        return tensordict


def make_workers(
    kind: type[BaseCollector], policy: nn.Module, scheme: WeightSyncScheme, frames: int
) -> BaseCollector:
    return kind(
        [partial(GymEnv, "CartPole-v1")] * 2,
        policy,
        frames_per_batch=frames,
        total_frames=-1,
        weight_sync_schemes={"policy": scheme},
        track_policy_version=True,
        num_sub_threads=1,
    )


def make_trainer(collector: BaseCollector, policy: nn.Module) -> Trainer:
    return Trainer(
        collector=collector,
        total_frames=1,
        frame_skip=1,
        optim_steps_per_batch=1,
        loss_module=Loss(policy),
        progress_bar=False,
    )


def median_us(samples_s: list[float]) -> float:
    return statistics.median(samples_s) * 1e6


def timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


class Memcpy:
    """One contiguous copy of the same bytes: the floor."""

    def __init__(self, policy: nn.Module) -> None:
        floats = sum(p.numel() for p in policy.parameters())
        self.source, self.target = torch.ones(floats), torch.zeros(floats)

    def __call__(self) -> None:
        self.target.copy_(self.source)


def measure_hold(name: str, policy: nn.Module, trials: int) -> dict[str, float]:
    """How long one push holds the learner, workers idle, through the hook."""
    collector = make_workers(MultiSyncCollector, policy, SCHEMES[name](), 100)
    try:
        trainer = make_trainer(collector, deepcopy(policy))
        push = make_push(name, trainer)
        memcpy = Memcpy(policy)
        for _ in range(5):
            push(), memcpy()
        pushes, copies = [], []
        for _ in range(trials):
            copies.append(timed(memcpy))
            pushes.append(timed(push))
    finally:
        collector.shutdown()
    hold, copy = median_us(pushes), median_us(copies)
    return {"hold_us": hold, "memcpy_us": copy, "hold_per_memcpy": hold / copy}


def make_push(name: str, trainer: Trainer) -> Callable[[], object]:
    if name != "board":
        return StockUpdateWeights(trainer.collector, 1, weight_update_map=MAP, trainer=trainer)
    hook = SyncWeights(MAP, when=Every(1, "batches"))
    hook.register(trainer)

    def push() -> None:  # the trainer's own post_steps stage: it counts the batch and asks the hook
        trainer._post_steps_hook()

    return push


def measure_adoption(policy: nn.Module, trials: int) -> dict[str, float]:
    """The worker's side alone: adopt a version that is ready, by alias and by copy."""
    leaves = Leaves(policy, "policy")
    specs = leaves.specs()
    found = {}
    for mode in ("alias", "copy"):
        mine = BulkPolicy(len(specs), specs[0].shape[0])
        target = Target(mine, "policy", specs)
        board = WeightBoard()
        board.lay_out(Layout.build({"policy": specs}))

        def apply(version, layout, views, target=target, mode=mode):
            getattr(target, mode)(views)
            return mode == "alias"

        reader = BoardReader(board.handle, apply)
        samples = []
        for _ in range(trials + 5):
            board.publish(leaves.tensors())
            samples.append(timed(reader.adopt))
        found[f"adopt_{mode}_us"] = median_us(samples[5:])
        reader.close()
        board.close()
    return found


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
    arrived, rollout = median_us(arrivals), statistics.quantiles(rollouts[5:], n=20)[-1] * 1e6
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
    row |= measure_adoption(policy, trials)
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
