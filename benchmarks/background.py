"""What a publish adds to an optimizer step: without one, with one, and with one in the background.

    python benchmarks/background.py [--models small 25mb 100mb 400mb] [--steps 40] [--busy]
                                    [--out background.json]

Each step is a real forward and backward pass through an MLP and a real SGD step, on one thread. Two workers
of a MultiAsyncCollector on a board are idle (no code takes their batches, so they wait), or busy (``--busy``:
a thread takes them). After every step the hook publishes, or does not. The three ways take turns, step by
step, within one run. The figures are medians. **held** is how long the publish itself holds the learner,
**step** is the whole step. The difference between two steps is the cost of publishing, with copy and join.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
import warnings
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path

import torch
from publish import make_workers
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import nn
from torchrl.collectors import BaseCollector, MultiAsyncCollector
from torchrl.trainers import Trainer

from rlsync import BoardScheme, Every, SyncWeights

#: name: (layers, width); the weights are 4 * layers * width * width bytes
MODELS = {"small": (3, 128), "25mb": (6, 1024), "100mb": (6, 2048), "400mb": (6, 4096)}
SAMPLES = 32
WAYS = ("not published", "at once", "in background")


class Policy(TensorDictModuleBase):
    """An MLP of any width. Only its first weight chooses actions, so that workers use little time."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.in_keys, self.out_keys = ["observation"], ["action"]
        self.net = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        action = torch.zeros(*tensordict.batch_size, 2, dtype=torch.int64)
        action[..., int(self.net[0].weight[0, 0] > 1e9)] = 1
        return tensordict.set("action", action)


class Learner:
    """A trainer with its hooks, which makes single optimizer steps."""

    def __init__(self, collector: BaseCollector, policy: Policy, width: int) -> None:
        loss = nn.Module()
        loss.actor_network = policy
        self.optimizer = torch.optim.SGD(policy.parameters(), lr=1e-6)
        self.trainer = Trainer(
            collector=collector,
            total_frames=1,
            frame_skip=1,
            optim_steps_per_batch=1,
            loss_module=loss,
            optimizer=self.optimizer,
            progress_bar=False,
        )
        self.net, self.batch = policy.net, torch.randn(SAMPLES, width)
        self.hook = SyncWeights(
            {"policy": "loss_module.actor_network"},
            when=Every(1, "optim_steps"),
            trainer=self.trainer,
            background=True,
        )
        self.hook()  # the publish before the first frame

    def step(self, way: str) -> tuple[float, float]:
        """One step, and the publish after it.

        Returns:
            The seconds of the whole step, and of the publish.
        """
        started = time.perf_counter()
        self.net(self.batch).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        stepped = time.perf_counter()
        if way == "at once":
            self.hook.publish()
        elif way == "in background":
            self.hook._optim_steps += 1  # normally the trainer's loop counts it
            self.hook()
        ended = time.perf_counter()
        return ended - started, ended - stepped


@contextmanager
def taking_batches(collector: BaseCollector, busy: bool):
    """Keep the workers busy: a thread takes their batches."""
    stop = threading.Event()

    def take() -> None:
        for _ in collector:
            if stop.is_set():
                return

    thread = threading.Thread(target=take)
    if busy:
        thread.start()
    yield
    stop.set()
    if busy:
        thread.join()


def measure(name: str, steps: int, busy: bool) -> dict[str, object]:
    """Measure one model."""
    layers, width = MODELS[name]
    learned = Policy(layers, width)
    collector = make_workers(MultiAsyncCollector, deepcopy(learned), BoardScheme(prove=False), 200)
    try:
        learner = Learner(collector, learned, width)
        with taking_batches(collector, busy):
            taken: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
            for round_ in range(steps + 3):
                for way in WAYS:
                    # Two steps: the second one waits for the copy that the first one started.
                    learner.step(way)
                    seconds = learner.step(way)
                    learner.hook.join()
                    if round_ >= 3:
                        taken[way].append(seconds)
    finally:
        collector.shutdown()
    row: dict[str, object] = {
        "model": name,
        "busy": busy,
        "payload_bytes": learner.hook.plan.payload_bytes,
    }
    for way in WAYS:
        step, held = (statistics.median(column) for column in zip(*taken[way], strict=True))
        row[way] = {"step_s": step, "held_s": held}
    return row


def line(row: dict) -> str:
    base = row[WAYS[0]]["step_s"]
    cells = [
        f"{row['model']}, {'busy' if row['busy'] else 'idle'}",
        f"{row['payload_bytes'] / 1e6:.1f}",
    ]
    cells.append(f"{1e3 * base:.2f}")
    for way in WAYS[1:]:
        step, held = row[way]["step_s"], row[way]["held_s"]
        cells += [f"{1e3 * step:.2f} ({step / base:.2f}x)", f"{1e3 * held:.2f}"]
    return f"| {' | '.join(cells)} |"


HEAD = (
    "| model, workers | MB | step without, ms | step at once, ms | held, ms "
    "| step in background, ms | held, ms |\n|---|---|---|---|---|---|---|"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--busy", action="store_true")
    parser.add_argument("--out", default="background.json")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    print(HEAD, flush=True)
    rows = []
    for name in options.models:
        rows.append(measure(name, options.steps, options.busy))
        print(line(rows[-1]), flush=True)
    Path(options.out).write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
