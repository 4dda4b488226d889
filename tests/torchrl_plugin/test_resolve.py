"""Maps become plans: what is refused, with which words, and what a plan says."""

from __future__ import annotations

import copy
import json
from functools import partial

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torchrl.collectors import MultiSyncCollector
from torchrl.trainers import Trainer

from rlsync import (
    AmbiguousSource,
    BoardScheme,
    ConfigError,
    DestinationNotFound,
    Every,
    LayoutMismatch,
    NothingToSync,
    PathSyntaxError,
    Source,
    SourceNotFound,
    SyncWeights,
    VerifySync,
    resolve,
)
from rlsync.torchrl_plugin.collectors.choose import endpoint_of
from tests.laws.zoo.parts import actor_of
from tests.laws.zoo.parts import make_trainer as make_learner
from tests.tools.parts import (
    ACTIONS,
    make_collector,
    make_continuous_env,
    make_continuous_policy,
    make_dqn_trainer,
    make_mlp,
    make_policy,
    make_ppo_loss,
    make_ppo_trainer,
    make_q_policy,
    make_sac_trainer,
    make_workers,
)

ACTOR = "loss_module.actor_network"
compiled = partial(torch.compile, backend="eager")


class Holder(nn.Module):
    """A loss in name only: a place on a trainer for any module."""

    def __init__(self, **modules: nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, batch):
        return batch


def make_trainer(collector, **modules: nn.Module) -> Trainer:
    return Trainer(
        collector=collector,
        total_frames=40,
        frame_skip=1,
        optim_steps_per_batch=1,
        loss_module=Holder(**modules),
        progress_bar=False,
    )


@pytest.fixture
def ppo():
    """A PPO trainer whose in-process collector acts with a copy of the policy."""
    actor = make_policy()
    collector = make_collector(copy.deepcopy(actor))
    yield make_ppo_trainer(collector, actor)
    collector.shutdown()


def verdicts(plan) -> list[str]:
    return sorted({str(row.verdict) for row in plan.rows})


def test_a_plan_lists_every_leaf_with_bytes_and_verdict(ppo):
    plan = resolve({"policy": ACTOR}, ppo)
    assert verdicts(plan) == ["copied"]
    assert len(plan.rows) == 4
    assert plan.payload_bytes == sum(p.nbytes for p in ppo.loss_module.actor_network.parameters())


def test_a_plan_prints_as_a_table_that_cuts_no_path_and_as_json(ppo):
    plan = resolve({"policy": ACTOR}, ppo)
    table = plan.table()
    for row in plan.rows:
        assert row.destination in table
        assert f"<- {row.source}" in table
    read_back = json.loads(plan.to_json())
    assert read_back["payload_bytes"] == plan.payload_bytes
    assert [r["destination"] for r in read_back["rows"]] == [r.destination for r in plan.rows]
    assert read_back["rows"][0]["verdict"] == "copied"


def test_resolving_changes_neither_trainer_nor_collector(ppo):
    before = [p.clone() for p in ppo.collector.policy.parameters()]
    ops = len(ppo._post_steps_ops)
    resolve({"policy": ACTOR}, ppo)
    assert len(ppo._post_steps_ops) == ops
    assert "rollout" not in vars(ppo.collector)
    after = list(ppo.collector.policy.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize(
    ("sync_map", "error", "says"),
    [
        ({"polcy": ACTOR}, DestinationNotFound, "did you mean 'policy'?"),
        ({"policy": "loss_module.actor_netwrk"}, SourceNotFound, "did you mean 'actor_network'?"),
        ({"policy": "loss_module..actor_network"}, PathSyntaxError, "character 13"),
        ({"policy": "loss_module.__class__"}, PathSyntaxError, "refused"),
        ({"policy": "loss_module.critic_network"}, LayoutMismatch, "4 missing"),
        ({}, NothingToSync, "name at least one destination"),
        (
            {"policy": ACTOR, "policy.module[0]": f"{ACTOR}.module[0]"},
            AmbiguousSource,
            "has two sources",
        ),
    ],
)
def test_a_wrong_map_is_refused_when_the_hook_is_registered(ppo, sync_map, error, says):
    stood = list(ppo._post_steps_ops)
    with pytest.raises(error) as refused:
        SyncWeights(sync_map).register(ppo)
    assert says in str(refused.value)
    assert ppo._post_steps_ops == stood, "a refused hook leaves the trainer as it was"


def test_a_module_without_any_tensor_is_nothing_to_sync():
    collector = make_collector(make_policy())
    trainer = make_trainer(collector, actor=make_policy())
    trainer.loss_module.empty = nn.Identity()
    collector.empty = nn.Identity()
    with pytest.raises(NothingToSync):
        SyncWeights({"empty": "loss_module.empty"}, trainer=trainer)
    collector.shutdown()


@pytest.mark.parametrize("make", [make_ppo_trainer, make_dqn_trainer, make_sac_trainer])
def test_the_trained_networks_of_stock_losses_pass(make):
    env = {"env": make_continuous_env} if make is make_sac_trainer else {}
    actor = {
        make_ppo_trainer: make_policy,
        make_dqn_trainer: make_q_policy,
        make_sac_trainer: make_continuous_policy,
    }[make]()
    source = "loss_module.value_network" if make is make_dqn_trainer else ACTOR
    collector = make_collector(copy.deepcopy(actor), **env)
    trainer = make(collector, actor)
    assert verdicts(resolve({"policy": source}, trainer)) == ["copied"]
    assert verdicts(resolve({"policy": f"{source}_params"}, trainer)) == ["copied"]
    collector.shutdown()


def test_a_broadcastable_but_different_shape_is_a_mismatch():
    collector = make_collector(make_policy())
    collector.net = nn.Linear(4, 3)
    narrow = nn.Linear(4, 1)
    trainer = make_trainer(collector, net=narrow)
    plan = resolve({"net": "loss_module.net"}, trainer)
    assert verdicts(plan) == ["mismatch"]
    with pytest.raises(LayoutMismatch, match=r"shape \[1, 4\] does not fit \[3, 4\]"):
        plan.check()
    collector.shutdown()


def test_missing_and_unexpected_leaves_can_be_excluded_by_name():
    collector = make_collector(make_policy())
    collector.net = nn.BatchNorm1d(3)
    trainer = make_trainer(collector, net=nn.LayerNorm(3))
    with pytest.raises(LayoutMismatch, match="running_mean"):
        resolve({"net": "loss_module.net"}, trainer).check()
    excluded = Source("loss_module.net", exclude=("running_*", "num_batches_tracked"))
    plan = resolve({"net": excluded}, trainer).check()
    assert [row.destination for row in plan.rows] == ["net.weight", "net.bias"]
    collector.shutdown()


def test_a_cast_is_legal_only_when_declared():
    collector = make_collector(make_policy())
    collector.net = nn.Linear(4, 2).to(torch.bfloat16)
    trainer = make_trainer(collector, net=nn.Linear(4, 2))
    with pytest.raises(LayoutMismatch, match=r"declare the cast: Source\(..., dtype='bfloat16'\)"):
        resolve({"net": "loss_module.net"}, trainer).check()
    hook = SyncWeights({"net": Source("loss_module.net", dtype=torch.bfloat16)}, trainer=trainer)
    assert verdicts(hook.plan) == ["cast"]
    receipt = hook.publish()
    assert receipt.cast_leaves == 2
    expected = trainer.loss_module.net.weight.to(torch.bfloat16)
    assert torch.equal(collector.net.weight, expected)
    collector.shutdown()


def test_a_declared_dtype_that_is_not_floating_is_refused(ppo):
    with pytest.raises(ConfigError, match="no floating dtype"):
        resolve({"policy": Source(ACTOR, dtype="int8")}, ppo)


def test_buffers_extra_state_and_ties_are_leaves():
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(3, 3)
            self.second = nn.Linear(3, 3)
            self.second.weight = self.first.weight
            self.norm = nn.BatchNorm1d(3)
            self.register_buffer("scratch", torch.zeros(2), persistent=False)
            self.seen = {"deep": {"count": 3, "mean": torch.ones(2)}}

        def get_extra_state(self):
            return self.seen

        def set_extra_state(self, state) -> None:
            self.seen = state

    collector = make_collector(make_policy())
    collector.net = Counting().eval()
    source = Counting()
    source.seen = {"deep": {"count": 7, "mean": torch.full((2,), 5.0)}}
    source.scratch.fill_(2.0)
    source.norm.running_mean.fill_(4.0)
    trainer = make_trainer(collector, net=source)
    hook = SyncWeights({"net": "loss_module.net"}, trainer=trainer)
    notes = {row.destination: row.note for row in hook.plan.rows}
    assert notes["net.second.weight"] == "tied to first.weight"
    assert "net._extra_state.deep.count" in notes
    assert "net.scratch" in notes
    hook.publish()
    assert collector.net.seen["deep"]["count"] == 7
    assert collector.net.seen["deep"]["mean"].tolist() == [5.0, 5.0]
    assert collector.net.scratch.tolist() == [2.0, 2.0]
    assert collector.net.norm.running_mean.tolist() == [4.0] * 3
    assert collector.net.second.weight is collector.net.first.weight
    collector.shutdown()


def test_a_destination_that_ties_what_the_source_does_not_is_a_mismatch():
    tied = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    tied[1].weight = tied[0].weight
    collector = make_collector(make_policy())
    collector.net = tied
    trainer = make_trainer(collector, net=nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    with pytest.raises(LayoutMismatch, match=r"ties it to 0\.weight"):
        resolve({"net": "loss_module.net"}, trainer).check()
    collector.shutdown()


@pytest.mark.seconds
@pytest.mark.parametrize("wrap", [nn.DataParallel, checkpoint_wrapper, compiled])
@pytest.mark.parametrize("layers", [True, False])
def test_a_loss_with_wrapped_layers_is_the_one_that_is_trained_and_the_proofs_see_through(wrap, layers):
    net = make_mlp(ACTIONS)
    wrapped = nn.Sequential(*map(wrap, net)) if layers else wrap(net)
    collector = make_collector(actor_of(make_mlp(ACTIONS)))
    trainer = make_learner(collector, make_ppo_loss(actor_of(wrapped)))
    sync = SyncWeights({"policy": ACTOR})
    sync.register(trainer)
    verify = VerifySync(sync, Every(1, "batches"), behaviour=Every(1, "batches"))
    verify.register(trainer)
    trainer.train()
    assert (verify.deviations, verify.uncompared) == ([], ())
    assert verify.behaviour_held is not None
    collector.shutdown()


def test_a_wrapper_on_one_side_that_is_not_known_is_named_with_the_nearest_leaf():
    adapted = nn.Module()
    adapted.base_model = nn.Module()
    adapted.base_model.model = make_mlp(2)
    collector = make_collector(make_policy())
    collector.net = make_mlp(2)
    trainer = make_trainer(collector, net=adapted)
    nearest = r"did you mean 'loss_module\.net\.base_model\.model\.0\.weight'\?"
    with pytest.raises(LayoutMismatch, match=nearest):
        resolve({"net": "loss_module.net"}, trainer).check()
    assert len(resolve({"net": "loss_module.net.base_model.model"}, trainer).check().rows) == 4
    collector.shutdown()


@pytest.mark.parametrize("wrap", [nn.DataParallel, torch.compile, checkpoint_wrapper])
def test_wrapped_learners_keep_their_leaf_names(wrap):
    collector = make_collector(make_policy())
    collector.net = make_mlp(2)
    trainer = make_trainer(collector, net=wrap(make_mlp(2)))
    plan = resolve({"net": "loss_module.net"}, trainer).check()
    assert [row.source.removeprefix("loss_module.net.") for row in plan.rows] == [
        name for name, _ in collector.net.named_parameters()
    ]
    collector.shutdown()


def test_a_tensordict_on_the_trainer_can_be_a_source(ppo):
    ppo.frozen = TensorDict.from_module(ppo.loss_module.actor_network).data.clone()
    assert verdicts(resolve({"policy": "frozen"}, ppo)) == ["copied"]


def test_a_typo_below_the_policy_of_process_workers_names_the_nearest_module(fork_workers):
    actor = make_policy()
    collector = make_workers(MultiSyncCollector, actor, schemes={"policy": BoardScheme()})
    trainer = make_ppo_trainer(collector, actor, weight_update_map={"policy": ACTOR})
    with pytest.raises(DestinationNotFound, match=r"did you mean 'policy'"):
        resolve({"polcy": ACTOR}, trainer)
    with pytest.raises(DestinationNotFound, match=r"no leaves under 'modul.0'"):
        resolve({"policy.modul[0]": ACTOR}, trainer)
    part = resolve({"policy.module[0]": f"{ACTOR}.module[0]"}, trainer).check()
    assert part.rows[0].destination == "policy.module[0].module.0.weight"
    collector.shutdown()


def test_two_boards_on_one_collector_are_refused(fork_workers):
    schemes = {"policy": BoardScheme(), "env": BoardScheme()}

    class Collector:
        _weight_sync_schemes = schemes

    with pytest.raises(ConfigError, match="share one board"):
        endpoint_of(Collector())
