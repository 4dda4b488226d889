"""rlsync in your own trainer: TorchRL's Trainer, two worker processes on a board, register_op.

    python examples/own_trainer.py [batches]

The learner publishes after every second batch. Each batch carries the version that acted, and each receipt
says how long the publish took.
"""

from __future__ import annotations

import sys
import warnings
from functools import partial

import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors import MultiSyncCollector
from torchrl.envs import GymEnv
from torchrl.modules import OneHotCategorical, ProbabilisticActor, ValueOperator
from torchrl.objectives import A2CLoss
from torchrl.objectives.value import GAE
from torchrl.trainers import Trainer

from rlsync import BoardScheme, Every, RlsyncWarning, SyncWeights


def make_loss() -> A2CLoss:
    def mlp(outputs: int) -> nn.Sequential:
        return nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, outputs))

    actor = ProbabilisticActor(
        TensorDictModule(mlp(2), in_keys=["observation"], out_keys=["logits"]),
        in_keys=["logits"],
        distribution_class=OneHotCategorical,
        return_log_prob=True,
    )
    return A2CLoss(actor, ValueOperator(mlp(1), in_keys=["observation"]))


def main(batches: int = 10) -> list[tuple[int, int]]:
    """Train, and return for each batch the versions that acted: the lowest and the highest."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    warnings.filterwarnings("default", category=RlsyncWarning)
    loss = make_loss()
    collector = MultiSyncCollector(
        [partial(GymEnv, "CartPole-v1")] * 2,
        loss.actor_network,
        frames_per_batch=200,
        total_frames=-1,
        weight_sync_schemes={"policy": BoardScheme()},
    )
    trainer = Trainer(
        collector=collector,
        total_frames=200 * batches,
        frame_skip=1,
        optim_steps_per_batch=1,
        loss_module=loss,
        optimizer=torch.optim.Adam(loss.parameters(), lr=1e-3),
        progress_bar=False,
    )
    trainer.register_op(
        "batch_process", GAE(gamma=0.99, lmbda=0.95, value_network=loss.critic_network)
    )
    acted: list[tuple[int, int]] = []

    def watch(batch):
        versions = batch["policy_version"]
        acted.append((int(versions.min()), int(versions.max())))

    trainer.register_op("pre_steps_log", watch)

    sync = SyncWeights(
        {"policy": "loss_module.actor_network"}, when=Every(2, "batches"), trainer=trainer
    )
    trainer.register_op("post_steps", sync)
    print(sync.plan)
    trainer.train()
    for receipt in sync.receipts:
        print(
            f"version {receipt.version} after batch {receipt.batches}: {receipt.duration_s * 1e6:.0f} us"
        )
    print("versions that acted, batch by batch:", acted)
    return acted


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
