"""Weights that are sent and never change: what the optimizer changes is something else."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torchrl.objectives import LossModule
from torchrl.trainers import Trainer

from tests.laws.zoo.parts import (
    Row,
    actor_of,
    doctor,
    explain,
    held,
    make_trainer,
    ours,
    same,
    sends,
    warned,
)
from tests.tools.parts import ACTIONS, OBSERVATIONS, make_collector, make_mlp, make_policy, make_ppo_loss


def sends_whole(trainer: Trainer) -> Trainer:
    """Send all weights of the actor, as a user does by hand."""
    policy, learner = trainer.collector.policy, trainer.loss_module.actor_network
    return sends(trainer, lambda: policy.load_state_dict(learner.state_dict()))


def acts_as_in_the_beginning(trainer: Trainer) -> bool:
    """Train without an error. Whether the weights that act are those that the learner had first."""
    first = held(trainer.loss_module.actor_network)
    trainer.train()
    return same(trainer.collector.policy, first)


def with_critic(loss: LossModule, actor: nn.Module) -> list[Tensor]:
    """The parameters of an actor, and of the critic of a loss."""
    return [*actor.parameters(), *loss.critic_network_params.parameters()]


def test_the_optimizer_holds_another_actor(row: Row) -> None:
    def build(*, right: bool) -> Trainer:
        explorer, other = make_policy(), make_policy()
        loss = make_ppo_loss(explorer)
        return make_trainer(
            make_collector(make_policy()), loss, with_critic(loss, explorer if right else other)
        )

    assert acts_as_in_the_beginning(sends_whole(build(right=False)))
    assert not acts_as_in_the_beginning(sends_whole(build(right=True)))
    row.is_named(doctor(ours(build(right=False))))
    assert doctor(ours(build(right=True))).lines == ()


class Adapted(nn.Module):
    """Logits of a frozen layer with an adapter of low rank beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(OBSERVATIONS, ACTIONS).requires_grad_(False)
        self.down = nn.Linear(OBSERVATIONS, 1, bias=False)
        self.up = nn.Linear(1, ACTIONS, bias=False)

    def forward(self, observation: Tensor) -> Tensor:
        return self.base(observation) + self.up(self.down(observation))


def adapted() -> Trainer:
    trainer = make_trainer(make_collector(actor_of(Adapted())), make_ppo_loss(actor_of(Adapted())))
    for group in trainer.optimizer.param_groups:
        group["params"] = [weight for weight in group["params"] if weight.requires_grad]
    return trainer


def test_adapters_are_trained_and_only_the_frozen_layer_is_sent(row: Row) -> None:
    trainer = adapted()
    acting, learner = (
        actor.module[0].module for actor in (trainer.collector.policy, trainer.loss_module.actor_network)
    )
    acted, learned = held(acting.up), held(learner.up)
    sends(trainer, lambda: acting.base.load_state_dict(learner.base.state_dict())).train()

    assert same(acting.base, learner.base)
    assert same(acting.up, acted)
    assert not same(learner.up, learned)
    base = "module[0].module.base"
    row.is_named(explain(adapted(), {f"policy.{base}": f"loss_module.actor_network.{base}"}))
    assert not [line for line in explain(adapted()).lines if line.startswith("unsent ")]


def test_parameters_are_replaced_after_the_optimizer_is_made(row: Row) -> None:
    def build(*, assign: bool) -> Trainer:
        actor = make_policy()
        trained = list(actor.parameters())  # what an optimizer is given
        actor.load_state_dict(make_policy().state_dict(), assign=assign)
        for weight in actor.parameters():
            weight.requires_grad_()
        loss = make_ppo_loss(actor)
        trained += loss.critic_network_params.parameters()
        return make_trainer(make_collector(make_policy()), loss, trained)

    assert acts_as_in_the_beginning(sends_whole(build(assign=True)))
    assert not acts_as_in_the_beginning(sends_whole(build(assign=False)))
    row.is_named(doctor(ours(build(assign=True))))
    assert doctor(ours(build(assign=False))).lines == ()


def test_a_part_of_the_policy_is_in_no_optimizer(row: Row) -> None:
    def build(*, whole: bool) -> Trainer:
        actor = actor_of(nn.Sequential(make_mlp(8), nn.Linear(8, ACTIONS)))
        loss = make_ppo_loss(actor)
        first = set(actor.module[0].module[0].parameters())
        trained = [weight for weight in loss.parameters() if whole or weight not in first]
        return make_trainer(make_collector(copy.deepcopy(actor)), loss, trained)

    trainer = sends_whole(build(whole=False))
    acting = trainer.collector.policy.module[0].module
    first, second = held(acting[0]), held(acting[1])
    trainer.train()

    assert same(acting[0], first)
    assert not same(acting[1], second)
    row.is_named(explain(build(whole=False)))
    assert explain(build(whole=True)).lines == ()


def test_the_weights_that_are_sent_are_no_longer_those_that_are_trained(row: Row) -> None:
    """A checkpoint is loaded into the module while the loss trains the tensors that it had before."""
    checkpoint = {name: weight.clone() for name, weight in make_policy().state_dict().items()}

    def build(*, assign: bool, batches: int = 12) -> Trainer:
        trainer = make_trainer(make_collector(make_policy()), batches=batches)
        actor = trainer.loss_module.actor_network
        resume = iter([lambda: actor.load_state_dict(checkpoint, assign=assign)])
        trainer.register_op("pre_optim_steps", lambda: next(resume, int)())
        return trainer

    trainer = sends_whole(build(assign=True, batches=3))
    trainer.train()
    assert all(torch.equal(trainer.collector.policy.state_dict()[name], w) for name, w in checkpoint.items())

    row.is_named(warned(ours(build(assign=True))))
    assert warned(ours(build(assign=False))).lines == ()
