"""Hooks that are registered in a wrong way say so at their first call: none does nothing in silence."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torchrl.collectors import Collector, MultiSyncCollector
from torchrl.modules import EGreedyModule
from torchrl.objectives.value import GAE
from torchrl.trainers import Trainer, TrainerHookBase

from rlsync import (
    BoardScheme,
    BoundStaleness,
    ConfigError,
    Every,
    LogPolicyLag,
    LogReceipts,
    NothingLearns,
    NothingPublished,
    RecordSchedule,
    RlsyncWarning,
    StepsAhead,
    SyncWeights,
    UpdateWeights,
    VerifySync,
    WatchWorkers,
)
from rlsync.core.trigger import Trigger
from rlsync.runs.recipes.hooks.finite import StopIfNotFinite
from rlsync.runs.recipes.hooks.measuring import StalenessHistogram
from rlsync.runs.recipes.hooks.steering import EpisodeReturns, EpsilonDecay
from rlsync.sync.trained import Gradients, Training
from rlsync.tensors.leaves import Leaves
from rlsync.torchrl_plugin.examine.examine import examine
from rlsync.torchrl_plugin.examine.verdicts import findings_of
from tests.tools.parts import (
    FRAMES_PER_BATCH,
    make_collector,
    make_policy,
    make_ppo_loss,
    make_ppo_trainer,
)
from tests.tools.parts.envs import make_counting_env

ACTOR = "loss_module.actor_network"
MAP = {"policy": ACTOR}


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    """A PPO trainer whose in-process collector acts with a copy of the policy."""
    actor = make_policy()
    made = make_ppo_trainer(make_collector(copy.deepcopy(actor)), actor)
    yield made
    made.collector.shutdown()


def unbound_sync() -> SyncWeights:
    return SyncWeights(MAP)


def make_epsilon_decay() -> EpsilonDecay:
    return EpsilonDecay(EGreedyModule(spec=make_counting_env().action_spec))


#: Every hook, unbound, and a stage at which a user might register it with register_op.
UNBOUND: dict[str, tuple[str, Callable[[], TrainerHookBase]]] = {
    "SyncWeights": ("post_steps", unbound_sync),
    "VerifySync": ("post_steps", lambda: VerifySync(unbound_sync())),
    "LogPolicyLag": ("process_optim_batch", lambda: LogPolicyLag(unbound_sync())),
    "BoundStaleness": ("process_optim_batch", lambda: BoundStaleness(unbound_sync(), 1)),
    "WatchWorkers": ("post_steps", WatchWorkers),
    "EpisodeReturns": ("post_steps_log", EpisodeReturns),
    "EpsilonDecay": ("post_steps", make_epsilon_decay),
    "StalenessHistogram": ("process_optim_batch", lambda: StalenessHistogram(unbound_sync())),
    "LogReceipts": ("post_steps_log", lambda: LogReceipts(unbound_sync())),
    "StopIfNotFinite": ("post_optim", StopIfNotFinite),
}


@pytest.mark.seconds
@pytest.mark.parametrize("name", UNBOUND)
def test_every_hook_that_has_no_trainer_names_register_as_the_cure(trainer: Trainer, name: str) -> None:
    stage, make = UNBOUND[name]
    trainer.register_op(stage, make())
    with pytest.raises(ConfigError, match=f"{name}|this SyncWeights has no trainer yet") as refused:
        trainer.train()
    assert "register(trainer)" in refused.value.cure


@pytest.mark.parametrize(
    "make", [LogPolicyLag, lambda sync: BoundStaleness(sync, 1), VerifySync, LogReceipts]
)
def test_a_hook_that_is_registered_before_its_sync_weights_is_refused(
    trainer: Trainer, make: Callable[[SyncWeights], TrainerHookBase]
) -> None:
    with pytest.raises(ConfigError, match="this SyncWeights is not bound to that trainer"):
        make(unbound_sync()).register(trainer)


def bound(kind: str, trainer: Trainer) -> TrainerHookBase:
    match kind:
        case "SyncWeights":
            return SyncWeights(MAP, trainer=trainer)
        case "UpdateWeights":
            return UpdateWeights(trainer.collector, 1, weight_update_map=MAP, trainer=trainer)
    sync = SyncWeights(MAP)
    sync.register(trainer)
    hook = VerifySync(sync) if kind == "VerifySync" else make_epsilon_decay()
    hook.register(trainer)
    return hook


@pytest.mark.one_case
@pytest.mark.parametrize("kind", ["SyncWeights", "UpdateWeights", "VerifySync", "EpsilonDecay"])
@pytest.mark.parametrize("stage", ["post_steps_log", "batch_process", "post_optim_complete_log"])
def test_a_stage_that_passes_arguments_is_refused_with_those_that_do_not(
    trainer: Trainer, kind: str, stage: str
) -> None:
    trainer.register_op(stage, bound(kind, trainer))
    with pytest.raises(ConfigError, match=f"this {kind} takes no arguments, and was called with") as refused:
        trainer.train()
    assert "post_steps, post_optim or post_epoch" in refused.value.cure


def test_update_weights_without_a_trainer_still_publishes() -> None:
    actor = make_policy()
    trainer = make_ppo_trainer(make_collector(copy.deepcopy(actor)), actor)
    hook = UpdateWeights(trainer.collector, policy_weights_getter=lambda: actor)
    trainer.register_op("post_steps", hook)
    trainer.train()
    assert [receipt.version for receipt in hook.receipts] == [1, 2]


# ----------------------------------------------------------- bound, and not called by that trainer


def about_us(run: Callable[[], object]) -> list[RlsyncWarning]:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", RlsyncWarning)
        run()
    return [warning.message for warning in told if isinstance(warning.message, RlsyncWarning)]


def make_trainer(batches: int = 12) -> Trainer:
    actor = make_policy()
    return make_ppo_trainer(
        make_collector(copy.deepcopy(actor)), actor, total_frames=batches * FRAMES_PER_BATCH
    )


@pytest.mark.seconds
@pytest.mark.parametrize("kind", ["SyncWeights", "UpdateWeights"])
@pytest.mark.parametrize("stage", [None, "setup", "post_steps", "post_optim", "post_epoch"])
@pytest.mark.one_case
def test_a_bound_hook_that_its_trainer_does_not_call_is_told_of_once(kind: str, stage: str | None) -> None:
    trainer = make_trainer()
    hook = bound(kind, trainer)
    if stage is not None:
        trainer.register_op(stage, hook)
    told = about_us(trainer.train)
    if stage in (None, "setup"):
        (warning,) = told
        assert isinstance(warning, NothingPublished)
        assert warning.what == f"this {kind} is bound to the trainer, which does not call it"
        assert "trainer.register_op('post_steps', hook)" in warning.cure
    else:
        assert told == []


@pytest.mark.seconds
def test_publishing_by_hand_is_no_mistake() -> None:
    trainer = make_trainer()
    hook = SyncWeights(MAP, trainer=trainer)
    trainer.register_op("post_steps", lambda: hook.publish() and None)
    assert about_us(trainer.train) == []


def test_batches_without_optimizer_steps_are_no_mistake() -> None:
    trainer = make_trainer()
    trainer.collector.init_random_frames = 100 * FRAMES_PER_BATCH
    SyncWeights(MAP, when=Every(1, "optim_steps")).register(trainer)
    assert about_us(trainer.train) == []


@pytest.mark.one_case
@pytest.mark.parametrize("when", [Every(1, "batches"), StepsAhead(1), Every(0.001, "seconds")], ids=str)
@pytest.mark.seconds
def test_a_hook_that_another_trainer_calls_is_told_of_once(when: Trigger) -> None:
    bound_to, calls = make_trainer(), make_trainer()
    hook = SyncWeights(MAP, when, trainer=bound_to)
    calls.register_op("post_steps", hook)
    told = about_us(calls.train)
    bound_to.collector.shutdown()
    if "seconds" in when.units():
        assert told == []
        assert len(hook.receipts) > 1
    else:
        (warning,) = told
        assert isinstance(warning, NothingPublished)
        assert warning.what == "this SyncWeights is called, but not by the trainer to which it is bound"
        assert "hook.publish()" in warning.cure


# --------------------------------------------------------- what cannot learn, and who is not published to


def silent_trainer(collector: Collector | MultiSyncCollector) -> Trainer:
    """A trainer without any hook that publishes."""
    loss = make_ppo_loss()
    trainer = Trainer(
        collector=collector,
        total_frames=3 * FRAMES_PER_BATCH,
        frame_skip=1,
        optim_steps_per_batch=1,
        loss_module=loss,
        optimizer=torch.optim.Adam(loss.parameters()),
        progress_bar=False,
    )
    trainer.register_op("batch_process", GAE(gamma=0.9, lmbda=0.9, value_network=loss.critic_network))
    return trainer


@pytest.mark.parametrize("holds", ["all", "what requires a gradient"])
def test_a_policy_that_was_frozen_before_the_optimizer_took_it_is_told_of_at_registration(holds: str) -> None:
    for frozen in (True, False):
        trainer = half_trained(make_policy().requires_grad_(not frozen), all_held=holds == "all")
        told = about_us(lambda trainer=trainer: SyncWeights(MAP).register(trainer))
        who = "an" if holds == "all" else "no"
        what = f"{who} optimizer holds {ACTOR}, and none of its parameters requires a gradient"
        assert [(type(warning), warning.what) for warning in told] == [(NothingLearns, what)] * frozen
        found = [finding.found for finding in findings_of(examine(trainer, 30.0)) if finding.verdict != "ok"]
        assert found == [what] * frozen, "said once"
        trainer.collector.shutdown()


def half_trained(actor: nn.Module, *, all_held: bool = False) -> Trainer:
    """Its optimizer holds those parameters of the loss that require a gradient, or all of them."""
    trainer = make_ppo_trainer(make_collector(copy.deepcopy(actor)), actor)
    held = [p for p in trainer.loss_module.parameters() if p.requires_grad or all_held]
    trainer.optimizer.param_groups[0]["params"] = held
    return trainer


def test_what_is_frozen_on_purpose_is_no_alarm() -> None:
    frozen = make_policy().requires_grad_(False)
    trainer = half_trained(copy.deepcopy(frozen))
    assert about_us(lambda: SyncWeights(MAP, max_unchanged_publishes=None).register(trainer)) == []
    trainer.collector.shutdown()
    trainer = half_trained(frozen)
    trainer.expert = copy.deepcopy(frozen)
    assert about_us(lambda: SyncWeights({"policy": "expert"}).register(trainer)) == [], "of another role"
    trainer.collector.shutdown()


def test_an_average_or_a_target_of_a_trained_policy_is_no_alarm() -> None:
    trainer = half_trained(make_policy())
    trainer.loss_module.average = copy.deepcopy(trainer.loss_module.actor_network).requires_grad_(False)
    assert about_us(lambda: SyncWeights({"policy": "loss_module.average"}).register(trainer)) == []
    trainer.collector.shutdown()


def test_a_frozen_trunk_below_a_trained_head_is_no_alarm() -> None:
    actor = make_policy()
    actor.module[0].module[0].requires_grad_(False)
    trainer = half_trained(actor)
    below = ".module[0].module[0]"
    trunk = {f"policy{below}": f"{ACTOR}{below}"}
    assert about_us(lambda: SyncWeights(trunk).register(trainer)) == []
    trainer.collector.shutdown()


@pytest.mark.parametrize("scheduled", [True, False])
def test_a_learning_rate_of_0_is_told_of_unless_a_scheduler_will_raise_it(scheduled: bool) -> None:
    trainer = silent_trainer(make_collector(make_policy()))
    (group,) = trainer.optimizer.param_groups
    if scheduled:
        torch.optim.lr_scheduler.LambdaLR(trainer.optimizer, lambda step: 0.1 * step)
    group["lr"] = 0.0
    told = about_us(lambda: SyncWeights(MAP).register(trainer))
    assert [warning.what for warning in told] == ["the learning rate of loss_module.actor_network is 0"] * (
        not scheduled
    )
    trainer.collector.shutdown()


def test_a_group_with_a_learning_rate_of_0_is_told_of() -> None:
    trainer = silent_trainer(make_collector(make_policy()))
    (group,) = trainer.optimizer.param_groups
    first, group["params"] = group["params"][:2], group["params"][2:]
    trainer.optimizer.add_param_group({"params": first, "lr": 0.0})
    (told,) = about_us(lambda: SyncWeights(MAP).register(trainer))
    assert told.what == "the learning rate of 2 parameters of loss_module.actor_network is 0"
    trainer.collector.shutdown()


def test_a_policy_without_any_gradient_may_wait_for_the_critic_but_not_for_ever() -> None:
    policy, critic = nn.Linear(2, 2), nn.Linear(2, 1)
    optimizer = torch.optim.SGD([*policy.parameters(), *critic.parameters()], lr=0.1)
    leaves = Leaves(policy, "policy").leaves
    gradients = Gradients(Training(lambda: [optimizer]))
    for step in range(1001):
        told = about_us(lambda: gradients.look([], leaves))
        assert [warning.what for warning in told] == [
            "2 of 2 sent parameters got no gradient in 1000 steps"
        ] * (step == 1000)
        critic(torch.ones(2)).sum().backward()
        optimizer.step()


NEVER = [Every(4), Every(3 * FRAMES_PER_BATCH + 1, "frames"), Every(10, "optim_steps"), StepsAhead(9)]
DUE = [
    Every(3),
    Every(3 * FRAMES_PER_BATCH, "frames"),
    Every(3, "optim_steps"),
    StepsAhead(2),
    Every(9, "seconds"),
]


@pytest.mark.one_case
@pytest.mark.parametrize("when", [*NEVER, *DUE, Every(4) | Every(1, "optim_steps")], ids=str)
def test_a_trigger_that_is_never_due_is_told_of_at_registration(when: Trigger) -> None:
    trainer = silent_trainer(make_collector(make_policy()))
    told = about_us(lambda: SyncWeights(MAP, when).register(trainer))
    never = f"this SyncWeights is never due in the planned run: {when}"
    assert [warning.what for warning in told] == [never] * (when in NEVER)
    assert all(warning.where.startswith("3 batches, ") for warning in told)
    assert about_us(trainer.train) == [], "it is told once"


def test_a_trigger_that_is_never_due_in_a_run_that_became_shorter_is_told_of_before_the_first_frame() -> None:
    trainer = silent_trainer(make_collector(make_policy()))
    assert about_us(lambda: SyncWeights(MAP, Every(3)).register(trainer)) == []
    trainer.total_frames = FRAMES_PER_BATCH
    assert [type(warning) for warning in about_us(trainer.train)] == [NothingPublished]


def test_steps_that_a_way_of_the_users_own_makes_are_not_foreseen() -> None:
    trainer = silent_trainer(make_collector(make_policy()))
    trainer.optimizer = None
    trainer._modules.pop("optimizer", None)
    trainer._optimizer_ops.clear()
    assert about_us(lambda: SyncWeights(MAP, Every(10, "optim_steps")).register(trainer)) == []
    trainer.collector.shutdown()


@pytest.mark.seconds
@pytest.mark.parametrize("how", ["forgotten", "registered", "called by hand"])
def test_an_update_weights_that_was_never_registered_is_told_of_after_the_first_batch(how: str) -> None:
    trainer = silent_trainer(make_collector(make_policy()))
    hook = UpdateWeights(
        trainer.collector, 4, policy_weights_getter=lambda: trainer.loss_module.actor_network
    )
    if how != "forgotten":
        trainer.register_op("post_steps", hook if how == "registered" else lambda: hook())
    told = about_us(trainer.train)
    assert [warning.what for warning in told] == [
        "this UpdateWeights is registered with no trainer, so it sends nothing"
    ] * (how == "forgotten")


@pytest.mark.parametrize("own", ["nothing", "a hook", "the learner's memory"])
def test_a_hook_for_another_collector_is_told_of_if_the_trainers_own_gets_nothing(own: str) -> None:
    trainer = silent_trainer(make_collector(make_policy()))
    other = make_collector(make_policy())
    if own == "a hook":
        SyncWeights(MAP).register(trainer)
    elif own == "the learner's memory":
        trainer.collector.shutdown()
        trainer.collector = make_collector(trainer.loss_module.actor_network)
    told = about_us(lambda: SyncWeights(MAP, collector=other).register(trainer))
    assert [type(warning) for warning in told] == [NothingPublished] * (own == "nothing")
    assert all("publishes to another collector" in warning.what for warning in told)
    for collector in (trainer.collector, other):
        collector.shutdown()


# ------------------------------------------------------------------ what is given besides a trainer


def test_a_loss_in_place_of_a_collector_is_refused(trainer: Trainer) -> None:
    with pytest.raises(ConfigError, match="SyncWeights needs a BaseCollector, got a ClipPPOLoss"):
        SyncWeights(MAP, collector=trainer.loss_module).register(trainer)


def test_receipts_in_a_folder_that_is_not_there_are_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no folder .*nowhere"):
        SyncWeights(MAP, receipts_file=tmp_path / "nowhere" / "receipts.jsonl")


def test_a_folder_where_a_file_is_named_is_refused_before_anything_runs(
    tmp_path: Path, trainer: Trainer
) -> None:
    with pytest.raises(ConfigError, match=" is a folder\n  where  receipts_file="):
        SyncWeights(MAP, receipts_file=tmp_path)
    with pytest.raises(ConfigError, match=" is a folder\n  where  versions_file"):
        SyncWeights(MAP, versions_file=tmp_path).register(trainer)


@pytest.mark.parametrize("number", [-1, 1.5, "2", True, None])
def test_a_number_that_cannot_be_is_refused_where_it_is_given(number: Any, tmp_path: Path) -> None:
    sync = SyncWeights(MAP)
    for where, make in {
        "RecordSchedule(every=": lambda: RecordSchedule(sync, tmp_path / "schedule.bin", every=number),
        "history=": lambda: SyncWeights(MAP, history=number),
        "BoundStaleness(max_versions=": lambda: BoundStaleness(sync, number),
        "StepsAhead(": lambda: StepsAhead(number),
    }.items():
        with pytest.raises(ConfigError) as refused:
            make()
        assert "is a whole number of at least" in refused.value.what
        assert refused.value.where.removesuffix(")") == f"{where}{number!r}"
    assert SyncWeights(MAP, history=0).receipts.maxlen == 0
    assert StepsAhead(np.int64(3)).n == 3
    with pytest.raises(ConfigError, match=r"at least 1, got 0\n  where  RecordSchedule\(every=0\)"):
        RecordSchedule(sync, tmp_path / "schedule.bin", every=0)


@pytest.mark.parametrize("seconds", [-1, 0, math.nan, "2", True])
def test_a_timeout_that_cannot_be_is_refused_where_it_is_given(seconds: Any) -> None:
    for where, make in {
        "BoardScheme(start_timeout_s=": lambda: BoardScheme(start_timeout_s=seconds),
        "BoardScheme(silent_timeout_s=": lambda: BoardScheme(silent_timeout_s=seconds),
        "WatchWorkers(silent_timeout_s=": lambda: WatchWorkers(seconds),
        "VerifySync(timeout_s=": lambda: VerifySync(SyncWeights(MAP), timeout_s=seconds),
    }.items():
        with pytest.raises(ConfigError, match="a number of seconds above zero") as refused:
            make()
        assert refused.value.where == f"{where}{seconds!r})"
    BoardScheme(start_timeout_s=None, silent_timeout_s=None)
    with pytest.raises(ConfigError, match="VerifySync"):
        VerifySync(SyncWeights(MAP), timeout_s=None)  # type: ignore[arg-type]
