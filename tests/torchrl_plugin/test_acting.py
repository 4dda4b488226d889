"""Weights that arrive and do not act are named when the hook is registered, before the first frame."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torchrl.collectors import Collector, MultiSyncCollector
from torchrl.modules import NoisyLinear

from rlsync import BoardScheme, DoesNotAct, DropoutDiffers, IdleLeaves, Source, SyncWeights
from tests.laws.zoo.parts import ACTOR, actor_of, make_trainer, ours
from tests.tools.parts import (
    OBSERVATIONS,
    make_collector,
    make_policy,
    make_ppo_loss,
    make_workers,
)
from tests.tools.parts.acting import Functional, Scaled, Spare, Twin
from tests.tools.running import in_three_lines, running


def workers(net: nn.Module, scheme: BoardScheme | None = None) -> MultiSyncCollector:
    schemes = {"policy": scheme or BoardScheme()}
    return make_workers(MultiSyncCollector, actor_of(net), schemes=schemes, workers=1)


def trained(net: nn.Module) -> nn.Module:
    return make_ppo_loss(actor_of(net))


@pytest.mark.processes
@pytest.mark.seconds
@pytest.mark.parametrize("make", [Functional, Twin])
def test_a_policy_that_acts_through_memory_of_the_learner_is_refused(make: type[nn.Module]) -> None:
    with running(workers(make())) as collector:
        trainer = make_trainer(collector, trained(make()))
        with pytest.raises(DoesNotAct, match="arrives, and does not act") as raised:
            ours(trainer)
        assert in_three_lines(raised.value)
        assert "4 of 4 parameters" in raised.value.where
        plan = SyncWeights({"policy": Source("loss_module.actor_network", idle=("*",))}, trainer=trainer).plan
        remark = next(note for note in plan.notes if note.startswith("shared memory with the learner"))
        assert "policy.module[0]" in remark or "policy" in remark
        # It was the learner's live memory: now it is the worker's own.
        policy = collector.policy
        with torch.no_grad():
            first = next(iter(collector))
            for parameter in policy.parameters():
                parameter.fill_(1e3)
        assert first["logits"].abs().max() < 1e3


@pytest.mark.processes
@pytest.mark.seconds
def test_a_policy_factory_whose_twin_is_reached_by_copy_gets_that_cure() -> None:
    schemes = {"policy": BoardScheme()}
    collector = make_workers(MultiSyncCollector, schemes=schemes, workers=1, policy_factory=make_twin_actor)
    with running(collector), pytest.raises(DoesNotAct) as raised:
        ours(make_trainer(collector, trained(Twin())))
    assert raised.value.cure.startswith("give adopt='copy'")
    schemes = {"policy": BoardScheme("copy")}
    collector = make_workers(MultiSyncCollector, schemes=schemes, workers=1, policy_factory=make_twin_actor)
    with running(collector):
        ours(make_trainer(collector, trained(Twin())))


def make_twin_actor() -> nn.Module:
    return actor_of(Twin())


@pytest.mark.processes
@pytest.mark.seconds
def test_single_leaves_that_do_not_act_are_a_warning_unless_they_are_declared() -> None:
    with running(workers(Spare())) as collector:
        with pytest.warns(IdleLeaves, match="spare.weight, policy.*spare.bias") as warned:
            hook = SyncWeights(ACTOR, trainer=make_trainer(collector, trained(Spare())))
        assert in_three_lines(next(w.message for w in warned if w.category is IdleLeaves))
        assert "idle       sent, and does not act: policy.module.0.module.spare.weight" in hook.plan.summary()
        declared = {"policy": Source("loss_module.actor_network", idle=("*.spare.*",))}
        plan = SyncWeights(declared, trainer=make_trainer(collector, trained(Spare(live=True)))).plan
        told = "policy.module.0.module.live is False in the workers and True in the learner"
        assert f"differs    {told}" in plan.summary()
        with warnings.catch_warnings():
            warnings.simplefilter("error", IdleLeaves)
            plan = SyncWeights(declared, trainer=make_trainer(collector, trained(Spare()))).plan
        assert [row.note for row in plan.rows if "spare" in row.destination] == [
            "arrives, and does not act, as declared"
        ] * 2


def test_weights_that_act_in_exploration_alone_are_not_idle() -> None:
    def make() -> nn.Module:
        return nn.Sequential(NoisyLinear(OBSERVATIONS, OBSERVATIONS), Spare())

    with running(make_collector(actor_of(make()))) as collector:
        with pytest.warns(IdleLeaves, match="spare.weight"):
            plan = SyncWeights(ACTOR, trainer=make_trainer(collector, trained(make()))).plan
    assert not any("sigma" in row.destination for row in plan.rows if row.idle)


def test_a_policy_to_which_nothing_is_sent_is_not_called() -> None:
    actor, calls = make_policy(), []
    loss = make_ppo_loss(actor)
    actor.module[0].register_forward_hook(lambda *_: calls.append(None))
    with running(make_collector(actor)) as collector:
        trainer, before = make_trainer(collector, loss), len(calls)
        plan = SyncWeights(ACTOR, trainer=trainer).plan
    assert (len(calls), plan.payload_bytes) == (before, 0)


def test_a_dropout_that_differs_is_warned_of_in_three_lines() -> None:
    with running(make_collector(actor_of(Scaled(drops=0.2)))) as collector:
        trainer = make_trainer(collector, trained(Scaled(drops=0.5)))
        with pytest.warns(DropoutDiffers, match=r"drop\.drops is 0\.2 in the workers and 0\.5 in") as warned:
            ours(trainer)
    assert in_three_lines(next(w.message for w in warned if w.category is DropoutDiffers))


@pytest.mark.processes
@pytest.mark.seconds
def test_nobody_looks_if_the_scheme_says_so() -> None:
    with running(workers(Spare(), BoardScheme(prove=False))) as collector:
        ours(make_trainer(collector, trained(Spare())))


def test_a_collector_in_this_process_is_examined_where_it_has_a_copy() -> None:
    collector = make_collector(actor_of(Functional()))
    # What it adopts is copied in place, which its dict of tensors sees. Another memory would not.
    net = collector.policy.module[0].module
    net.held = {name: tensor.clone() for name, tensor in net.held.items()}
    with running(collector), pytest.raises(DoesNotAct):
        ours(make_trainer(collector, trained(Functional())))
    with running(make_collector(make_policy())) as right:
        before = [parameter.clone() for parameter in right.policy.parameters()]
        carrier = right._carrier.clone()
        assert isinstance(right, Collector)
        plan = SyncWeights(ACTOR, trainer=make_trainer(right)).plan
        assert not any(row.idle for row in plan.rows)
        assert (right._carrier == carrier).all()
        assert len(before) == 4
