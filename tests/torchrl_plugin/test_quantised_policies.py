"""Policies with weights that are made of other tensors: workers act with the parts that were published."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from torchrl.collectors import BaseCollector, MultiSyncCollector
from torchrl.weight_update import MultiProcessWeightSyncScheme

from rlsync import BoardScheme, Every, LayoutMismatch, SyncWeights, VerifySync
from rlsync.core.plan import Verdict
from rlsync.torchrl_plugin.examine.examine import examine
from rlsync.torchrl_plugin.examine.verdicts import findings_of
from tests.laws.zoo.parts import ACTOR, actor_of, make_trainer
from tests.tools.parts import (
    ACTIONS,
    FRAMES_PER_BATCH,
    OBSERVATIONS,
    make_collector,
    make_counting_env,
    make_ppo_loss,
    make_workers,
)
from tests.tools.parts.quantised import Closed, biased, make_quantised_mlp, move, quantise, quantised
from tests.tools.running import in_three_lines, running


def on_a_board(net: nn.Module, **scheme: object) -> BaseCollector:
    return make_workers(MultiSyncCollector, actor_of(net), schemes={"policy": BoardScheme(**scheme)})


def made_by_workers(net: nn.Module) -> BaseCollector:
    """Workers make their own policy, of another's numbers."""
    return MultiSyncCollector(
        [make_counting_env] * 2,
        policy_factory=partial(_fresh_actor, net),
        frames_per_batch=FRAMES_PER_BATCH,
        weight_sync_schemes={"policy": BoardScheme()},
    )


def _fresh_actor(net: nn.Module) -> nn.Module:
    move(net, 99)
    return actor_of(net)


def logits(net: nn.Module, observation: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return net(observation)


@pytest.mark.processes
@pytest.mark.seconds
@pytest.mark.parametrize(
    ("make", "whole"),
    [
        (on_a_board, quantise),
        (on_a_board, biased),
        (partial(on_a_board, adopt="copy"), quantise),
        (made_by_workers, biased),
        (lambda net: make_collector(actor_of(net)), quantise),
    ],
    ids=["alias", "parts of parts", "copy", "policy_factory", "in process"],
)
def test_workers_act_with_the_numbers_of_each_weight(
    make: Callable[[nn.Module], BaseCollector], whole: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    learner = make_quantised_mlp(whole)
    with running(make(make_quantised_mlp(whole))) as collector:
        trainer = make_trainer(collector, make_ppo_loss(actor_of(learner)))
        sync = SyncWeights(ACTOR)
        sync.register(trainer)
        rows = {row.destination: row.verdict for row in sync.plan.rows}
        part = "inner.scale" if whole is biased else "scale"
        assert rows[f"policy.module.0.module.4.weight.{part}"] is Verdict.COPIED
        batches = iter(collector)
        for seed in range(2):
            move(learner, seed)
            sync.publish()
            batch = next(batches)
            assert batch["policy_version"].unique().tolist() == [sync.version]
            torch.testing.assert_close(batch["logits"], logits(learner, batch["observation"]))


@pytest.mark.processes
@pytest.mark.seconds
def test_the_doctor_changes_the_parts_and_finds_them_in_every_worker() -> None:
    with running(on_a_board(make_quantised_mlp())) as collector:
        trainer = make_trainer(collector, make_ppo_loss(actor_of(make_quantised_mlp())))
        SyncWeights(ACTOR).register(trainer)
        examination = examine(trainer, 30.0)
        findings = findings_of(examination)
        assert [finding.found for finding in findings if finding.verdict != "ok"] == []
        assert [judged.held for judged in examination.outputs] == [1, 1]


@pytest.mark.processes
@pytest.mark.seconds
def test_digests_and_outputs_of_a_quantised_policy_are_compared() -> None:
    with running(on_a_board(make_quantised_mlp())) as collector:
        trainer = make_trainer(collector, make_ppo_loss(actor_of(make_quantised_mlp())))
        sync = SyncWeights(ACTOR, when=Every(1, "batches"))
        sync.register(trainer)
        verify = VerifySync(sync, when=Every(1, "batches"), behaviour=Every(1, "batches"))
        verify.register(trainer)
        trainer.train()
        assert verify.deviations == []
        assert verify.uncompared == ()
        assert verify.behaviour_held is not None


def test_one_module_on_both_sides_is_aliased_part_by_part() -> None:
    loss = make_ppo_loss(actor_of(make_quantised_mlp()))
    with running(make_collector(loss.actor_network)) as collector:
        sync = SyncWeights(ACTOR)
        sync.register(make_trainer(collector, loss))
        assert sync.plan.count(Verdict.ALIASED) == len(sync.plan.rows)
        assert sync.publish().copied_leaves == 0


def test_weights_that_are_quantised_after_the_hook_was_registered_are_refused() -> None:
    learner = make_quantised_mlp()
    with running(make_collector(actor_of(make_quantised_mlp()))) as collector:
        sync = SyncWeights(ACTOR)
        loss = make_ppo_loss(actor_of(learner))
        sync.register(make_trainer(collector, loss))
        quantised(loss.actor_network.module[0].module[0])
        with pytest.raises(LayoutMismatch, match=r"0\.weight has become a Quantised") as raised:
            sync.publish()
        assert in_three_lines(raised.value)


def test_a_setting_of_a_weight_that_changes_is_noticed_at_the_next_publish() -> None:
    with running(make_collector(actor_of(make_quantised_mlp()))) as collector:
        loss = make_ppo_loss(actor_of(make_quantised_mlp()))
        sync = SyncWeights(ACTOR)
        sync.register(make_trainer(collector, loss))
        loss.actor_network.module[0].module[2].weight.shift = 0.5
        with pytest.raises(LayoutMismatch, match=r"'shift': 0\.5"):
            sync.publish()


@pytest.mark.processes
@pytest.mark.seconds
def test_a_weight_that_cannot_be_taken_apart_is_refused_before_a_worker_starts() -> None:
    net = make_quantised_mlp(lambda weight: Closed(weight.detach()))
    with pytest.raises(LayoutMismatch, match=r"2\.weight, a Closed, has no memory of its own") as raised:
        on_a_board(net)
    assert in_three_lines(raised.value)


@pytest.mark.processes
@pytest.mark.seconds
def test_torchrls_own_schemes_are_refused_for_weights_that_are_made_of_parts() -> None:
    schemes = {"policy": MultiProcessWeightSyncScheme()}
    net = nn.Sequential(nn.Linear(OBSERVATIONS, 8), quantised(nn.Linear(8, ACTIONS)))
    acts = actor_of(nn.Sequential(nn.Linear(OBSERVATIONS, 8), nn.Linear(8, ACTIONS)))
    with running(make_workers(MultiSyncCollector, acts, schemes=schemes)) as collector:
        trainer = make_trainer(collector, make_ppo_loss(actor_of(net)))
        with pytest.raises(LayoutMismatch, match="which TorchRL's own schemes do not carry"):
            SyncWeights(ACTOR).register(trainer)


def test_a_policy_without_memory_is_refused_by_name() -> None:
    net = make_quantised_mlp().to("meta")
    with pytest.raises(LayoutMismatch, match=r"0\.weight is on the meta device"):
        on_a_board(net)
