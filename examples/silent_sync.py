"""TorchRL loses the weights, and no error shows it: the same training twice; only the hook differs.

    python examples/silent_sync.py [batches] [figure.png]

The collector acts with a copy of the policy. TorchRL's UpdateWeights takes the map, finds no scheme on this
collector, and discards the weights without an error. The acting policy never changes, while its frames are
stamped with newer and newer versions. rlsync's SyncWeights takes the same map, and the weights arrive.
"""

from __future__ import annotations

import copy
import logging
import sys
import warnings
from dataclasses import dataclass, field

import gymnasium
import torch
from gymnasium.vector import AutoresetMode
from matplotlib.figure import Figure
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, SamplerWithoutReplacement, TensorDictReplayBuffer
from torchrl.envs import GymWrapper, RewardSum, TransformedEnv
from torchrl.modules import OneHotCategorical, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE
from torchrl.trainers import ReplayBufferTrainer, Trainer, UpdateWeights

from rlsync import RlsyncWarning, SyncWeights

FRAMES = 2048
MINIBATCH = 256
EPOCHS = 6
STOCK, OURS = "TorchRL's UpdateWeights", "rlsync's SyncWeights"
SYNC_MAP = {"policy": "loss_module.actor_network"}


@dataclass
class Record:
    """The record of one training, with one entry for each batch.

    `acting` holds a fingerprint of the weights that made the batch, read from the collector. `learner` holds
    a fingerprint of the learner's weights at that moment.
    """

    name: str
    frames: list[int] = field(default_factory=list)
    returns: list[float] = field(default_factory=list)
    acting: list[float] = field(default_factory=list)
    learner: list[float] = field(default_factory=list)
    stamped: list[int] = field(default_factory=list)

    def lag(self) -> list[int]:
        """For each batch, how many batches ago the learner had the weights that made it."""
        return [i - self.learner.index(acting) for i, acting in enumerate(self.acting)]

    def __str__(self) -> str:
        changes = len(set(self.acting)) - 1
        return (
            f"{self.name}: return {self.returns[0]:.0f} to {self.returns[-1]:.0f}, acting weights changed "
            f"{changes} times in {len(self.acting)} batches, policy lag {self.lag()[-1]}, "
            f"frames claim version {self.stamped[-1]}"
        )


def make_trainer(batches: int) -> Trainer:
    """PPO on CartPole. The collector acts with a copy of the policy, and no hook publishes yet."""

    def mlp(outputs: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs)
        )

    actor = ProbabilisticActor(
        TensorDictModule(mlp(2), in_keys=["observation"], out_keys=["logits"]),
        in_keys=["logits"],
        distribution_class=OneHotCategorical,
        return_log_prob=True,
    )
    games = gymnasium.make_vec(
        "CartPole-v1",
        num_envs=8,
        vectorization_mode="sync",
        vector_kwargs={"autoreset_mode": AutoresetMode.SAME_STEP},
    )
    games.reset(seed=0)  # the trainer sets its seed only after their first observation
    collector = Collector(
        TransformedEnv(GymWrapper(games), RewardSum(["reward"], ["reward_sum"])),
        copy.deepcopy(actor),
        frames_per_batch=FRAMES,
        total_frames=-1,
        track_policy_version=True,
    )
    loss = ClipPPOLoss(actor, ValueOperator(mlp(1), in_keys=["observation"]), entropy_coeff=0.0)
    trainer = Trainer(
        collector=collector,
        total_frames=FRAMES * batches,
        frame_skip=1,
        optim_steps_per_batch=EPOCHS * FRAMES // MINIBATCH,
        loss_module=loss,
        optimizer=torch.optim.Adam(loss.parameters(), lr=2e-3),
        clip_norm=0.5,
        seed=0,
        progress_bar=False,
    )
    trainer.register_op(
        "batch_process", GAE(gamma=0.99, lmbda=0.95, value_network=loss.critic_network)
    )
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(FRAMES), sampler=SamplerWithoutReplacement(), batch_size=MINIBATCH
    )
    ReplayBufferTrainer(buffer, batch_size=MINIBATCH, flatten_tensordicts=True).register(trainer)
    return trainer


def fingerprint(module: nn.Module) -> float:
    """A number that differs between any two steps of training."""
    return sum(
        float((p.double() * torch.arange(1, p.numel() + 1).view_as(p)).sum())
        for p in module.parameters()
    )


def train(name: str, batches: int) -> Record:
    """Train with one of the two hooks."""
    torch.manual_seed(0)
    trainer, record = make_trainer(batches), Record(name)
    if name == OURS:
        SyncWeights(SYNC_MAP).register(trainer)
    else:
        UpdateWeights(trainer.collector, 1, weight_update_map=SYNC_MAP, trainer=trainer).register(
            trainer
        )

    def watch(batch: TensorDictBase) -> None:
        ended = batch["next", "reward_sum"][batch["next", "done"]]
        record.frames.append(trainer.collected_frames)
        record.returns.append(float(ended.mean()))
        record.acting.append(fingerprint(trainer.collector.policy))
        record.learner.append(fingerprint(trainer.loss_module.actor_network))
        record.stamped.append(int(batch["next", "policy_version"].max()))

    trainer.register_op("batch_process", watch)
    trainer.train()
    return record


def draw(records: list[Record], figure: str) -> None:
    """Draw the return in the upper panel and the policy lag in the lower one."""
    drawing = Figure(figsize=(7, 6), layout="constrained")
    above, below = drawing.subplots(2, 1, sharex=True)
    for record, colour in zip(records, ("tab:red", "tab:blue"), strict=True):
        above.plot(record.frames, record.returns, color=colour, marker=".", label=record.name)
        below.plot(record.frames, record.lag(), color=colour, marker=".")
    lost = records[0]
    below.annotate(
        f"no weights arrived, but the frames claim\nto be made by version {lost.stamped[-1]}, the newest",
        (lost.frames[-1], lost.lag()[-1]),
        xytext=(0.04, 0.96),
        textcoords="axes fraction",
        verticalalignment="top",
        color="tab:red",
    )
    above.set_title("CartPole-v1, PPO, same seed: only the hook differs")
    above.set_ylabel("return (mean of a batch's episodes)")
    above.set_ylim(bottom=0)
    above.legend()
    below.set_ylabel("policy lag (versions behind the learner)")
    below.set_xlabel("frames")
    below.xaxis.set_major_formatter("{x:,.0f}")
    below.yaxis.get_major_locator().set_params(integer=True)
    drawing.savefig(figure, dpi=150)


def main(batches: int = 14, figure: str = "silent_sync.png") -> list[Record]:
    """Train twice, print the results, and draw them."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    warnings.filterwarnings("default", category=RlsyncWarning)
    logging.getLogger("torchrl").setLevel(logging.WARNING)
    records = [train(name, batches) for name in (STOCK, OURS)]
    for record in records:
        print(record)
    draw(records, figure)
    print(f"figure in {figure}")
    return records


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]), *sys.argv[2:3])
