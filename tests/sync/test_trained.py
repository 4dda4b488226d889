"""What is sent and not trained, and what is trained and not sent: in the plan, in explain, in the doctor."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.collectors import MultiSyncCollector
from torchrl.objectives import A2CLoss
from torchrl.trainers import Trainer

from rlsync import Source, SyncWeights, WeightBoard, resolve
from rlsync.tensors.device import Covered
from rlsync.torchrl_plugin.examine.examine import examine
from rlsync.torchrl_plugin.examine.verdicts import findings_of
from tests.tools.parts import (
    make_a2c_loss,
    make_a2c_trainer,
    make_collector,
    make_critic,
    make_env_with_module,
    make_policy,
    make_sac_loss,
    make_workers,
)
from tests.tools.running import on_a_board, running

ACTOR = "loss_module.actor_network"
#: The two layers of the policy's network.
FIRST, LAST = "module.0.module.0", "module.0.module.2"
#: How the line begins; before a step nobody knows which of the three it is.
UNHELD = "unheld     sent, and in no optimizer (frozen, a copy, or an average)"


def make_trainer(loss: A2CLoss | None = None, optimizer: torch.optim.Optimizer | None = None) -> Trainer:
    """Its in-process collector acts with a policy of its own."""
    loss = loss or make_a2c_loss()
    return Trainer(
        collector=make_collector(make_policy()),
        total_frames=20,
        frame_skip=1,
        optim_steps_per_batch=1,
        loss_module=loss,
        optimizer=optimizer or torch.optim.Adam(loss.parameters()),
        progress_bar=False,
    )


@pytest.fixture
def a2c() -> Iterator[Trainer]:
    trainer = make_trainer()
    yield trainer
    trainer.collector.shutdown()


def parameters_below(prefix: str, loss: nn.Module) -> list[nn.Parameter]:
    return [p for name, p in loss.named_parameters() if f".{prefix}." in f".{name}."]


def make_half_trained() -> Trainer:
    """Its optimizer holds the last layer of the policy, and the critic."""
    loss = make_a2c_loss()
    held = parameters_below(LAST, loss) + parameters_below("critic_network_params", loss)
    return make_trainer(loss, torch.optim.Adam(held))


def test_a_map_of_all_that_is_trained_has_nothing_to_tell(a2c: Trainer) -> None:
    plan = resolve({"policy": ACTOR}, a2c)
    assert (plan.unheld, plan.unsent, plan.unreached) == ((), (), ())
    assert not any(word in plan.table() for word in ("unheld", "unsent", "unreached"))


def test_parameters_that_no_optimizer_holds_are_unheld() -> None:
    trainer = make_half_trained()
    plan = resolve({"policy": ACTOR}, trainer)
    names = (f"policy.{FIRST}.weight", f"policy.{FIRST}.bias")
    assert plan.unheld == names
    assert plan.unsent == (), "the critic is another network"
    line = f"{UNHELD}: {', '.join(names)}"
    assert line in plan.summary().splitlines()
    assert line in plan.table().splitlines()
    assert json.loads(plan.to_json())["unheld"] == list(names)
    trainer.collector.shutdown()


def test_all_names_are_in_the_table_and_the_first_ones_in_the_summary(a2c: Trainer) -> None:
    a2c.my_policy = copy.deepcopy(a2c.loss_module.actor_network)
    plan = resolve({"policy": "my_policy"}, a2c)
    assert len(plan.unheld) == 4
    assert plan.unheld[-1] in plan.table()
    assert plan.unheld[-1] not in plan.summary()
    assert " and 1 more" in plan.summary()


@pytest.mark.parametrize("left_out", ["by the path", "by an exclusion"])
def test_what_is_trained_in_the_same_network_and_left_out_is_unsent(a2c: Trainer, left_out: str) -> None:
    if left_out == "by the path":
        first = {"policy.module[0].module[0]": f"{ACTOR}.module[0].module[0]"}
    else:
        first = {"policy": Source(ACTOR, exclude=(f"{LAST}.*",))}
    plan = resolve(first, a2c)
    assert plan.unsent == (f"{ACTOR}.{LAST}.weight", f"{ACTOR}.{LAST}.bias")
    assert f"unsent     trained, and not sent: {', '.join(plan.unsent)}" in plan.summary()


@pytest.mark.processes
@pytest.mark.parametrize("left_out", ["by the path", "by an exclusion"])
def test_what_stands_beside_a_destination_on_a_board_and_is_in_no_entry_is_unreached(left_out: str) -> None:
    with on_a_board(make_policy()) as collector:
        trainer = make_a2c_trainer(collector, weight_update_map={"policy": ACTOR})
        if left_out == "by the path":
            plan = resolve({"policy.module[0].module[0]": f"{ACTOR}.module[0].module[0]"}, trainer)
            assert plan.unreached == (f"policy.{LAST}.weight", f"policy.{LAST}.bias")
            told = f"unreached  in the workers, and in no entry: {', '.join(plan.unreached)}"
            assert told in plan.summary().splitlines()
            assert told in plan.table().splitlines()
        else:
            plan = resolve({"policy": Source(ACTOR, exclude=(f"{LAST}.*",))}, trainer)
            assert plan.unreached == (), "somebody wrote down that it is left out"


@pytest.mark.processes
def test_a_scheme_of_a_board_that_no_entry_names_is_unreached() -> None:
    board, other = WeightBoard(), "env.transform[0].module"
    schemes = {"policy": board.scheme(), other: board.scheme()}
    env = make_env_with_module
    with running(make_workers(MultiSyncCollector, make_policy(), schemes=schemes, env=env)) as collector:
        learner = SimpleNamespace(collector=collector, loss_module=make_a2c_loss())
        plan = resolve({"policy": ACTOR}, learner)
        assert {name.startswith(other) for name in plan.unreached} == {True}
    board.close()


def test_in_one_process_a_copy_is_unreached_and_what_is_trained_itself_is_not(a2c: Trainer) -> None:
    part = {"policy.module[0].module[0]": f"{ACTOR}.module[0].module[0]"}
    a2c.collector.policy = copy.deepcopy(a2c.loss_module.actor_network)
    told = resolve(part, a2c).unreached
    assert told == (f"policy.{LAST}.weight", f"policy.{LAST}.bias")
    a2c.collector.policy = a2c.loss_module.actor_network
    assert resolve(part, a2c).unreached == ()


def test_adapters_that_the_map_goes_past_are_unsent() -> None:
    base = TensorDictModule(nn.Linear(4, 3), in_keys=["observation"], out_keys=["hidden"])
    adapter = TensorDictModule(nn.Linear(3, 3, bias=False), in_keys=["hidden"], out_keys=["hidden"])
    adapted = TensorDictSequential(base, adapter)
    trainer = make_trainer(optimizer=torch.optim.Adam(adapter.parameters()))
    trainer.adapted = adapted
    trainer.collector.base = copy.deepcopy(base)
    plan = resolve({"base": "adapted.module[0]"}, trainer)
    assert plan.unheld == ("base.module.weight", "base.module.bias")
    assert plan.unsent == ("adapted.module.1.module.weight",)
    trainer.collector.shutdown()


def test_one_member_of_an_ensemble_is_held_by_the_optimizer_of_the_stack() -> None:
    loss = make_sac_loss()
    stacked = [p for p in loss.qvalue_network_params.parameters() if isinstance(p, nn.Parameter)]
    held = Covered(stacked)
    assert all(p[0] in held and p[1] in held for p in stacked)
    assert not any(p.detach().clone() in held for p in stacked)
    assert torch.empty(0) not in held


def test_a_trainer_without_an_optimizer_says_nothing_of_training(a2c: Trainer) -> None:
    a2c.optimizer = None
    a2c._modules.pop("optimizer", None)
    a2c._optimizer_ops.clear()
    plan = resolve({"policy": ACTOR}, a2c)
    assert (plan.unheld, plan.unsent) == ((), ())


def test_optimizers_in_a_dict_are_found_too(a2c: Trainer) -> None:
    a2c.my_policy = copy.deepcopy(a2c.loss_module.actor_network)
    a2c.optimizers = {"policy": torch.optim.SGD(a2c.my_policy.parameters())}
    assert resolve({"policy": "my_policy"}, a2c).unheld == ()


def test_the_plan_of_a_hook_knows_an_optimizer_that_came_later(a2c: Trainer) -> None:
    a2c.my_policy = copy.deepcopy(a2c.loss_module.actor_network)
    sync = SyncWeights({"policy": "my_policy"}, trainer=a2c)
    assert len(sync.plan.unheld) == 4
    a2c.another = torch.optim.SGD(a2c.my_policy.parameters())
    assert sync.plan.unheld == ()


def test_a_loss_around_one_module_with_two_heads_does_not_hide_the_other_head() -> None:
    critic = make_critic()
    trainer = make_trainer(optimizer=torch.optim.Adam(critic.parameters()))
    trainer.both = nn.ModuleDict({"actor": make_policy(), "critic": critic})
    plan = resolve({"policy": "both['actor']"}, trainer)
    assert len(plan.unsent) == 4
    assert plan.unsent[0].startswith("both.critic.")
    trainer.collector.shutdown()


# -------------------------------------------------------------------------------- what the verbs print


def told_by_doctor(trainer: Trainer) -> dict[str, str]:
    findings = findings_of(examine(trainer, 60.0))
    trainer.collector.shutdown()
    return {finding.what: finding.found for finding in findings if finding.verdict == "warn"}


def test_the_doctor_warns_of_unheld_parameters() -> None:
    trainer = make_half_trained()
    SyncWeights({"policy": ACTOR}).register(trainer)
    names = f"policy.{FIRST}.weight, policy.{FIRST}.bias"
    assert told_by_doctor(trainer) == {"unheld": f"sent, and in no optimizer: {names}"}


def test_the_doctor_warns_of_trained_parameters_that_are_not_sent() -> None:
    trainer = make_trainer()
    SyncWeights({"policy": Source(ACTOR, exclude=(f"{LAST}.*",))}).register(trainer)
    names = f"{ACTOR}.{LAST}.weight, {ACTOR}.{LAST}.bias"
    assert told_by_doctor(trainer) == {"unsent": f"trained, and not sent: {names}"}


def test_the_doctor_warns_of_what_acts_and_is_in_no_entry() -> None:
    trainer = make_trainer()
    trainer.collector.policy = copy.deepcopy(trainer.loss_module.actor_network)
    SyncWeights({"policy.module[0].module[0]": f"{ACTOR}.module[0].module[0]"}).register(trainer)
    told = told_by_doctor(trainer)
    assert told["unreached"] == f"in the workers, and in no entry: policy.{LAST}.weight, policy.{LAST}.bias"
    assert told.keys() == {"unsent", "unreached"}


def test_the_doctor_warns_once_of_a_source_that_is_not_trained_at_all() -> None:
    trainer = make_trainer()
    trainer.my_policy = copy.deepcopy(trainer.loss_module.actor_network)
    SyncWeights({"policy": "my_policy"}).register(trainer)
    assert told_by_doctor(trainer) == {"source": "no optimizer of the trainer holds a tensor of my_policy"}
