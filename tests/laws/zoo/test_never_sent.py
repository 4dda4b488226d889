"""Weights that nobody sends: the learner learns, and the workers act as in the beginning."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torchrl.collectors import MultiSyncCollector
from torchrl.trainers import Trainer, UpdateWeights

from rlsync import BoardScheme
from tests.laws.zoo.parts import ACTOR, Row, doctor, make_trainer, ours, register, sends, stays_behind
from tests.tools.parts import make_collector, make_policy, make_ppo_loss, make_workers
from tests.tools.running import running


def test_a_trainer_whose_weights_are_sent_does_not_stay_behind() -> None:
    assert not stays_behind(ours(make_trainer(make_collector(make_policy()))))


def test_a_map_is_dropped_by_a_collector_without_schemes(row: Row) -> None:
    def build() -> Trainer:
        trainer = make_trainer(make_collector(make_policy()))
        UpdateWeights(trainer.collector, 1, weight_update_map=ACTOR, trainer=trainer).register(trainer)
        return trainer

    assert stays_behind(build())
    row.is_named(doctor(build()))
    assert doctor(ours(make_trainer(make_collector(make_policy())))).lines == ()


def test_a_misspelt_destination_is_accepted(row: Row) -> None:
    typo = {"polcy": "loss_module.actor_network"}
    trainer = make_trainer(make_collector(make_policy()))
    UpdateWeights(trainer.collector, 1, weight_update_map=typo, trainer=trainer).register(trainer)

    assert stays_behind(trainer)
    row.is_named(register(make_trainer(make_collector(make_policy())), typo))
    assert register(make_trainer(make_collector(make_policy()))).lines == ()


def test_loaded_weights_never_leave_the_learner(row: Row) -> None:
    checkpoint = make_ppo_loss().state_dict()

    def build() -> Trainer:
        trainer = make_trainer(make_collector(make_policy()))
        trainer.loss_module.load_state_dict(checkpoint)
        return trainer

    assert stays_behind(build())
    row.is_named(doctor(build()))
    assert doctor(ours(build())).lines == ()


class Outer:
    """The part of a collector of collectors that receives weights: a policy of this process."""

    def __init__(self, trainer: Trainer) -> None:
        self.policy, self.learner = make_policy(), trainer.loss_module.actor_network

    def receive(self) -> None:
        TensorDict.from_module(self.learner).data.to_module(self.policy)


@pytest.mark.usefixtures("fork_workers")
def test_weights_reach_the_main_process_and_not_its_workers(row: Row) -> None:
    with running(make_workers(MultiSyncCollector, policy_factory=make_policy, workers=1)) as collector:
        trainer = make_trainer(collector)
        row.is_named(doctor(sends(trainer, Outer(trainer).receive)))
    board = {"policy": BoardScheme()}
    with running(make_workers(MultiSyncCollector, make_policy(), schemes=board, workers=1)) as collector:
        assert doctor(ours(make_trainer(collector))).lines == ()


@pytest.fixture
def one_process_group() -> Iterator[None]:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process_group")
def test_a_sharded_learner_is_passed_over(row: Row) -> None:
    def build(*, shard: bool) -> Trainer:
        trainer = make_trainer(make_collector(make_policy()))
        learner = trainer.loss_module.actor_network
        trainer.sharded = nn.Sequential(make_policy())
        trainer.sharded.load_state_dict({f"0.{k}": v for k, v in learner.state_dict().items()})
        if shard:
            fully_shard(trainer.sharded, mesh=init_device_mesh("cpu", (1,)))
        return trainer

    trainer = build(shard=True)

    def send() -> None:
        """Look for the modules of FSDP 1 only, as the code of the thread did: FSDP 2 has none."""
        for part in trainer.sharded.modules():
            if isinstance(part, FullyShardedDataParallel):
                trainer.collector.policy.load_state_dict(part.state_dict())

    assert stays_behind(sends(trainer, send))
    row.is_named(register(build(shard=True), {"policy": "sharded[0]"}))
    assert register(build(shard=False), {"policy": "sharded[0]"}).lines == ()
