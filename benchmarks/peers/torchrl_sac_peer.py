"""TorchRL's SACTrainer with asynchronous collection on one environment. It reports its frames and updates.

    python benchmarks/peers/torchrl_sac_peer.py --env Pendulum-v1 --seconds 60

One worker writes into a shared replay buffer while the trainer draws from it. Nothing holds a ratio: the
worker collects as fast as it can, and the learner learns as fast as it can. Network, loss and optimizer are
those of rlsync's recipe.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
from rlsync_peer import NEVER, Report
from torch import optim
from torchrl.collectors import MultiAsyncCollector
from torchrl.data import LazyMemmapStorage, TensorDictReplayBuffer
from torchrl.envs import GymEnv
from torchrl.objectives import SoftUpdate
from torchrl.trainers.algorithms import SACTrainer
from torchrl.weight_update import SharedMemWeightSyncScheme

from rlsync.runs.recipes import sac
from rlsync.runs.recipes.sac import SACConfig
from rlsync.runs.recipes.settings import EnvConfig
from rlsync.runs.recipes.spaces import BOX


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--env", default="Pendulum-v1")
    parser.add_argument("--prefill", type=int, default=1_000)
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    env, settings = EnvConfig(options.env), SACConfig()
    loss = sac.make_loss(settings, BOX.probe(env))
    buffer = TensorDictReplayBuffer(
        storage=LazyMemmapStorage(settings.buffer_frames),
        batch_size=settings.batch_size,
        shared=True,
    )
    collector = MultiAsyncCollector(
        [partial(GymEnv, env.id)],
        loss.actor_network,
        frames_per_batch=64,
        init_random_frames=options.prefill,
        total_frames=-1,
        replay_buffer=buffer,
        extend_buffer=True,
        num_sub_threads=1,
        weight_sync_schemes={"policy": SharedMemWeightSyncScheme()},
    )
    updates = 0

    def count() -> None:
        nonlocal updates
        updates += 1

    trainer = SACTrainer(
        collector=collector,
        total_frames=NEVER,
        frame_skip=1,
        optim_steps_per_batch=64,
        loss_module=loss,
        optimizer=optim.Adam(loss.parameters(), lr=settings.lr),
        replay_buffer=buffer,
        target_net_updater=SoftUpdate(loss, tau=settings.tau),
        progress_bar=False,
        enable_logging=False,
        async_collection=True,
    )
    trainer.register_op("post_optim", count)
    trainer.register_op(
        "post_steps", Report(trainer, options.seconds, lambda: {"updates": updates})
    )
    trainer.train()


if __name__ == "__main__":
    main()
