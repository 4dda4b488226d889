"""Workers that act in half precision: cast once at publish, exact on the wire."""

from __future__ import annotations

from functools import partial

import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors import MultiSyncCollector
from torchrl.modules import OneHotCategorical, ProbabilisticActor

from rlsync import BoardScheme, Source, SyncWeights
from tests.tools.parts import (
    ACTIONS,
    make_counting_env,
    make_mlp,
    make_policy,
    make_ppo_trainer,
    make_workers,
)

ACTOR = "loss_module.actor_network"


class Cast(nn.Module):
    """Hands its input to ``net`` in the dtype of its weights, and the output back in float32."""

    def __init__(self, net: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.net = net.to(dtype)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.net(observation.to(self.net[0].weight.dtype)).float()


def make_half_policy(dtype: torch.dtype = torch.bfloat16) -> ProbabilisticActor:
    """The policy of tests.tools.parts, its MLP in half precision behind a cast."""
    return ProbabilisticActor(
        TensorDictModule(Cast(make_mlp(ACTIONS), dtype), in_keys=["observation"], out_keys=["logits"]),
        in_keys=["logits"],
        distribution_class=OneHotCategorical,
        return_log_prob=True,
    )


def make_trainer(source: str | Source):
    collector = make_workers(
        MultiSyncCollector,
        policy_factory=partial(make_half_policy, torch.bfloat16),
        schemes={"policy": BoardScheme()},
        env=make_counting_env,
    )
    destination = "policy.module[0].module.net"
    actor = make_policy()
    trainer = make_ppo_trainer(collector, actor, weight_update_map={"policy": ACTOR})
    return trainer, {destination: source}


def test_a_declared_cast_halves_the_bytes_and_acts_with_the_rounded_weights(fork_workers):
    declared = Source(f"{ACTOR}.module[0].module", dtype=torch.bfloat16)
    trainer, sync_map = make_trainer(declared)
    sync = SyncWeights(sync_map, trainer=trainer)
    assert {str(row.verdict) for row in sync.plan.rows} == {"cast"}
    learner = trainer.loss_module.actor_network.module[0].module
    full_bytes = sum(p.nbytes for p in learner.parameters())
    assert sync.plan.payload_bytes * 2 == full_bytes
    receipt = sync.publish()
    assert receipt.copied_bytes * 2 == full_bytes
    assert receipt.cast_leaves == receipt.copied_leaves == 4
    batch = next(iter(trainer.collector))
    rounded = Cast(make_mlp(ACTIONS), torch.bfloat16)
    for mine, theirs in zip(rounded.net.parameters(), learner.parameters(), strict=True):
        mine.data = theirs.detach().to(torch.bfloat16)
    assert torch.equal(rounded(batch["observation"]), batch["logits"])
    assert (batch["policy_version"] == sync.version).all()
    trainer.collector.shutdown()
