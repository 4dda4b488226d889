"""A whole program with rlsync: TorchRL's PPOTrainer learns CartPole-v1 to a return of 475.

    python examples/ppo_to_475.py [--seed 0] [--frames 150000] [--log-dir FOLDER]

Two worker processes act with eight environments each, and get their weights through a board. For each
batch, the script prints the version that acted and the mean return of the newest 20 episodes. Training ends
when that return is 475, or after ``--frames`` frames. Then the learner plays 20 episodes greedily. The exit
status is 0 if their mean return is at least 475, else 1. With ``--log-dir``, the hooks' measurements go into
CSV files.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import warnings
from collections import deque
from functools import partial
from pathlib import Path

import gymnasium
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors import MultiSyncCollector
from torchrl.data import LazyTensorStorage, SamplerWithoutReplacement, TensorDictReplayBuffer
from torchrl.envs import Compose, GymWrapper, RewardSum, StepCounter, TransformedEnv
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import OneHotCategorical, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.record.loggers import CSVLogger
from torchrl.trainers.algorithms import PPOTrainer

from rlsync import (
    BoardScheme,
    BoundStaleness,
    Every,
    Forkserver,
    LogReceipts,
    RlsyncWarning,
    Stop,
    SyncWeights,
    VerifySync,
    WatchWorkers,
)

ENV = "CartPole-v1"
LONGEST_EPISODE = 500
TARGET_RETURN = 475.0
EPISODES = 20
SYNC_MAP = {"policy": "loss_module.actor_network"}
WORKERS, ENVS_PER_WORKER = 2, 8
FRAMES_PER_BATCH, MINIBATCH, EPOCHS = 2048, 128, 4
EVALUATION_SEED = 100_000


# ------------------------------------------------------------------ environments, networks, loss: TorchRL's


def make_env(num_envs: int) -> TransformedEnv:
    """Environments that are stepped as one batch; TorchRL resets each of them when its episode ends."""
    one = partial(gymnasium.make, ENV)
    batch = SyncVectorEnv([one] * num_envs, autoreset_mode=AutoresetMode.DISABLED)
    returns = RewardSum(in_keys=["reward"], out_keys=["episode_return"])
    return TransformedEnv(GymWrapper(batch), Compose(returns, StepCounter()))


def make_net(outputs: int, last_gain: float) -> nn.Sequential:
    """Two hidden layers with orthogonal weights. A small ``last_gain`` makes the first outputs small."""
    net = nn.Sequential(
        nn.Linear(4, 64),
        nn.Tanh(),
        nn.Linear(64, 64),
        nn.Tanh(),
        nn.Linear(64, outputs),
    )
    for layer, gain in ((net[0], 2**0.5), (net[2], 2**0.5), (net[4], last_gain)):
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)
    return net


def make_loss() -> ClipPPOLoss:
    actor = ProbabilisticActor(
        TensorDictModule(make_net(2, last_gain=0.01), in_keys=["observation"], out_keys=["logits"]),
        in_keys=["logits"],
        distribution_class=OneHotCategorical,
        return_log_prob=True,
    )
    critic = ValueOperator(make_net(1, last_gain=1.0), in_keys=["observation"])
    return ClipPPOLoss(actor, critic, clip_epsilon=0.2, entropy_bonus=False, critic_coeff=0.5)


def make_collector(loss: ClipPPOLoss) -> MultiSyncCollector:
    """The workers, which get their weights from a board instead of TorchRL's own scheme."""
    with Forkserver(preload=["gymnasium"]):  # workers start in milliseconds
        return MultiSyncCollector(
            [partial(make_env, ENVS_PER_WORKER)] * WORKERS,
            loss.actor_network,
            frames_per_batch=FRAMES_PER_BATCH,
            total_frames=-1,  # the trainer counts
            weight_sync_schemes={"policy": BoardScheme()},
        )


def make_trainer(loss: ClipPPOLoss, frames: int, seed: int, log_dir: Path | None) -> PPOTrainer:
    optimizer = torch.optim.Adam(loss.parameters(), lr=2e-3, eps=1e-5)
    batches = max(1, frames // FRAMES_PER_BATCH)
    lower = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda batch: max(1 - batch / batches, 0.05)
    )
    logger = None if log_dir is None else CSVLogger(exp_name=f"seed_{seed}", log_dir=str(log_dir))
    return PPOTrainer(
        collector=make_collector(loss),
        total_frames=frames,
        frame_skip=1,
        loss_module=loss,
        optimizer=optimizer,
        lr_scheduler=lower,
        clip_grad_norm=True,
        clip_norm=0.5,
        replay_buffer=TensorDictReplayBuffer(
            storage=LazyTensorStorage(FRAMES_PER_BATCH),
            sampler=SamplerWithoutReplacement(),
            batch_size=MINIBATCH,
        ),
        optim_steps_per_batch=None,  # the whole batch; a number would skip every other epoch
        num_epochs=EPOCHS,
        gamma=0.99,
        lmbda=0.95,
        weight_update_map=SYNC_MAP,  # required by TorchRL if the collector has schemes
        seed=seed,
        logger=logger,
        log_interval=FRAMES_PER_BATCH - 1,  # a point for each batch
        enable_logging=logger is not None,
        progress_bar=False,
    )


# ------------------------------------------------------------------------------------------- rlsync's part


def add_rlsync(trainer: PPOTrainer) -> tuple[SyncWeights, VerifySync]:
    """Publish after each batch, and hold the workers and the frames to what was published."""
    # the map is checked here
    sync = SyncWeights(SYNC_MAP, when=Every(1, "batches"), trainer=trainer)
    # in place of the UpdateWeights that PPOTrainer installed
    trainer.register_op("post_steps", sync)

    # Ask the workers for digests of the weights that they act with, and compare what their policies compute.
    verify = VerifySync(sync, when=Every(5, "batches"))
    verify.register(trainer)
    # PPO learns only from frames of the newest version: an older one would end the run.
    BoundStaleness(sync, max_versions=0, action="raise").register(trainer)
    # What each publish cost goes to the trainer's logger.
    LogReceipts(sync).register(trainer)
    # A worker that hangs for a minute ends the run, and is named.
    WatchWorkers(silent_timeout_s=60.0).register(trainer)
    return sync, verify


class Progress:
    """Prints a line for each batch, and asks the trainer to stop at the target return."""

    def __init__(self, trainer: PPOTrainer) -> None:
        self._trainer = trainer
        self._newest: deque[float] = deque(maxlen=EPISODES)
        self.acted: list[list[int]] = []  #: for each batch, the versions that acted

    def __call__(self, batch: TensorDictBase) -> None:
        self.acted.append(batch["policy_version"].unique().tolist())
        # [steps, environments]: in the order in which episodes ended
        steps = batch["next"].transpose(0, 1)
        self._newest.extend(steps["episode_return"][steps["done"]].tolist())
        mean = sum(self._newest) / max(1, len(self._newest))
        versions = " ".join(map(str, self.acted[-1]))
        frames = self._trainer.collected_frames
        print(f"{frames:>7} frames  version {versions:>3} acted  return {mean:5.1f}", flush=True)
        if len(self._newest) == EPISODES and mean >= TARGET_RETURN:
            self._trainer.request_stop(f"a return of {mean:.0f}")


# ---------------------------------------------------------------------------------------------- the program


@torch.no_grad()
def greedy_return(loss: ClipPPOLoss, seed: int) -> float:
    """The mean return of the likeliest actions: of the first episode of each of 20 environments."""
    torch.set_num_threads(1)  # TorchRL's collector gave torch more of them when it was shut down
    env = make_env(EPISODES)
    env.set_seed(EVALUATION_SEED + seed)
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        frames = env.rollout(LONGEST_EPISODE, loss.actor_network, break_when_any_done=False)
    env.close()
    ended = frames["next", "done"].squeeze(-1)  # [20, 500]
    first_end = ended.int().argmax(1)
    returns = frames["next", "episode_return"].squeeze(-1)
    return float(returns[range(EPISODES), first_end].mean())


def main(
    frames: int = 150_000, seed: int = 0, log_dir: Path | None = None
) -> tuple[list[list[int]], float]:
    """Train, and return for each batch the versions that acted, and the greedy return at the end."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    warnings.filterwarnings("ignore")
    warnings.filterwarnings("default", category=RlsyncWarning)
    loss = make_loss()
    trainer = make_trainer(loss, frames, seed, log_dir)
    with Stop(trainer):  # however the block ends, the workers are gone then
        sync, verify = add_rlsync(trainer)
        progress = Progress(trainer)
        trainer.register_op("pre_steps_log", progress)
        print(sync.plan.summary())
        trainer.train()

    publish_us = statistics.median(receipt.duration_s for receipt in sync.receipts) * 1e6
    print(f"{len(sync.receipts)} publishes, of {publish_us:.0f} us in the median")
    print(f"{verify.checks} checks of what acts, {len(verify.deviations)} deviations")
    reached = greedy_return(loss, seed)
    print(f"version {sync.version}: greedy return {reached:.1f} over {EPISODES} episodes")
    return progress.acted, reached


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--frames", type=int, default=150_000, help="at most; the learning rate falls over them"
    )
    parser.add_argument(
        "--log-dir", type=Path, help="for the CSV files of the hooks; by default none is written"
    )
    options = parser.parse_args()
    try:
        _, greedy = main(**vars(options))
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(0 if greedy >= TARGET_RETURN else 1)
