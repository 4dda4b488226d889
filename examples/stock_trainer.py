"""rlsync in one of TorchRL's stock trainers: PPOTrainer, two worker processes on a board.

    python examples/stock_trainer.py [batches]

PPOTrainer installs its own UpdateWeights, and SyncWeights replaces it. For every batch, the script prints the
version that acted and the length of the episodes.
"""

from __future__ import annotations

import sys
import warnings

import torch
from tensordict.nn import TensorDictModule
from torchrl.collectors import MultiSyncCollector
from torchrl.data import LazyTensorStorage, SamplerWithoutReplacement, TensorDictReplayBuffer
from torchrl.envs import GymEnv, StepCounter, TransformedEnv
from torchrl.modules import MLP, OneHotCategorical, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.trainers.algorithms import PPOTrainer

from rlsync import BoardScheme, Every, RlsyncWarning, SyncWeights, WatchWorkers

SYNC_MAP = {"policy": "loss_module.actor_network"}
FRAMES, MINIBATCH, EPOCHS = 1024, 128, 4


def make_env() -> TransformedEnv:
    return TransformedEnv(GymEnv("CartPole-v1"), StepCounter())


def make_loss() -> ClipPPOLoss:
    actor = ProbabilisticActor(
        TensorDictModule(
            MLP(4, 2, num_cells=[64, 64]), in_keys=["observation"], out_keys=["logits"]
        ),
        in_keys=["logits"],
        distribution_class=OneHotCategorical,
        return_log_prob=True,
    )
    critic = ValueOperator(MLP(4, 1, num_cells=[64, 64]), in_keys=["observation"])
    return ClipPPOLoss(actor, critic)


def make_trainer(batches: int) -> PPOTrainer:
    loss = make_loss()
    collector = MultiSyncCollector(
        [make_env] * 2,
        loss.actor_network,
        frames_per_batch=FRAMES,
        total_frames=-1,
        weight_sync_schemes={"policy": BoardScheme()},
    )
    return PPOTrainer(
        collector=collector,
        total_frames=FRAMES * batches,
        frame_skip=1,
        loss_module=loss,
        optimizer=torch.optim.Adam(loss.parameters(), lr=1e-3),
        replay_buffer=TensorDictReplayBuffer(
            storage=LazyTensorStorage(FRAMES),
            sampler=SamplerWithoutReplacement(),
            batch_size=MINIBATCH,
        ),
        optim_steps_per_batch=FRAMES // MINIBATCH,
        num_epochs=EPOCHS,
        weight_update_map=SYNC_MAP,  # required by TorchRL if the collector has schemes
        enable_logging=False,
        progress_bar=False,
    )


def main(batches: int = 20) -> list[list[int]]:
    """Train, and return for each batch the versions that acted."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    warnings.filterwarnings("default", category=RlsyncWarning)
    trainer = make_trainer(batches)
    sync = SyncWeights(SYNC_MAP, when=Every(1, "batches"))
    sync.register(trainer)
    WatchWorkers().register(trainer)
    acted: list[list[int]] = []

    def watch(batch):
        acted.append(batch["policy_version"].unique().tolist())
        lengths = batch["next", "step_count"][batch["next", "done"]].float()
        print(f"version {acted[-1]} acted; its episodes had {lengths.mean():.0f} steps on average")

    trainer.register_op("pre_steps_log", watch)
    print(sync.plan)
    trainer.train()
    return acted


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
