"""The time of one update of a learner, on a CPU or a GPU, in each way that a recipe can take.

    python benchmarks/updates.py [--device cuda:0] [--recipes sac td3 dqn ppo] [--hidden 256] [--rows 256]
                                 [--updates 200] [--rounds 5] [--out updates.json]
    python benchmarks/updates.py --runs [RUN ...] [--overrides KEY=VALUE ...] [--rounds 5]

An update is one call of ``Trainer.optim_steps`` with a batch that lies on the device: losses, gradients,
clipping, Adam and targets. The ways take turns: "torchrl" (TorchRL's loss and stepper), "eager" (functions of
tensors), "compiled" (``recipe.compile=on``). The first 20 updates of each are not counted. Figures are
medians of the rounds; compare ratios within one run.

With ``--runs`` it is the learner's whole step, beside its update, in short runs of ``rlsync train``. The step
is ``Trainer.optim_steps`` divided by its updates: draws, hooks, publishes, and what an epoch begins with. The
update is the call of the stepper in it. Times are of the learner's thread, which others on the machine do
not lengthen by their turns; the first quarter of a run is not counted. ``--rounds`` is not read.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.trainers import Trainer

from rlsync.runs.config import command_line
from rlsync.runs.life.job import jobs_of
from rlsync.runs.life.training import prepare_process
from rlsync.runs.recipes.pure import Graphs, PureStepper
from tests.runs.recipes.test_pure import UPDATES, Drawn

FEATURES, ACTIONS, WARM_UP = 17, 6, 20


def learner(recipe: str, hidden: int, rows: int, device: torch.device) -> Drawn:
    """The recipe's loss, optimizers and targets, and a batch for them, of sizes that are given."""
    given = Drawn(recipe, 0, torch.float32, str(device), copies_every=500)
    given.features, given.actions, given.rows, given.low, given.high = (
        FEATURES,
        ACTIONS,
        rows,
        -1.0,
        1.0,
    )
    given.weighed = given.steps = False
    given.keys = {"hidden": [hidden, hidden]}
    return given


#: What ``--runs`` runs, as ``rlsync train`` takes it.
RUNS: dict[str, list[str]] = {
    "dqn": ["recipe=dqn", "recipe.prioritized=false", "recipe.total_frames=6000"],
    "dqn, prioritised": ["recipe=dqn", "recipe.prioritized=true", "recipe.total_frames=6000"],
    "ppo": ["recipe=ppo", "recipe.total_frames=20480"],
    "sac": ["recipe=sac", "recipe.pace.prefill=1000", "recipe.total_frames=1600"],
    "sac, prioritised": [
        "recipe=sac",
        "recipe.prioritized=true",
        "recipe.pace.prefill=1000",
        "recipe.total_frames=1600",
    ],
    "td3": ["recipe=td3", "recipe.pace.prefill=1000", "recipe.total_frames=1800"],
    "crossq": ["recipe=crossq", "recipe.pace.prefill=1000", "recipe.total_frames=1500"],
}
ALONE = (
    "recipe.target_return=null",
    "recipe.evaluation.every_frames=0",
    "logger=none",
    "checkpoint_every_frames=1000000",
    "seed=0",
)


@dataclass
class Steps:
    """Seconds of the thread that learns: a step, and the update in it, a pair for each batch."""

    pairs: list[tuple[float, float]] = field(default_factory=list)

    def watch(self, trainer: Trainer) -> None:
        stepper = trainer.optimization_stepper
        step = stepper.step
        optim_steps = trainer.optim_steps
        updates: list[float] = []

        def timed(trainer: Trainer, batch: TensorDictBase) -> TensorDictBase:
            began = time.thread_time()
            found = step(trainer, batch)
            updates.append(time.thread_time() - began)
            return found

        def whole(batch: TensorDictBase) -> None:
            updates.clear()
            began = time.thread_time()
            optim_steps(batch)
            took = time.thread_time() - began
            if updates:
                self.pairs.append((took / len(updates), statistics.mean(updates)))

        stepper.step = timed
        trainer.optim_steps = whole

    def medians_ms(self) -> dict[str, float]:
        counted = self.pairs[len(self.pairs) // 4 :]
        step, update = (1e3 * statistics.median(each) for each in zip(*counted, strict=True))
        return {
            "step": step,
            "update": update,
            "ratio": statistics.median(a / b for a, b in counted),
        }


def in_a_run(name: str, overrides: Sequence[str]) -> dict[str, Any]:
    """A short run of a recipe: milliseconds of a step and of its update, and their ratio."""
    (job,) = jobs_of(command_line.read([*RUNS[name], *ALONE, *overrides]))
    steps = Steps()
    with tempfile.TemporaryDirectory() as run_dir:
        trainer = job.placed(run_dir, None).build()
        steps.watch(trainer)
        try:
            trainer.train()
        finally:
            trainer.collector.shutdown()
    return {"run": name, "ms": steps.medians_ms(), "took": trainer.optimization_stepper.way()}


def in_runs(options: argparse.Namespace) -> None:
    prepare_process()
    torch.set_num_threads(1)
    rows = []
    for name in options.runs or RUNS:
        rows.append(in_a_run(name, options.overrides))
        print(json.dumps(rows[-1]), flush=True)
    Path(options.out).write_text(
        json.dumps({"torch": torch.__version__, "results": rows}, indent=2)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--recipes", nargs="+", default=["sac", "td3", "dqn", "ppo"])
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--updates", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", default="updates.json")
    parser.add_argument("--runs", nargs="*", metavar="RUN", choices=RUNS, help=", ".join(RUNS))
    parser.add_argument(
        "--overrides", nargs="*", default=["recipe.compile=off"], metavar="KEY=VALUE"
    )
    options = parser.parse_args()
    if options.runs is not None:
        in_runs(options)
        return
    torch.set_num_threads(1)
    device = torch.device(options.device)
    ready, name = (lambda: None), platform.processor()
    if device.type != "cpu":
        module = torch.get_device_module(device)
        ready, name = module.synchronize, module.get_device_name(device)
    rows = []
    for recipe in options.recipes:
        given = learner(recipe, options.hidden, options.rows, device)
        batch = given.batch(0)
        ways: dict[str, tuple[Trainer, PureStepper | None]] = {}
        for way in ("torchrl", "eager", "compiled"):
            trainer, stepper = given.trainer(), None
            if way != "torchrl":
                graphs = Graphs(device) if way == "compiled" else None
                stepper = PureStepper(partial(UPDATES[recipe], trainer), graphs)
                stepper.register(trainer)
            ways[way] = trainer, stepper
        times: dict[str, list[float]] = {way: [] for way in ways}
        for number in range(options.rounds + 1):
            for way, (trainer, _) in ways.items():
                updates = options.updates if number else WARM_UP
                ready()
                began = time.perf_counter()
                for _ in range(updates):
                    trainer.optim_steps(batch)
                ready()
                if number:
                    times[way].append(1e3 * (time.perf_counter() - began) / updates)
        row = {
            "recipe": recipe,
            "ms": {way: statistics.median(taken) for way, taken in times.items()},
        }
        row["took"] = {
            way: stepper.way() for way, (_, stepper) in ways.items() if stepper is not None
        }
        rows.append(row)
        print(json.dumps(row), flush=True)
    found = {"torch": torch.__version__, "device": f"{device} ({name})", "hidden": options.hidden}
    Path(options.out).write_text(
        json.dumps({**found, "rows": options.rows, "results": rows}, indent=2)
    )


if __name__ == "__main__":
    main()
