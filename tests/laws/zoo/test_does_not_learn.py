"""Trainers that train on without an error while nothing learns, or while nobody publishes it."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torchrl.collectors import BaseCollector, MultiSyncCollector
from torchrl.trainers import OptimizationStepper, Trainer

import rlsync
from rlsync import BoardScheme, Every, SyncWeights
from tests.laws.zoo.parts import (
    ACTOR,
    Row,
    Said,
    actor_of,
    doctor,
    held,
    make_trainer,
    ours,
    register,
    same,
    sends,
    stays_behind,
    warned,
)
from tests.tools.parts import ACTIONS, make_collector, make_mlp, make_policy, make_ppo_loss, make_workers
from tests.tools.running import running


def learner_stands_still(trainer: Trainer, module: nn.Module) -> bool:
    """Train without an error. Whether a module of the learner holds what it held first."""
    first = held(module)
    trainer.train()
    return same(module, first)


def test_a_policy_is_frozen_before_the_optimizer_takes_it(row: Row) -> None:
    def build(*, frozen: bool) -> Trainer:
        loss = make_ppo_loss(make_policy().requires_grad_(not frozen))
        return make_trainer(make_collector(make_policy()), loss)

    trainer = build(frozen=True)
    assert learner_stands_still(trainer, trainer.loss_module.actor_network)
    row.is_named(register(build(frozen=True)))
    assert register(build(frozen=False)).lines == ()


def test_a_policy_is_frozen_and_the_optimizer_takes_what_is_not(row: Row) -> None:
    def build(*, frozen: bool) -> Trainer:
        loss = make_ppo_loss(make_policy().requires_grad_(not frozen))
        trained = [parameter for parameter in loss.parameters() if parameter.requires_grad]
        return make_trainer(make_collector(make_policy()), loss, trained)

    trainer = build(frozen=True)
    assert learner_stands_still(trainer, trainer.loss_module.actor_network)
    row.is_named(register(build(frozen=True)))
    assert register(build(frozen=False)).lines == ()


def test_a_learning_rate_is_0(row: Row) -> None:
    def build(lr: float) -> Trainer:
        trainer = make_trainer(make_collector(make_policy()))
        for group in trainer.optimizer.param_groups:
            group["lr"] = lr
        return trainer

    trainer = build(0.0)
    assert learner_stands_still(trainer, trainer.loss_module.actor_network)
    row.is_named(register(build(0.0)))
    assert register(build(0.1)).lines == ()


def test_an_average_is_sent_and_never_updated(row: Row) -> None:
    def build(*, updates: bool) -> Trainer:
        trainer = make_trainer(make_collector(make_policy()))
        learner = trainer.loss_module.actor_network
        trainer.ema = AveragedModel(learner, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        if updates:
            trainer.register_op("post_optim", lambda: trainer.ema.update_parameters(learner))
        return trainer

    trainer = build(updates=False)
    assert learner_stands_still(trainer, trainer.ema)
    row.is_named(doctor(ours(build(updates=False), {"policy": "ema.module"})))
    assert doctor(ours(build(updates=True), {"policy": "ema.module"})).lines == ()


class Backward(OptimizationStepper):
    """Computes gradients, and may forget the step."""

    def __init__(self, *, steps: bool) -> None:
        super().__init__()
        self.steps = steps

    def step(self, trainer: Trainer, sub_batch: TensorDict) -> TensorDict:
        losses = trainer.loss_module(sub_batch)
        sum(value for key, value in losses.items() if key.startswith("loss_")).backward()
        if self.steps:
            trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        return losses.detach()


@pytest.mark.seconds
def test_the_optimizer_never_steps(row: Row) -> None:
    def build(*, steps: bool, batches: int = 12) -> Trainer:
        trainer = make_trainer(make_collector(make_policy()), batches=batches)
        trainer.optimization_stepper = Backward(steps=steps)
        return trainer

    trainer = build(steps=False, batches=3)
    assert learner_stands_still(trainer, trainer.loss_module.actor_network)
    row.is_named(warned(ours(build(steps=False))))
    assert warned(ours(build(steps=True))).lines == ()


class Scaling(nn.Module):
    """Learns the scale of its logits, which somebody may have forgotten to make a parameter."""

    def __init__(self, *, parameter: bool) -> None:
        super().__init__()
        self.net, scale = make_mlp(ACTIONS), torch.ones(ACTIONS)
        self.scale = nn.Parameter(scale) if parameter else scale.requires_grad_()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * self.scale


def test_a_trained_tensor_is_no_parameter(row: Row) -> None:
    def build(*, parameter: bool) -> Trainer:
        actor = actor_of(Scaling(parameter=parameter))
        loss = make_ppo_loss(actor)
        trained = {id(t): t for t in (*loss.parameters(), actor.module[0].module.scale)}
        collector = make_collector(actor_of(Scaling(parameter=parameter)))
        return make_trainer(collector, loss, trained.values())

    trainer = build(parameter=False)
    acting, learner = trainer.collector.policy, trainer.loss_module.actor_network
    sends(trainer, lambda: acting.load_state_dict(learner.state_dict())).train()
    scales = [policy.module[0].module.scale for policy in (acting, learner)]
    assert same(acting, learner)
    assert not torch.equal(*scales)
    row.is_named(register(build(parameter=False)))
    assert register(build(parameter=True)).lines == ()


class Detached(nn.Module):
    """A head on features that may be detached by mistake."""

    def __init__(self, *, detaches: bool) -> None:
        super().__init__()
        self.trunk, self.head, self.detaches = make_mlp(8), nn.Linear(8, ACTIONS), detaches

    def forward(self, x: Tensor) -> Tensor:
        features = self.trunk(x)
        return self.head(features.detach() if self.detaches else features)


@pytest.mark.seconds
def test_the_features_are_detached(row: Row) -> None:
    def build(*, detaches: bool, batches: int = 12) -> Trainer:
        actor = actor_of(Detached(detaches=detaches))
        return make_trainer(make_collector(copy.deepcopy(actor)), make_ppo_loss(actor), batches=batches)

    trainer = build(detaches=True, batches=3)
    assert learner_stands_still(trainer, trainer.loss_module.actor_network.module[0].module.trunk)
    row.is_named(warned(ours(build(detaches=True))))
    assert warned(ours(build(detaches=False))).lines == ()


def test_the_interval_is_longer_than_the_run(row: Row) -> None:
    def build() -> Trainer:
        return make_trainer(make_collector(make_policy()))

    def every(batches: int) -> Said:
        try:
            SyncWeights(ACTOR, Every(batches)).register(build())
        except rlsync.RlsyncWarning as warning:
            return Said("register", (warning.what,))
        return Said("register", ())

    assert stays_behind(build())
    row.is_named(every(100))
    assert every(2).lines == ()


@pytest.mark.processes
@pytest.mark.seconds
def test_a_board_has_no_hook(row: Row) -> None:
    for registered in (False, True):
        board = {"policy": BoardScheme()}
        with running(make_workers(MultiSyncCollector, make_policy(), schemes=board, workers=1)) as collector:
            trainer = make_trainer(collector)
            said = warned(ours(trainer) if registered else trainer)
        assert said.lines == () if registered else row.is_named(said) is None


@pytest.mark.processes
@pytest.mark.seconds
def test_a_loop_of_the_users_own_never_publishes(row: Row) -> None:
    for publishes in (False, True):
        board, actor = {"policy": BoardScheme()}, make_policy()
        with running(make_workers(MultiSyncCollector, actor, schemes=board, workers=1)) as collector:
            said = said_in_a_loop(collector, actor, collector.update_policy_weights_ if publishes else tuple)
        assert said.lines == () if publishes else row.is_named(said) is None


def said_in_a_loop(collector: BaseCollector, actor: nn.Module, publish: Callable[[], object]) -> Said:
    """What rlsync warns of in a loop without a Trainer."""
    optimizer = torch.optim.SGD(actor.parameters(), lr=0.1)
    versions = set()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", rlsync.RlsyncWarning)
        for _, batch in zip(range(11), collector, strict=False):
            versions |= set(batch["policy_version"].flatten().tolist())
            actor.get_dist(batch.exclude("action")).log_prob(batch["action"]).mean().backward()
            optimizer.step()
            publish()
    assert (len(versions) > 1) is (publish is not tuple)
    own = [warning.message for warning in caught if issubclass(warning.category, rlsync.RlsyncWarning)]
    return Said("warning", tuple(str(message).splitlines()[0] for message in own))


def test_a_hook_is_made_and_not_registered(row: Row) -> None:
    def build(*, registered: bool) -> Trainer:
        trainer = make_trainer(make_collector(make_policy()))
        actor = trainer.loss_module.actor_network
        hook = rlsync.UpdateWeights(trainer.collector, policy_weights_getter=lambda: actor)
        if registered:
            hook.register(trainer)
        return trainer

    assert stays_behind(make_trainer(make_collector(make_policy())))
    row.is_named(warned(build(registered=False)))
    assert warned(build(registered=True)).lines == ()


def test_a_hook_publishes_to_another_collector(row: Row) -> None:
    def to(collector: str) -> Said:
        trainer, other = (make_trainer(make_collector(make_policy())) for _ in range(2))
        sync = SyncWeights(ACTOR, collector=(trainer if collector == "own" else other).collector)
        try:
            sync.register(trainer)
        except rlsync.RlsyncWarning as warning:
            return Said("register", (warning.what,))
        return Said("register", ())

    assert stays_behind(make_trainer(make_collector(make_policy())))
    row.is_named(to("another"))
    assert to("own").lines == ()
