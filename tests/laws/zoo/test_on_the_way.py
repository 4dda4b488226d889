"""Weights that are sent and do not act: overwritten, lost on a copy, or changed without a version."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torchrl.collectors import BaseCollector, MultiSyncCollector
from torchrl.trainers import Trainer
from torchrl.weight_update import SharedMemWeightSyncScheme

from rlsync import BoardScheme, Every, SyncWeights, VerifySync
from tests.laws.zoo.parts import ACTOR, Row, doctor, explain, make_trainer, ours, sends, stays_behind, verify
from tests.tools.parts import make_collector, make_policy, make_ppo_loss, make_small_canary, make_workers
from tests.tools.running import running


def test_the_weights_of_the_start_are_loaded_again_before_each_rollout(row: Row) -> None:
    def build(*, reload: bool) -> Trainer:
        policy = make_policy()
        start = copy.deepcopy(policy.state_dict())
        collector = make_collector(policy)
        if reload:
            collector.pre_collect_hook = lambda: policy.load_state_dict(start)
        return make_trainer(collector)

    def verified(trainer: Trainer) -> Trainer:
        sync = SyncWeights(ACTOR)
        sync.register(trainer)
        VerifySync(sync, when=Every(1, "batches"), timeout_s=1e-6).register(trainer)
        return trainer

    trainer = build(reload=True)
    learner, acted = trainer.loss_module.actor_network, []
    sends(trainer, lambda: trainer.collector.policy.load_state_dict(learner.state_dict()))
    trainer.register_op("batch_process", lambda _: acted.append(first_bias(trainer.collector.policy)))
    trainer.train()
    assert all(torch.equal(acted[0], later) for later in acted[1:])

    row.is_named(verify(verified(build(reload=True))))
    assert verify(verified(build(reload=False))).lines == ()


def first_bias(policy: nn.Module) -> torch.Tensor:
    return policy.module[0].module[0].bias.detach().clone()


def test_weights_are_written_to_the_policy_that_the_collector_copied(row: Row) -> None:
    def build() -> Trainer:
        given = make_policy()
        trainer = make_trainer(make_collector(copy.deepcopy(given)))  # as a collector does for another device
        return sends(trainer, lambda: given.load_state_dict(trainer.loss_module.actor_network.state_dict()))

    assert stays_behind(build())
    row.is_named(doctor(build()))
    assert doctor(ours(build())).lines == ()


def shared(policy: nn.Module) -> BaseCollector:
    """One worker process, with a scheme of TorchRL."""
    schemes = {"policy": SharedMemWeightSyncScheme()}
    return make_workers(MultiSyncCollector, policy, schemes=schemes, workers=1)


def on_a_board(policy: nn.Module) -> BaseCollector:
    """One worker process, with a board."""
    return make_workers(MultiSyncCollector, policy, schemes={"policy": BoardScheme()}, workers=1)


@pytest.mark.usefixtures("fork_workers")
def test_workers_act_with_the_memory_that_the_optimizer_writes(row: Row) -> None:
    policy, loss = make_small_canary(), make_ppo_loss()
    with running(shared(policy)) as collector:
        batches = iter(collector)
        policy.fill(7)  # as an optimizer does; nothing is sent
        next(batches)
        batch = next(batches)
        assert batch["canary_min"].eq(7).all()

    with running(shared(loss.actor_network)) as collector:
        row.is_named(doctor(make_trainer(collector, loss)))
    with running(on_a_board(make_policy())) as collector:
        assert doctor(ours(make_trainer(collector))).lines == ()


@pytest.mark.usefixtures("fork_workers")
def test_a_frame_names_a_version_that_did_not_act(row: Row) -> None:
    with running(shared(make_small_canary())) as collector:
        batches = iter(collector)
        next(batches)
        collector.update_policy_weights_(make_small_canary().fill(5))  # version 1
        both = torch.cat([next(batches).flatten(), next(batches).flatten()])
        assert not torch.equal(both["canary_min"].eq(5), both["policy_version"].eq(1))

    with running(shared(make_policy())) as collector:
        row.is_named(explain(make_trainer(collector)))
    with running(on_a_board(make_policy())) as collector:
        assert explain(make_trainer(collector)).lines == ()
