"""Two workers fill a replay buffer while the learner samples from it, with TorchRL's SACTrainer.

    python examples/async_replay.py [batches]

Every frame in the buffer carries the version that acted. So the learner knows how old each frame is, and
drops frames that are older than a bound.
"""

from __future__ import annotations

import sys
import warnings

import torch
from tensordict import TensorDictBase
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torchrl.collectors import MultiAsyncCollector
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs import GymEnv
from torchrl.modules import MLP, ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import SACLoss, SoftUpdate
from torchrl.trainers.algorithms import SACTrainer

from rlsync import BoardScheme, BoundStaleness, Every, RlsyncWarning, SyncWeights, WatchWorkers

FRAMES = 200


def make_env() -> GymEnv:
    return GymEnv("Pendulum-v1")


def make_loss() -> SACLoss:
    spec = make_env().action_spec
    net = nn.Sequential(MLP(3, 2, num_cells=[64, 64]), NormalParamExtractor())
    actor = ProbabilisticActor(
        TensorDictModule(net, in_keys=["observation"], out_keys=["loc", "scale"]),
        in_keys=["loc", "scale"],
        spec=spec,
        distribution_class=TanhNormal,
        distribution_kwargs={"low": spec.space.low, "high": spec.space.high},
    )
    qvalue = ValueOperator(MLP(4, 1, num_cells=[64, 64]), in_keys=["observation", "action"])
    return SACLoss(actor, qvalue, action_spec=spec)


def make_trainer(batches: int) -> SACTrainer:
    loss = make_loss()
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(20_000), batch_size=128, shared=True)
    collector = MultiAsyncCollector(
        [make_env] * 2,
        loss.actor_network,
        frames_per_batch=FRAMES,
        total_frames=-1,
        replay_buffer=buffer,
        weight_sync_schemes={"policy": BoardScheme()},
    )
    return SACTrainer(
        collector=collector,
        total_frames=FRAMES * batches,
        frame_skip=1,
        optim_steps_per_batch=16,
        loss_module=loss,
        optimizer=torch.optim.Adam(loss.parameters(), lr=3e-4),
        replay_buffer=buffer,
        target_net_updater=SoftUpdate(loss, eps=0.995),
        async_collection=True,
        enable_logging=False,
        progress_bar=False,
    )


def main(batches: int = 20) -> list[int]:
    """Train, and return for each consumed batch the age of its oldest frame, in versions."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    warnings.filterwarnings("default", category=RlsyncWarning)
    trainer = make_trainer(batches)
    sync = SyncWeights({"policy": "loss_module.actor_network"}, when=Every(16, "optim_steps"))
    sync.register(trainer)
    bound = BoundStaleness(sync, max_versions=8, action="drop")
    bound.register(trainer)
    WatchWorkers().register(trainer)
    ages = []

    def watch(batch: TensorDictBase) -> TensorDictBase:
        ages.append(int(sync.staleness(batch).versions.max()))
        return batch

    trainer.register_op("process_optim_batch", watch)
    print(sync.plan)
    trainer.train()
    print(f"{len(ages)} batches consumed, {sync.version} versions published")
    print(f"oldest consumed frame: {max(ages)} versions; dropped frames: {bound.dropped_frames}")
    return ages


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
