"""PPO of rlox, whose environments and advantages are written in Rust, with the settings of recipe=ppo.

    PEER_PYTHON benchmarks/peers/rlox_peer.py --frames 20480 --num-envs 8 --seed 0

Its learning rate falls to zero, and not to a twentieth. Its environments are its own CartPole.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import torch
from rlox.algorithms.ppo import PPO
from rlox.callbacks import Callback

FRAMES_PER_BATCH = 2048


class Report(Callback):
    """Prints a line of JSON for the measuring process before the first rollout, and after each batch."""

    def __init__(self) -> None:
        super().__init__()
        self._began_s = time.monotonic()
        self._batches = 0
        self._updates = 0

    def on_training_start(self) -> None:
        self._began_s = time.monotonic()
        self._report()

    def on_train_batch(self, **_: Any) -> None:
        self._updates += 1

    def on_step(self, **_: Any) -> bool:
        self._batches += 1
        self._report()
        return True

    def _report(self) -> None:
        said = {
            "steps": self._batches * FRAMES_PER_BATCH,
            "updates": self._updates,
            "seconds": time.monotonic() - self._began_s,
        }
        print("@", json.dumps(said), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--env", default="CartPole-v1")
    parser.add_argument("--frames", type=int, default=20_480)
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    ppo = PPO(
        options.env,
        n_envs=options.num_envs,
        seed=options.seed,
        callbacks=[Report()],
        n_steps=FRAMES_PER_BATCH // options.num_envs,
        batch_size=128,
        n_epochs=4,
        learning_rate=2e-3,
        ent_coef=0.0,
        clip_vloss=False,
    )
    ppo.train(options.frames)


if __name__ == "__main__":
    main()
