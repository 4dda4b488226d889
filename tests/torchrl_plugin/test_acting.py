"""Weights that arrive and do not act are named when the hook is registered, before the first frame."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch._inductor.config as inductor
from torch import nn
from torchrl.collectors import BaseCollector, Collector, MultiSyncCollector
from torchrl.modules import NoisyLinear

from rlsync import (
    BoardScheme,
    DoesNotAct,
    IdleLeaves,
    OlderWeightsAct,
    Source,
    SyncWeights,
)
from rlsync.sync.adopter import Adopt
from tests.laws.zoo.parts import ACTOR, actor_of, make_trainer, ours
from tests.tools.parts import ACTIONS, OBSERVATIONS, make_collector, make_policy, make_ppo_loss, make_workers
from tests.tools.parts.acting import Functional, Scaled, Spare, Told, Twice, Twin
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


@pytest.mark.parametrize("options", [{}, {"options": {"freezing": True}}])
def test_a_policy_whose_weights_the_compiler_will_freeze_is_refused(options: dict[str, object]) -> None:
    """Before it is compiled. Calls that look whether weights act have code of their own."""
    with inductor.patch(freezing=not options):
        compiled = {"backend": "inductor", **options}
        with running(make_collector(actor_of(Scaled()), compile_policy=compiled)) as collector:
            with pytest.raises(DoesNotAct, match="arrives, and does not act"):
                ours(make_trainer(collector, trained(Scaled())))
        with running(make_collector(actor_of(Scaled()), compile_policy={"backend": "eager"})) as collector:
            ours(make_trainer(collector, trained(Scaled())))


def test_a_policy_to_which_nothing_is_sent_is_not_called() -> None:
    actor, calls = make_policy(), []
    loss = make_ppo_loss(actor)
    actor.module[0].register_forward_hook(lambda *_: calls.append(None))
    with running(make_collector(actor)) as collector:
        trainer, before = make_trainer(collector, loss), len(calls)
        plan = SyncWeights(ACTOR, trainer=trainer).plan
    assert (len(calls), plan.payload_bytes) == (before, 0)


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


@pytest.mark.processes
@pytest.mark.seconds
@pytest.mark.parametrize("adopt", ["alias", "copy", None])
def test_what_older_weights_computed_is_warned_of_in_three_lines(adopt: str | None) -> None:
    collector = make_collector(actor_of(Twice())) if adopt is None else workers(Twice(), BoardScheme(adopt))
    with running(collector):
        trainer = make_trainer(collector, trained(Twice(live=True)))
        with pytest.warns(
            OlderWeightsAct, match=r"older weights computed policy\.module\.0\.module\.packed"
        ) as w:
            hook = SyncWeights(ACTOR, trainer=trainer)
        assert in_three_lines(next(each.message for each in w if each.category is OlderWeightsAct))
        assert "outlives   computed by older weights, and acts: policy.module.0.module.packed" in str(
            hook.plan
        )


def check_frames(collector: BaseCollector, hook: SyncWeights, net: nn.Module) -> None:
    """Publish weights that are the number of their version: the logits of each frame must be of its stamp."""
    batches = iter(collector)
    for _ in range(3):
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.fill_(hook.version + 1)
        hook.publish()
        frames = next(batches)
        stamps = frames["next", "policy_version"]
        assert set(stamps.flatten().tolist()) == {hook.version}
        expected = hook.version * (frames["observation"].sum(-1, keepdim=True) + 1)
        close = {"rtol": 0.01, "atol": 0.0}  # of bfloat16
        logits = frames["logits"].float()
        torch.testing.assert_close(logits, expected.expand_as(logits), **close)


@pytest.mark.parametrize("make", [partial(nn.Linear, OBSERVATIONS, ACTIONS), Told])
def test_frames_in_an_autocast_block_are_of_the_version_that_they_name(make: Callable[[], nn.Module]) -> None:
    loss = trained(make())
    with torch.autocast("cpu", torch.bfloat16), running(make_collector(actor_of(make()))) as collector:
        hook = SyncWeights(ACTOR, trainer=make_trainer(collector, loss), max_unchanged_publishes=None)
        check_frames(collector, hook, loss.actor_network)


@pytest.mark.processes
@pytest.mark.seconds
@pytest.mark.parametrize("adopt", ["alias", "copy"])
def test_workers_drop_what_they_packed_when_they_are_told_of_new_weights(adopt: Adopt) -> None:
    loss = trained(Told())
    with running(workers(Told(), BoardScheme(adopt))) as collector:
        hook = SyncWeights(ACTOR, trainer=make_trainer(collector, loss), max_unchanged_publishes=None)
        check_frames(collector, hook, loss.actor_network)


def test_a_collector_that_torchrl_updates_drops_what_it_packed() -> None:
    loss = trained(Told())
    with running(make_collector(actor_of(Told()))) as collector:
        SyncWeights(ACTOR, trainer=make_trainer(collector, loss))
        next(iter(collector))
        packed = collector.policy.module[0].module
        assert packed.packed is not None
        collector.update_policy_weights_()
        assert packed.packed is None
