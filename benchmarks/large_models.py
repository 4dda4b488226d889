"""What large models cost the learner and a worker: publishes, adoptions, memory, and what looks at each leaf.

    python benchmarks/large_models.py [--models 100mb 1gb 4gb leaves] [--trials 7] [--json large_models.json]

Each model is measured in a process of its own, with one worker process that acts with all leaves. Times are
medians, in milliseconds of the clock and of the processor; compare the columns of one row.

- **memcpy**: one copy of as many bytes, in blocks of at most 512 MB;
- **publish**: ``hook.publish()`` with an idle worker, with the model as one destination, and as eight;
- **held**: how long ``SyncWeights(background=True)`` holds the learner, and how long its copy takes then;
- **adopt**: in a reader of the same process, by alias and by copy;
- **memory**: the proportional set size of learner and worker, beyond what both have with a model of one leaf;
- **start**: from the construction of the collector to its first batch; of it, **proof**: what a worker does
  to find out which leaves act, in processor time;
- **hook**, **table**: to resolve the map, and to print the plan as ``rlsync explain`` does;
- **digests**, **outputs**: one question of VerifySync, for the learner and for the worker.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from behaviour import worker_s
from footprint import pss_bytes
from publish_parts import adoption_s, make_trainer, make_workers
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import nn
from torchrl.collectors import BaseCollector, Collector, MultiSyncCollector
from torchrl.envs import GymEnv

from rlsync import BoardScheme, Every, SyncWeights
from rlsync.torchrl_plugin.collectors.choose import endpoint_of
from rlsync.torchrl_plugin.compat import collectors
from rlsync.torchrl_plugin.worker import acting_in

#: name: (leaves, floats in each)
MODELS = {
    "100mb": (96, 260_000),
    "1gb": (96, 2_600_000),
    "4gb": (96, 10_400_000),
    "leaves": (20_000, 1_000),
    "1mb": (96, 2_600),
}
PARTS = 8
ONE = {"policy": "loss_module.actor_network"}
EIGHT = {f"policy.parts.{part}": f"loss_module.actor_network.parts.{part}" for part in range(PARTS)}
BLOCK_BYTES = 512 * 10**6
Figures = dict[str, float]


class Policy(TensorDictModuleBase):
    """As many leaves as wanted, in eight parts. Its outputs depend on each of them."""

    def __init__(self, leaves: int, floats: int) -> None:
        super().__init__()
        self.in_keys, self.out_keys = ["observation"], ["action", "score"]
        self.parts = nn.ModuleList()
        for part in range(PARTS):
            count = len(range(part, leaves, PARTS))
            self.parts.append(nn.ParameterList(torch.ones(floats) for _ in range(count)))

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        total = torch.stack([weight[0] for weight in self.parameters()]).sum()
        score = total + tensordict["observation"]
        action = torch.zeros(*tensordict.batch_size, 2, dtype=torch.int64)
        action[..., 0] = 1
        return tensordict.update({"score": score, "action": action})


# ------------------------------------------------------------------------------------------ measuring


class Spent:
    """Milliseconds of the clock, of this process's main thread, and of a worker, over the uses of a block."""

    def __init__(self, worker: int | None = None) -> None:
        self._worker = worker
        self.wall: list[float] = []
        self.cpu: list[float] = []
        self.of_worker: list[float] = []

    @contextmanager
    def counted(self) -> Iterator[None]:
        before = time.perf_counter(), time.thread_time(), self._of_worker()
        yield
        after = time.perf_counter(), time.thread_time(), self._of_worker()
        for column, began, ended in zip(
            (self.wall, self.cpu, self.of_worker), before, after, strict=True
        ):
            column.append(1e3 * (ended - began))

    def _of_worker(self) -> float:
        if self._worker is None:
            return 0.0
        return worker_s([self._worker])


def median(values: list[float]) -> float:
    return statistics.median(values[1:] or values)  # the first one takes the page faults


def memcpy(payload_bytes: int, trials: int) -> Figures:
    floats = min(payload_bytes, BLOCK_BYTES) // 4
    source, target = torch.ones(floats), torch.zeros(floats)
    spent = Spent()
    for _ in range(1 + trials):
        with spent.counted():
            target.copy_(source)
    times = payload_bytes / (4 * floats)
    return {"memcpy_ms": times * median(spent.wall), "memcpy_cpu_ms": times * median(spent.cpu)}


def workers_of(policy: nn.Module) -> BaseCollector:
    collector = make_workers(MultiSyncCollector, policy, BoardScheme(), 2, workers=1)
    torch.set_num_threads(1)  # TorchRL gives the learner all cores but one for each worker
    return collector


def hook_of(
    collector: BaseCollector, policy: nn.Module, by_destination: dict[str, str]
) -> SyncWeights:
    optimizer = torch.optim.SGD(
        policy.parameters()
    )  # in its step a background publish would be joined
    trainer = make_trainer(collector, policy, optimizer)
    return SyncWeights(
        by_destination, trainer=trainer, when=Every(1, "optim_steps"), background=True
    )


def empty_bytes() -> float:
    """What learner and worker have with a model of one number in each part."""
    policy = Policy(PARTS, 1)
    collector = workers_of(policy)
    hook_of(collector, policy, ONE).publish()
    next(iter(collector))
    grown = pss_bytes([os.getpid(), collector.procs[0].pid])
    collector.shutdown()
    return grown


def with_a_worker(policy: Policy, trials: int) -> Figures:
    """A run of the hook with a worker process."""
    figures: Figures = {}
    empty = empty_bytes()
    started = time.perf_counter()
    collector = workers_of(policy)
    resolving = Spent()
    with resolving.counted():
        hook = hook_of(collector, policy, ONE)
    hook.publish()
    stream = iter(collector)
    next(stream)
    figures["start_s"] = time.perf_counter() - started
    figures["hook_cpu_ms"] = resolving.cpu[0]
    printing = Spent()
    with printing.counted():
        hook.plan.table()
    figures["table_cpu_ms"] = printing.cpu[0]

    at_once, held, joined = Spent(), Spent(), Spent()
    for _ in range(1 + trials):
        with at_once.counted():
            hook.publish()
        next(stream)
        scale(policy, 1.0)  # as a step does
        hook._optim_steps += 1  # normally the trainer's loop counts it
        with held.counted():
            hook()
        with joined.counted():
            hook.join()
        next(stream)
    figures["publish_ms"] = median(at_once.wall)
    figures["publish_cpu_ms"] = median(at_once.cpu)
    figures["held_ms"] = median(held.wall)
    figures["copied_after_ms"] = median(joined.wall)
    grown = pss_bytes([os.getpid(), collector.procs[0].pid]) - empty
    figures["models"] = grown / hook.plan.payload_bytes
    figures["payload_mb"] = hook.plan.payload_bytes / 1e6
    figures |= questions(collector, hook, policy, stream, trials)
    collector.shutdown()
    return figures


@torch.no_grad()
def scale(policy: Policy, factor: float) -> None:
    for weight in policy.parameters():
        weight.mul_(factor)


def questions(
    collector: BaseCollector,
    hook: SyncWeights,
    policy: Policy,
    stream: Iterator[TensorDictBase],
    trials: int,
) -> Figures:
    """What a question costs beyond a publish and a batch without one."""
    verification = endpoint_of(collector).verification()
    judges: dict[str, Callable[[], object]] = {
        "none": lambda: None,
        "digests": verification.ask,
        "outputs": lambda: verification.ask(hook.bound.judge),
    }
    spent = {kind: Spent(collector.procs[0].pid) for kind in judges}
    factors = cycle((1.5, 1 / 1.5))
    for _ in range(1 + trials):
        for kind, ask in judges.items():
            scale(policy, next(factors))
            with spent[kind].counted():
                hook.publish()
                ask()
                next(stream)
                if kind != "none":
                    heard = verification.hear()
                    assert heard.done, heard.waiting
                    assert not heard.deviations, heard.deviations
    left_out = any(judged.uncompared for judged in heard.behaviour)
    figures: Figures = {"outputs_left_out": float(left_out)}
    for kind in ("digests", "outputs"):
        for column in ("cpu", "of_worker"):
            more = median(getattr(spent[kind], column)) - median(getattr(spent["none"], column))
            figures[f"{kind}_{column}_ms"] = more
    return figures


def of_eight_destinations(policy: Policy, trials: int) -> Figures:
    collector = workers_of(policy)
    hook = hook_of(collector, policy, EIGHT)
    stream = iter(collector)
    spent = Spent()
    for _ in range(1 + trials):
        with spent.counted():
            hook.publish()
        next(stream)
    collector.shutdown()
    return {"publish_of_8_ms": median(spent.wall), "publish_of_8_cpu_ms": median(spent.cpu)}


def proof(policy: Policy, _trials: int) -> Figures:
    """The look of a worker at which leaves act, in an in-process collector."""
    collector = Collector(
        lambda: GymEnv("CartPole-v1"), policy, frames_per_batch=2, total_frames=-1
    )
    call = collectors.policy_call(collector)
    spent = Spent()
    with spent.counted():
        acting = acting_in(collector, call, {"policy": collectors.policy_of(collector)}, {"policy"})
    assert not acting.idle
    collector.shutdown()
    left_out = float(bool(acting.unknown))
    return {"proof_cpu_ms": spent.cpu[0], "proof_left_out": left_out}


def measure(model: str, trials: int, answer: Connection) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    leaves, floats = MODELS[model]
    policy = Policy(leaves, floats)
    figures = memcpy(4 * leaves * floats, trials)
    for part in (with_a_worker, of_eight_destinations, proof):
        figures |= part(policy, trials)
        gc.collect()  # a board lives as long as its scheme, which its collector holds in a cycle
    for mode, seconds in adoption_s(policy, trials).items():
        figures[f"adopt_by_{mode}_ms"] = 1e3 * seconds
    answer.send({"model": model, "leaves": leaves, **figures})


def asked(model: str, trials: int) -> dict[str, float | str]:
    """The figures of a model, from a process of its own, which gives its memory back."""
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=measure, args=(model, trials, theirs))
    process.start()
    theirs.close()
    try:
        return ours.recv()
    except EOFError:
        raise SystemExit(f"{model}: the process that measured it ended, see above") from None
    finally:
        process.join()


# ------------------------------------------------------------------------------------------- the table


#: Figure: what it is, and the figure that says if it was left out for want of memory.
ROWS = {
    "memcpy_ms": ("one memcpy", ""),
    "publish_ms": ("publish", ""),
    "publish_of_8_ms": ("publish as eight destinations", ""),
    "held_ms": ("held by a publish in the background", ""),
    "copied_after_ms": ("its copy, in a thread", ""),
    "adopt_by_alias_ms": ("adopt by alias", ""),
    "adopt_by_copy_ms": ("adopt by copy", ""),
    "digests_cpu_ms": ("digests: the learner", ""),
    "digests_of_worker_ms": ("digests: a worker", ""),
    "outputs_cpu_ms": ("digests and outputs: the learner", "outputs_left_out"),
    "outputs_of_worker_ms": ("digests and outputs: a worker", "outputs_left_out"),
    "proof_cpu_ms": ("which leaves act: a worker, once", "proof_left_out"),
    "hook_cpu_ms": ("to resolve the map, once", ""),
    "table_cpu_ms": ("to print the plan", ""),
    "start_s": ("start, to the first batch, **s**", ""),
    "models": ("memory of learner and worker, **models**", ""),
}


def table(rows: list[dict[str, float | str]]) -> str:
    """The figures as a table in Markdown: a row for each figure, a column for each model."""
    heads = [f"{row['payload_mb']:,.0f} MB, {row['leaves']:,} leaves" for row in rows]
    lines = [f"| ms | {' | '.join(heads)} |", "|---|" + "---:|" * len(rows)]
    for figure, (words, left_out) in ROWS.items():
        cells = []
        for row in rows:
            cell = f"{row[figure]:,.2f}"
            if left_out and row[left_out]:
                cell = "outputs left out" if left_out == "outputs_left_out" else f"{cell}, in part"
            cells.append(cell)
        lines.append(f"| {words} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=[*MODELS][:4])
    parser.add_argument("--trials", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    for model in options.models:
        rows.append(asked(model, options.trials))
        print(json.dumps(rows[-1]), flush=True)
    print(table(rows))
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
