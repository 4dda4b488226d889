"""One version for two destinations: the policy, and the statistics that normalise its observations.

    python examples/multi_destination.py [batches]

The learner computes the mean and the standard deviation of all observations. The environments normalise with
them, and the policy is trained on the normalised observations. The script checks for each batch that the
observations after its steps were normalised with the statistics of the version that acted. (The first
observation of a rollout was normalised by the last step of the rollout before.)
"""

from __future__ import annotations

import sys
import warnings

import torch
from tensordict.nn import TensorDictModule
from torchrl.collectors import MultiSyncCollector
from torchrl.envs import Compose, GymEnv, ObservationNorm, TransformedEnv
from torchrl.modules import MLP, OneHotCategorical, ProbabilisticActor, ValueOperator
from torchrl.objectives import A2CLoss
from torchrl.objectives.value import GAE
from torchrl.trainers import Trainer

from rlsync import RlsyncWarning, SyncWeights, WeightBoard

SYNC_MAP = {"policy": "loss_module.actor_network", "env.transform[0]": "norm"}


def make_norm() -> ObservationNorm:
    return ObservationNorm(
        torch.zeros(4), torch.ones(4), ["observation"], ["normalised"], standard_normal=True
    )


def make_env() -> TransformedEnv:
    return TransformedEnv(GymEnv("CartPole-v1"), Compose(make_norm()))


def make_loss() -> A2CLoss:
    actor = ProbabilisticActor(
        TensorDictModule(MLP(4, 2, num_cells=[32]), in_keys=["normalised"], out_keys=["logits"]),
        in_keys=["logits"],
        distribution_class=OneHotCategorical,
        return_log_prob=True,
    )
    return A2CLoss(actor, ValueOperator(MLP(4, 1, num_cells=[32]), in_keys=["normalised"]))


def make_trainer(batches: int) -> Trainer:
    loss, board = make_loss(), WeightBoard()
    collector = MultiSyncCollector(
        [make_env] * 2,
        loss.actor_network,
        frames_per_batch=400,
        total_frames=-1,
        weight_sync_schemes={destination: board.scheme() for destination in SYNC_MAP},
    )
    trainer = Trainer(
        collector=collector,
        total_frames=400 * batches,
        frame_skip=1,
        optim_steps_per_batch=1,
        loss_module=loss,
        optimizer=torch.optim.Adam(loss.parameters(), lr=3e-3),
        progress_bar=False,
    )
    trainer.norm = make_norm()  # the source of "env.transform[0]"
    trainer.register_op(
        "batch_process", GAE(gamma=0.99, lmbda=0.95, value_network=loss.critic_network)
    )
    return trainer


def main(batches: int = 10) -> list[tuple[int, float]]:
    """Train, and return for each batch the version that acted and the error of its normalisation."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    warnings.filterwarnings("default", category=RlsyncWarning)
    trainer = make_trainer(batches)
    sync = SyncWeights(SYNC_MAP)
    sync.register(trainer)
    seen, statistics, acted = torch.empty(0, 4), {}, []

    def watch(batch):
        nonlocal seen
        statistics[sync.version] = trainer.norm.loc.clone(), trainer.norm.scale.clone()
        (version,) = batch["policy_version"].unique().tolist()
        mean, deviation = statistics[version]
        off = batch["next", "normalised"] - (batch["next", "observation"] - mean) / deviation
        acted.append((version, float(off.abs().max())))
        print(
            f"version {version} acted, normalised with mean {mean.tolist()}, error {acted[-1][1]}"
        )
        seen = torch.cat([seen, batch["observation"].flatten(0, 1)])
        trainer.norm.load_state_dict({"loc": seen.mean(0), "scale": seen.std(0)}, strict=False)

    trainer.register_op("pre_steps_log", watch)
    print(sync.plan)
    trainer.train()
    return acted


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
