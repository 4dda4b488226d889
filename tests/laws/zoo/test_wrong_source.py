"""Weights that arrive and are the wrong ones: a target network's, the worker's own, a stale module's."""

from __future__ import annotations

import copy

import pytest
import torch
from tensordict.nn import TensorDictSequential
from torch import nn
from torchrl.trainers import Trainer

from rlsync.core.errors import NothingLearns
from tests.laws.zoo.parts import (
    Row,
    doctor,
    explain,
    held,
    make_trainer,
    ours,
    register,
    same,
    sends,
    stays_behind,
)
from tests.tools.parts import (
    make_collector,
    make_continuous_env,
    make_continuous_policy,
    make_dqn_loss,
    make_policy,
    make_ppo_loss,
    make_q_policy,
    make_sac_loss,
)

TARGET = {"policy": "loss_module.target_value_network_params"}
ONLINE = {"policy": "loss_module.value_network"}


def test_workers_act_with_the_target_network(row: Row) -> None:
    def build() -> Trainer:
        return make_trainer(make_collector(make_q_policy()), make_dqn_loss())

    trainer = build()
    target = trainer.loss_module.target_value_network_params
    online = held(trainer.loss_module.value_network)
    sends(trainer, lambda: target.data.to_module(trainer.collector.policy))
    trainer.train()

    acting = dict(trainer.collector.policy.named_parameters())
    assert all(torch.equal(acting[name], weight) for name, weight in online.items()), "as in the beginning"
    assert not same(trainer.loss_module.value_network, online), "the online network learns"
    row.is_named(explain(build(), TARGET))
    assert explain(build(), ONLINE).lines == ()


def test_a_policy_is_given_its_own_weights(row: Row) -> None:
    def build() -> Trainer:
        return make_trainer(make_collector(make_policy()))

    trainer = build()
    policy = trainer.collector.policy
    assert stays_behind(sends(trainer, lambda: policy.load_state_dict(policy.state_dict())))
    with pytest.warns(NothingLearns, match="the collector's own"):
        trainer = ours(build(), {"policy": "collector.policy"})
    row.is_named(doctor(trainer))
    assert doctor(ours(build())).lines == ()


def test_the_critic_of_sac_is_read_where_it_is_not_trained(row: Row) -> None:
    """A policy that scores its actions with the critic: its second part is the loss's critic."""

    def build() -> Trainer:
        loss = make_sac_loss()
        scored = TensorDictSequential(make_continuous_policy(), copy.deepcopy(loss.qvalue_network))
        return make_trainer(make_collector(scored, env=make_continuous_env), loss)

    trainer = build()
    critic = trainer.loss_module.qvalue_network
    ensemble = trainer.loss_module.qvalue_network_params
    before = {name: weight.clone() for name, weight in ensemble.flatten_keys(".").items()}
    scorer = trainer.collector.policy.module[1]
    scored = held(scorer)
    sends(trainer, lambda: scorer.load_state_dict(critic.state_dict())).train()

    assert same(scorer, scored)
    assert not any(torch.equal(before[name], w) for name, w in ensemble.flatten_keys(".").items())
    row.is_named(register(build(), {"policy.module[1]": "loss_module.qvalue_network"}))
    assert register(build(), {"policy.module[0]": "loss_module.actor_network"}).lines == ()


def test_a_copied_loss_shows_an_actor_that_is_not_trained(row: Row) -> None:
    def build(loss: nn.Module) -> Trainer:
        return make_trainer(make_collector(make_policy()), loss)

    copied = copy.deepcopy(make_ppo_loss())
    shown = held(copied.actor_network)
    trainer = build(copied)
    sends(
        trainer, lambda: trainer.collector.policy.load_state_dict(copied.actor_network.state_dict())
    ).train()

    assert same(trainer.collector.policy, shown)
    row.is_named(register(build(copy.deepcopy(make_ppo_loss()))))
    assert register(build(make_ppo_loss())).lines == ()
