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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import optim
from torchrl.data import Bounded, OneHot
from torchrl.trainers import TargetNetUpdaterHook, Trainer

from rlsync.recipes import dqn, ppo, pure, sac, td3
from rlsync.recipes.dqn import DQNConfig
from rlsync.recipes.sac import SACConfig
from rlsync.recipes.settings import PPOConfig
from rlsync.recipes.spaces import Spaces
from rlsync.recipes.td3 import TD3Config

FEATURES, ACTIONS, WARM_UP = 17, 6, 20


def made(loss: Any, target: Any = None, **parts: Any) -> Trainer:
    trainer = Trainer(
        collector=None, total_frames=1, frame_skip=1, optim_steps_per_batch=1, loss_module=loss,
        clip_norm=10.0, progress_bar=False, **parts,
    )  # fmt: skip
    if target is not None:
        trainer.register_op("post_optim", TargetNetUpdaterHook(target))
    return trainer


def learner(name: str, hidden: int, device: torch.device) -> tuple[Trainer, Callable[[], pure.Update]]:
    """A trainer without workers, and its update as functions of tensors."""
    torch.manual_seed(0)
    discrete = name in ("dqn", "ppo")
    spaces = Spaces(FEATURES, ACTIONS, OneHot(ACTIONS) if discrete else Bounded(-1, 1, (ACTIONS,)), None)
    sizes = {"hidden": [hidden, hidden]}
    if name == "ppo":
        loss = ppo.make_loss(PPOConfig(**sizes), spaces, device)
        trainer = made(loss, optimizer=optim.Adam(loss.parameters(), lr=3e-4, eps=1e-5, fused=True))
        return trainer, lambda: ppo.pure_update(loss, trainer.optimizer)
    if name == "dqn":
        settings = DQNConfig(**sizes)
        loss = dqn.make_loss(settings, spaces, dqn.make_policy(settings, spaces)[0]).to(device)
        target = dqn.CopyEvery(loss, value_network_update_interval=500)
        trainer = made(loss, target, optimizer=optim.Adam(loss.parameters(), lr=3e-4, fused=True))
        return trainer, lambda: dqn.pure_update(loss, trainer.optimizer)
    if name == "sac":
        settings = SACConfig(**sizes)
        loss = sac.make_loss(settings, spaces, device)
        trainer = made(loss, pure.SoftTargets(loss, tau=0.005), optimizer=sac.make_optimizer(settings, loss))
        return trainer, lambda: sac.pure_update(loss, trainer.optimizer)
    settings = TD3Config(**sizes)
    loss = td3.make_loss(settings, spaces, device)
    target = pure.SoftTargets(loss, tau=0.005)
    stepper = td3.make_stepper(settings, loss, target)
    trainer = made(loss, target_net_updater=target, optimization_stepper=stepper)
    return trainer, lambda: td3.pure_update(loss, stepper)


def batch_for(name: str, rows: int, device: torch.device) -> TensorDict:
    ends = torch.rand(rows, 1) < 0.1
    action = torch.rand(rows, ACTIONS) * 2 - 1
    if name in ("dqn", "ppo"):
        action = torch.eye(ACTIONS, dtype=torch.int64)[action.argmax(-1)]
    batch: dict[str, Any] = {
        "observation": torch.randn(rows, FEATURES),
        "action": action,
        "next": {
            "observation": torch.randn(rows, FEATURES),
            "reward": torch.randn(rows, 1),
            "terminated": ends,
            "truncated": torch.zeros_like(ends),
            "done": ends,
        },
    }
    if name == "ppo":
        batch |= {
            "action_log_prob": -torch.rand(rows),
            "advantage": torch.randn(rows, 1),
            "value_target": torch.randn(rows, 1),
        }
    return TensorDict(batch, [rows]).to(device)


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
    ready = torch.get_device_module(device).synchronize if device.type != "cpu" else lambda: None
    name = (
        platform.processor()
        if device.type == "cpu"
        else torch.get_device_module(device).get_device_name(device)
    )
    rows = []
    for recipe in options.recipes:
        batch = batch_for(recipe, options.rows, device)
        ways: dict[str, tuple[Trainer, pure.PureStepper | None]] = {}
        for way in ("torchrl", "eager", "compiled"):
            trainer, update = learner(recipe, options.hidden, device)
            stepper = None
            if way != "torchrl":
                stepper = pure.PureStepper(update, pure.Graphs(device) if way == "compiled" else None)
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
