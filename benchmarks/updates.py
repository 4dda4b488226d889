"""The time of one update of a learner, on a CPU or a GPU, in each way that a recipe can take.

    python benchmarks/updates.py [--device cuda:0] [--recipes sac td3 dqn ppo] [--hidden 256] [--rows 256]
                                 [--updates 200] [--rounds 5] [--out updates.json]

An update is one call of ``Trainer.optim_steps`` with a batch that lies on the device: losses, gradients,
clipping, Adam and targets. The ways take turns: "torchrl" (TorchRL's loss and stepper), "eager" (functions of
tensors), "compiled" (``recipe.compile=on``). The first 20 updates of each are not counted. Figures are
medians of the rounds; compare ratios within one run.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from functools import partial
from pathlib import Path

import torch
from torchrl.trainers import Trainer

from rlsync.recipes.pure import Graphs, PureStepper
from tests.recipes.test_pure import UPDATES, Drawn

FEATURES, ACTIONS, WARM_UP = 17, 6, 20


def learner(recipe: str, hidden: int, rows: int, device: torch.device) -> Drawn:
    """The recipe's loss, optimizers and targets, and a batch for them, of sizes that are given."""
    given = Drawn(recipe, 0, torch.float32, str(device), copies_every=500)
    given.features, given.actions, given.rows, given.low, given.high = FEATURES, ACTIONS, rows, -1.0, 1.0
    given.weighed = given.steps = False
    given.keys = {"hidden": [hidden, hidden]}
    return given


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--recipes", nargs="+", default=["sac", "td3", "dqn", "ppo"])
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--updates", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", default="updates.json")
    options = parser.parse_args()
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
        row = {"recipe": recipe, "ms": {way: statistics.median(taken) for way, taken in times.items()}}
        row["took"] = {way: stepper.way() for way, (_, stepper) in ways.items() if stepper is not None}
        rows.append(row)
        print(json.dumps(row), flush=True)
    found = {"torch": torch.__version__, "device": f"{device} ({name})", "hidden": options.hidden}
    Path(options.out).write_text(json.dumps({**found, "rows": options.rows, "results": rows}, indent=2))


if __name__ == "__main__":
    main()
