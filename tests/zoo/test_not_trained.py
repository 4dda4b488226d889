"""Weights that are sent and never change: what the optimizer changes is something else."""

from __future__ import annotations

from torch import Tensor, nn
from torchrl.objectives import LossModule
from torchrl.trainers import Trainer

from tests.parts import ACTIONS, OBSERVATIONS, make_collector, make_policy, make_ppo_loss
from tests.zoo.parts import (
    Row,
    actor_of,
    doctor,
    held,
    make_trainer,
    ours,
    same,
    sends,
)


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
    row.is_named(doctor(ours(adapted(), {f"policy.{base}": f"loss_module.actor_network.{base}"})))
    assert doctor(ours(adapted())).lines == ()


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
