"""Weights whose names, shapes or dtypes do not fit: what does not match is left out, without an error."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torchrl.trainers import Trainer, UpdateWeights
from torchrl.weight_update.weight_sync_schemes import WeightStrategy

from rlsync import Source
from tests.laws.zoo.parts import (
    ACTOR,
    Row,
    actor_of,
    doctor,
    first_publish,
    held,
    make_trainer,
    ours,
    register,
    same,
    sends,
    stays_behind,
)
from tests.tools.parts import ACTIONS, OBSERVATIONS, make_collector, make_mlp, make_policy, make_ppo_loss


class Encoded(nn.Module):
    """Logits of an encoder and a head; the encoder's name is chosen."""

    def __init__(self, encoder: str) -> None:
        super().__init__()
        self.encoder = encoder
        self.parts = nn.ModuleDict({encoder: nn.Linear(OBSERVATIONS, 8), "head": nn.Linear(8, ACTIONS)})

    def forward(self, observation: Tensor) -> Tensor:
        return self.parts["head"](self.parts[self.encoder](observation))


def loads(trainer: Trainer, weights: Callable[[], dict[str, Tensor]]) -> Trainer:
    """Send as many users do: what does not match is left out."""
    policy = trainer.collector.policy
    return sends(trainer, lambda: policy.load_state_dict(weights(), strict=False))


def test_the_encoder_has_another_name_on_the_worker(row: Row) -> None:
    def build(workers: str) -> Trainer:
        learner = make_ppo_loss(actor_of(Encoded("actor_encoder")))
        return make_trainer(make_collector(actor_of(Encoded(workers))), learner)

    trainer = build("encoder")
    acting = trainer.collector.policy.module[0].module.parts["encoder"]
    before = held(acting)
    loads(trainer, trainer.loss_module.actor_network.state_dict).train()

    assert same(acting, before)
    row.is_named(register(build("encoder")))
    assert register(build("actor_encoder")).lines == ()


def test_the_prefix_of_a_wrapper_makes_every_name_unknown(row: Row) -> None:
    def build() -> Trainer:
        trainer = make_trainer(make_collector(make_policy()))
        trainer.wrapped = nn.DataParallel(trainer.loss_module.actor_network)
        return loads(trainer, trainer.wrapped.state_dict)

    assert stays_behind(build())
    row.is_named(doctor(build()))
    assert doctor(ours(build(), {"policy": "wrapped"})).lines == ()


class TwoHeads(nn.Module):
    """Logits, and a value that the worker records with them."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = make_mlp(8)
        self.logits, self.value = nn.Linear(8, ACTIONS), nn.Linear(8, 1)

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.trunk(observation)
        return self.logits(hidden) + 0 * self.value(hidden)


def test_one_head_is_not_among_what_is_sent(row: Row) -> None:
    def build() -> Trainer:
        trainer = make_trainer(make_collector(actor_of(TwoHeads())), make_ppo_loss(actor_of(TwoHeads())))
        learner = trainer.loss_module.actor_network
        return loads(trainer, lambda: {k: v for k, v in learner.state_dict().items() if ".value." not in k})

    trainer = build()
    acting, learner = (
        p.module[0].module for p in (trainer.collector.policy, trainer.loss_module.actor_network)
    )
    trainer.train()

    assert same(acting.trunk, learner.trunk)
    assert not same(acting.value, learner.value)
    row.is_named(doctor(build()))
    idle = Source("loss_module.actor_network", idle=("*.value.*",))
    assert doctor(ours(build(), {"policy": idle})).lines == ()


class Normed(nn.Module):
    """Logits of observations from which a running mean is taken."""

    def __init__(self, *, persistent: bool = True) -> None:
        super().__init__()
        self.net = make_mlp(ACTIONS)
        self.register_buffer("mean", torch.zeros(OBSERVATIONS), persistent=persistent)

    def forward(self, observation: Tensor) -> Tensor:
        return self.net(observation - self.mean)


def tree(named: dict[str, Tensor]) -> TensorDict:
    return TensorDict({tuple(name.split(".")): tensor.data for name, tensor in named.items()})


def normed(persistent: bool, weights: Callable[[nn.Module], TensorDict]) -> Trainer:
    """A learner with statistics, whose getter is a user's."""
    workers, actor = actor_of(Normed(persistent=persistent)), actor_of(Normed(persistent=persistent))
    actor.module[0].module.mean.fill_(3.0)
    trainer = make_trainer(make_collector(workers), make_ppo_loss(actor))
    getter = UpdateWeights(trainer.collector, policy_weights_getter=lambda: weights(actor))
    trainer.register_op("post_steps", getter)
    return trainer


def keeps_its_statistics(trainer: Trainer) -> bool:
    """Whether all but the statistics of the learner arrive."""
    trainer.train()
    acting = trainer.collector.policy.module[0].module
    learner = trainer.loss_module.actor_network.module[0].module
    return same(acting.net, learner.net) and acting.mean.eq(0).all() and learner.mean.eq(3).all()


def test_the_statistics_of_a_normalisation_are_not_parameters(row: Row) -> None:
    def weights(actor: nn.Module) -> TensorDict:
        return tree(dict(actor.named_parameters()))

    assert keeps_its_statistics(normed(True, weights))
    trainer = normed(True, weights)
    row.is_named(first_publish(trainer, lambda: weights(trainer.loss_module.actor_network)))
    assert first_publish(trainer, trainer.loss_module.actor_network.state_dict).lines == ()


def test_a_buffer_that_is_not_persistent_is_not_in_a_state_dict(row: Row) -> None:
    def weights(actor: nn.Module) -> TensorDict:
        return tree(actor.state_dict())

    assert keeps_its_statistics(normed(False, weights))
    trainer = normed(False, weights)
    actor = trainer.loss_module.actor_network
    row.is_named(first_publish(trainer, lambda: weights(actor)))
    assert first_publish(trainer, lambda: tree(held(actor))).lines == ()


class Tied(nn.Module):
    """Logits of an embedding that is also the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(OBSERVATIONS, OBSERVATIONS, bias=False)
        self.head = nn.Linear(OBSERVATIONS, OBSERVATIONS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, observation: Tensor) -> Tensor:
        return self.head(self.embed(observation))[..., :ACTIONS]


def untie(actor: nn.Module) -> nn.Module:
    """Load a checkpoint into an actor as ``assign=True`` does: each name gets a tensor of its own."""
    actor.load_state_dict({k: v.clone() for k, v in actor.state_dict().items()}, assign=True)
    return actor


def test_a_tie_is_broken_on_one_side(row: Row) -> None:
    def build(actor: nn.Module) -> Trainer:
        return make_trainer(make_collector(actor_of(Tied())), make_ppo_loss(actor))

    trainer = build(untie(actor_of(Tied())))
    acting, learner = trainer.collector.policy, trainer.loss_module.actor_network
    loads(trainer, learner.state_dict).train()

    net, learned = acting.module[0].module, learner.module[0].module
    assert not torch.equal(learned.embed.weight, learned.head.weight)
    assert torch.equal(net.embed.weight, learned.head.weight), "the embedding of the learner is lost"
    row.is_named(register(build(untie(actor_of(Tied())))))
    assert register(build(actor_of(Tied()))).lines == ()


class Half(nn.Module):
    """Logits that are computed in half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_mlp(ACTIONS).bfloat16()

    def forward(self, observation: Tensor) -> Tensor:
        return self.net(observation.to(self.net[0].weight.dtype)).float()


def test_weights_are_rounded_to_half_precision_unasked(row: Row) -> None:
    def build() -> Trainer:
        return make_trainer(make_collector(actor_of(Half())), make_ppo_loss(actor_of(Half().float())))

    trainer = build()
    learner = trainer.loss_module.actor_network
    loads(trainer, learner.state_dict)
    small = torch.full_like(learner.module[0].module.net[0].bias, 1.0 + 2**-10)
    learner.module[0].module.net[0].bias.data.copy_(small)
    trainer.collector.policy.load_state_dict(learner.state_dict())

    assert trainer.collector.policy.module[0].module.net[0].bias.eq(1.0).all(), "the step is rounded away"
    row.is_named(register(build()))
    declared = Source(ACTOR["policy"], dtype=torch.bfloat16)
    assert register(build(), {"policy": declared}).lines == ()


def test_a_shape_that_can_be_broadcast_is_spread_over_a_layer(row: Row) -> None:
    learner = copy.deepcopy(make_policy())
    learner.module[0].module[2].bias = nn.Parameter(torch.full((1,), 7.0))
    acting = make_policy()
    WeightStrategy().apply_weights(acting, WeightStrategy().extract_weights(learner))

    assert acting.module[0].module[2].bias.eq(7.0).all()
    row.is_named(register(make_trainer(make_collector(make_policy()), make_ppo_loss(learner))))
    assert register(make_trainer(make_collector(make_policy()))).lines == ()
