"""What a small batch costs the learner: the processor time to take it, and to publish after it.

    python benchmarks/small_batches.py [--before CHECKOUT] [--rounds 5]

One worker, one CartPole environment, 4 steps a batch, as recipes with a replay buffer collect. The learner's
thread waits until a rollout is there, which is not counted. Then it takes the batch, as transitions that are
the slot's own memory, or as unrolls, and publishes two layers of 64: by ``update_policy_weights_()``, or by
``SyncWeights.publish()``. Each number is the tenth percentile of a round, for other programs make some
batches slower, and the least of the rounds.

``--before`` names a checkout of rlsync to compare with; the two take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

STEPS = 4
BATCHES = 400  #: of one round
PARTS = ("take", "publish")
KINDS = {
    "transitions, update_policy_weights_()": (True, False),
    "transitions, SyncWeights.publish()": (True, True),
    "unrolls, update_policy_weights_()": (False, False),
}


def measured(transitions: bool, by_hook: bool) -> dict[str, float]:
    """Microseconds of the learner's thread for each part of a batch."""
    import torch
    from torch import nn

    from rlsync.runs.actors.collector import UnrollCollector
    from rlsync.runs.actors.envs.actions import DiscreteActions
    from rlsync.runs.actors.envs.specs import GymnasiumEnvs
    from rlsync.runs.actors.players.q import EpsilonGreedyPlayer
    from rlsync.runs.actors.settings import CollectSettings

    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2)]
    player = EpsilonGreedyPlayer(
        nn.Sequential(*layers), DiscreteActions(2), (4,), record_values=False
    )
    envs = GymnasiumEnvs("CartPole-v1")
    settings = CollectSettings(steps=STEPS, envs_per_worker=1, transitions=transitions)
    collector = UnrollCollector(player, envs, settings, num_workers=1)
    times: dict[str, list[float]] = {part: [] for part in PARTS}
    try:
        publish = published_by_hook(collector) if by_hook else collector.update_policy_weights_
        batches = iter(collector)
        next(batches)
        for _ in range(BATCHES):
            while not collector.counters().full:
                time.sleep(2e-4)
            began = time.thread_time()
            next(batches)
            taken = time.thread_time()
            publish()
            ended = time.thread_time()
            times["take"].append(taken - began)
            times["publish"].append(ended - taken)
    finally:
        collector.shutdown()
    return {part: 1e6 * statistics.quantiles(values, n=10)[0] for part, values in times.items()}


def published_by_hook(collector: Any) -> Any:
    """The publish of a map, as a trainer's hook makes it."""
    from tensordict.nn import TensorDictModule
    from torch import nn, optim
    from torchrl.trainers import Trainer

    from rlsync import SyncWeights

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = collector.player.modules["policy"]

        def forward(self, batch: Any) -> Any:
            return TensorDictModule(self.network, ["observation"], ["loss"])(batch)

    loss: Any = Loss()
    trainer = Trainer(
        collector=collector, total_frames=10**9, frame_skip=1, optim_steps_per_batch=1, loss_module=loss,
        optimizer=optim.Adam(loss.parameters()), progress_bar=False,
    )  # fmt: skip
    sync = SyncWeights({"policy": "loss_module.network"})
    sync.register(trainer)
    return sync.publish


def child(kind: str, checkout: Path) -> dict[str, float]:
    """One round, in a process of its own, with the code of a checkout."""
    words = [sys.executable, __file__, "--child", kind]
    env = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, env=env, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", type=Path, help="a checkout of rlsync to compare with")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--child", choices=KINDS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        print(json.dumps(measured(*KINDS[given.child])))
        return
    checkouts = {"now": Path(__file__).resolve().parents[1]}
    if given.before is not None:
        checkouts["before"] = given.before.resolve()
    rounds: dict[tuple[str, str], list[dict[str, float]]] = {}
    for _ in range(given.rounds):
        for kind in KINDS:
            for name, checkout in checkouts.items():
                rounds.setdefault((kind, name), []).append(child(kind, checkout))
    print(f"microseconds of the learner's processor time, for a batch of {STEPS} frames")
    print(f"{'':42}{'':8}{'take':>8}{'publish':>9}{'both':>7}")
    for (kind, name), found in rounds.items():
        take, publish = (min(one[part] for one in found) for part in PARTS)
        print(f"{kind:42}{name:8}{take:8.0f}{publish:9.0f}{take + publish:7.0f}")


if __name__ == "__main__":
    main()
