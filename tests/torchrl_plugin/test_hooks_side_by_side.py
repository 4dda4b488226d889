"""Hooks of one trainer side by side: other people's stay, and several collectors are fed."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.checkpoint import Checkpoint
from torchrl.collectors import BaseCollector, MultiSyncCollector
from torchrl.trainers import Trainer
from torchrl.trainers import UpdateWeights as StockUpdateWeights
from torchrl.trainers.algorithms import GRPOTrainer

from rlsync import (
    ConfigError,
    Every,
    LogPolicyLag,
    LogReceipts,
    SyncWeights,
    UpdateWeights,
    VerifySync,
    WatchWorkers,
    WeightBoard,
)
from rlsync.runs.cli.explain import plan_of
from rlsync.torchrl_plugin.compat.trainers import stock_update_weights
from rlsync.torchrl_plugin.examine.sync import sync_of
from tests.tools.parts import (
    FRAMES_PER_BATCH,
    Sender,
    make_collector,
    make_dqn_trainer,
    make_env_with_module,
    make_policy,
    make_ppo_loss,
    make_ppo_trainer,
    make_small_canary,
    make_workers,
)
from tests.tools.running import ACTOR, acted, in_three_lines, on_a_board, running, values

pytestmark = pytest.mark.usefixtures("fork_workers")


def make_trainer(batches: int = 3) -> Trainer:
    actor = make_policy()
    frames = batches * FRAMES_PER_BATCH
    return make_ppo_trainer(make_collector(copy.deepcopy(actor)), actor, total_frames=frames)


class CountingUpdate(StockUpdateWeights):
    """TorchRL's hook, which counts what it sends."""

    sent = 0

    def __call__(self) -> None:
        before = self.counter
        super().__call__()
        self.sent += self.counter > before


# ------------------------------------------------------------------------------ other people's hooks


@pytest.mark.parametrize("ours", [False, True])
def test_the_sender_of_a_grpo_trainer_is_called_as_often_as_without_our_hook(ours: bool) -> None:
    sender, actor = Sender(), make_policy()
    collector = make_collector(copy.deepcopy(actor))
    loss = make_ppo_loss(actor)
    trainer = GRPOTrainer(
        collector=collector,
        total_frames=4 * FRAMES_PER_BATCH,
        optim_steps_per_batch=1,
        loss_module=loss,
        optimizer=torch.optim.Adam(loss.parameters()),
        weight_sync_sender=sender,
        progress_bar=False,
        log_rewards=False,
        log_kl=False,
    )
    if ours:
        sync = SyncWeights(ACTOR)
        sync.register(trainer)
        assert "note       keeps TorchRL's UpdateWeights(sender=Sender) at post_steps" in sync.plan.summary()
    trainer.train()
    assert sender.sent == 4


def test_a_users_hook_that_feeds_another_collector_goes_on_and_the_trainers_own_is_replaced_by_name(
    caplog: pytest.LogCaptureFixture,
) -> None:
    trainer = make_trainer()
    evaluates = make_collector(make_policy())
    actor = trainer.loss_module.actor_network
    theirs = CountingUpdate(evaluates, policy_weights_getter=lambda: TensorDict.from_module(actor))
    theirs.register(trainer, "eval_weights")
    sync = SyncWeights(ACTOR)
    with caplog.at_level(logging.INFO, "rlsync"):
        sync.register(trainer)
    told = ("replaces TorchRL's UpdateWeights(Collector) at post_steps",)
    told += ("keeps TorchRL's UpdateWeights(Collector) at post_steps",)
    assert sync.beside == told
    assert [f"note       {line}" in sync.plan.summary() for line in told] == [True, True]
    assert [f"SyncWeights {line}" in caplog.text for line in told] == [True, True]
    trainer.train()
    assert theirs.sent == 3
    learned, plays = actor.state_dict(), evaluates.policy.state_dict()
    assert all(torch.equal(plays[name], learned[name]) for name in learned)
    assert trainer._modules["eval_weights"] is theirs
    evaluates.shutdown()


@pytest.mark.parametrize("later", [False, True], ids=["there before", "registered later"])
@pytest.mark.parametrize("stage", ["post_steps", "post_epoch", "setup"])
def test_a_hook_that_feeds_the_same_collector_is_replaced_at_whatever_stage_it_is(
    stage: str, later: bool
) -> None:
    trainer = make_trainer()
    trainer.checkpoint = Checkpoint()
    theirs = CountingUpdate(trainer.collector)
    sync = SyncWeights(ACTOR)
    if later:
        sync.register(trainer)
    trainer.register_op(stage, theirs)
    trainer.register_module("their_weights", theirs)
    told = f"replaces TorchRL's UpdateWeights(Collector) at {stage}"
    if not later:
        sync.register(trainer)
        assert told in sync.beside
    trainer.train()
    assert told in sync.beside
    assert len(set(sync.beside)) == len(sync.beside)
    assert (theirs.sent, sync.version) == (0, 4), "the first weights, and one version a batch"
    assert "trainer_module.their_weights" not in trainer.checkpoint


def test_a_replaced_map_is_named_with_its_destinations() -> None:
    policy = make_policy()
    with on_a_board(policy) as collector:
        trainer = make_ppo_trainer(collector, policy, weight_update_map=ACTOR)
        sync = SyncWeights(ACTOR)
        sync.register(trainer)
    (told,) = sync.beside
    assert told == "replaces TorchRL's UpdateWeights(policy <- loss_module.actor_network) at post_steps"


@pytest.mark.parametrize(
    "register",
    [
        lambda trainer: SyncWeights(ACTOR).register(trainer),
        lambda trainer: UpdateWeights(trainer.collector, 1, weight_update_map=ACTOR, trainer=trainer),
    ],
    ids=["SyncWeights", "UpdateWeights"],
)
def test_a_hook_that_would_end_what_a_destination_gets_is_refused(register: Callable) -> None:
    board, inner = WeightBoard(), "env.transform[0].module"
    schemes = {"policy": board.scheme(), inner: board.scheme()}
    policy = make_policy()
    collector = make_workers(MultiSyncCollector, policy, schemes=schemes, env=make_env_with_module)
    with running(collector):
        trainer = make_ppo_trainer(collector, policy, weight_update_map=ACTOR | {inner: "inner"})
        trainer.inner = make_env_with_module().transform[0].module
        stock = stock_update_weights(trainer)
        with pytest.raises(ConfigError, match="would get no weights any more") as refusal:
            register(trainer)
        assert in_three_lines(refusal.value)
        assert refusal.value.what.startswith(repr(inner))
        assert stock_update_weights(trainer) == stock
        SyncWeights({inner: "inner"} | ACTOR).register(trainer)
    board.close()


# ---------------------------------------------------------------------------------- several collectors


class Fed:
    """A trainer with a hook for its own collector, and one for another that the hooks of the trainer read."""

    def __init__(self, evaluates: BaseCollector, batches: int = 4, **options: Any) -> None:
        self.trainer = trainer = make_dqn_trainer(
            make_collector(make_small_canary()), total_frames=batches * FRAMES_PER_BATCH
        )
        self.evaluates = evaluates
        trainer.acting, trainer.judging = make_small_canary(), make_small_canary()
        self.own = SyncWeights({"policy": "acting"}, max_unchanged_publishes=None)
        self.other = SyncWeights(
            {"policy": "judging"}, Every(2), collector=evaluates, max_unchanged_publishes=None, **options
        )
        self.played: list[TensorDict] = []
        self.consumed: list[TensorDict] = []
        self.batches = iter(evaluates)
        trainer.loss_module.make_value_estimator()  # else TorchRL makes it at the first batch, after a resume
        for stage in ("setup", "post_steps"):
            trainer.register_op(stage, self.fill)
        trainer.register_op("batch_process", self.see)
        self.own.register(trainer)
        self.other.register(trainer)

    def fill(self) -> None:
        self.trainer.acting.fill(self.own.version + 1)
        self.trainer.judging.fill(100 + self.other.version + 1)

    def see(self, batch: TensorDict) -> TensorDict:
        self.consumed.append(batch.clone())
        self.played.append(next(self.batches).clone())
        return batch


@pytest.mark.one_case
@pytest.mark.parametrize("kind", ["in process", "on a board"])
def test_each_collector_has_its_own_map_trigger_and_versions(kind: str) -> None:
    with on_a_board(make_small_canary()) as board:
        fed = Fed(board if kind == "on a board" else make_collector(make_small_canary()))
        fed.trainer.train()
    first = fed.other.receipts[0].version  # a board has a version before: that of its collector's constructor
    assert [receipt.batches for receipt in fed.own.receipts] == [0, 1, 2, 3, 4]
    assert [receipt.batches for receipt in fed.other.receipts] == [0, 2, 4]
    assert [values(batch, "policy_version") for batch in fed.consumed] == [{1}, {2}, {3}, {4}]
    assert [acted(batch) for batch in fed.consumed] == [{1}, {2}, {3}, {4}]
    played = [first, first, first + 1, first + 1]
    assert [values(batch, "policy_version") for batch in fed.played] == [{version} for version in played]
    assert [acted(batch) for batch in fed.played] == [{100 + version} for version in played]
    fed.evaluates.shutdown()


def test_a_second_hook_for_one_collector_is_refused_with_a_cure_that_can_be_followed() -> None:
    trainer = make_trainer()
    SyncWeights(ACTOR).register(trainer)
    with pytest.raises(ConfigError, match="already has a hook that publishes to this Collector") as refusal:
        SyncWeights(ACTOR).register(trainer)
    assert in_three_lines(refusal.value)
    assert "SyncWeights(..., collector=...)" in refusal.value.cure
    other = make_collector(make_policy())
    SyncWeights(ACTOR, collector=other).register(trainer)
    trainer.train()
    other.shutdown()


def test_a_drop_in_for_another_collector_stands_beside_a_sync_weights() -> None:
    trainer = make_trainer()
    other = make_collector(make_policy())
    sync = SyncWeights(ACTOR)
    sync.register(trainer)
    drop_in = UpdateWeights(other, 1, weight_update_map=ACTOR, trainer=trainer)
    drop_in.register(trainer)
    trainer.train()
    assert [receipt.version for receipt in sync.receipts] == [1, 2, 3, 4]
    assert [receipt.version for receipt in drop_in.receipts] == [1, 2, 3]
    other.shutdown()


def test_the_hooks_of_each_collector_log_apart_and_watch_their_own_workers() -> None:
    with on_a_board(make_small_canary()) as board:
        fed = Fed(board, finite=True)
        trainer = fed.trainer
        LogPolicyLag(fed.own).register(trainer)
        LogReceipts(fed.own).register(trainer)
        LogReceipts(fed.other, prefix="eval_sync").register(trainer)
        VerifySync(fed.own, Every(1)).register(trainer)
        verify = VerifySync(fed.other, Every(1), prefix="verify_eval")
        verify.register(trainer)
        WatchWorkers(collector=board).register(trainer)
        with pytest.raises(ConfigError, match="has no workers on a board"):
            WatchWorkers().register(trainer)
        trainer.train()
        logged = trainer._log_dict
        assert [int(v) for v in logged["sync/version"]] == [2, 3, 4, 5]
        assert [int(v) for v in logged["eval_sync/version"]] == [2, 3, 3, 4]
        assert int(logged["verify_sync/checks"][-1]) > 0
        assert verify.checks > 0
        assert verify.deviations == []
        assert set(trainer._modules) >= {"log_receipts", "log_receipts_2", "verify_sync", "verify_sync_2"}


def test_explain_and_doctor_look_at_the_trainers_own_collector() -> None:
    trainer = make_trainer(batches=7)
    other = make_collector(make_policy())
    SyncWeights({"policy": "loss_module.actor_network"}, Every(7), collector=other).register(trainer)
    assert sync_of(trainer).description == "TorchRL's UpdateWeights"
    SyncWeights(ACTOR, Every(2)).register(trainer)
    assert plan_of(trainer).trigger == "every 2 batches"
    assert sync_of(trainer).description == "rlsync.SyncWeights, every 2 batches"
    other.shutdown()
    trainer.collector.shutdown()


# ------------------------------------------------------------------------------------------ checkpoints

FORMATS = ["legacy", "Checkpoint"]


def saved(trainer: Trainer, file: Path, form: str) -> Path:
    trainer.checkpoint = Checkpoint() if form == "Checkpoint" else None
    trainer.save_trainer_file = file
    trainer.register_op("shutdown", lambda: trainer.save_trainer(force_save=True))
    trainer.train()
    return file


def with_form(trainer: Trainer, form: str) -> Trainer:
    trainer.checkpoint = Checkpoint() if form == "Checkpoint" else None
    trainer.total_frames *= 2
    return trainer


@pytest.mark.one_case
@pytest.mark.parametrize("form", FORMATS)
def test_each_hook_goes_on_from_its_own_state(tmp_path: Path, form: str) -> None:
    fed = Fed(make_collector(make_small_canary()))
    file = saved(fed.trainer, tmp_path / "trainer", form)
    again = Fed(make_collector(make_small_canary()))
    with_form(again.trainer, form).load_from_file(file)
    again.trainer.train()
    for before, after in ((fed.own, again.own), (fed.other, again.other)):
        assert after.receipts[0].reason == "resume"
        assert after.receipts[0].version == before.version + 1
        assert after.ledger.generation == 2
    assert [r.batches for r in again.own.receipts] == [4, 5, 6, 7, 8]
    assert [r.batches for r in again.other.receipts] == [4, 6, 8]
    for fed_ in (fed, again):
        fed_.evaluates.shutdown()


@pytest.mark.one_case
@pytest.mark.parametrize("form", FORMATS)
def test_a_hook_that_a_checkpoint_lacks_begins_to_count(tmp_path: Path, form: str) -> None:
    first = make_trainer()
    SyncWeights(ACTOR).register(first)
    file = saved(first, tmp_path / "trainer", form)
    again, other = make_trainer(), make_collector(make_policy())
    own, added = SyncWeights(ACTOR), SyncWeights(ACTOR, collector=other)
    own.register(again)
    added.register(again)
    with_form(again, form).load_from_file(file)
    again.train()
    assert own.receipts[0].batches == 3
    assert (added.receipts[0].reason, added.receipts[0].batches) == ("resume", 0)
    assert [receipt.version for receipt in added.receipts] == [1, 2, 3, 4]
    other.shutdown()


@pytest.mark.one_case
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("kept", [True, False], ids=["its state in the checkpoint", "by register_op"])
def test_a_drop_in_goes_on_from_a_checkpoint_of_torchrls_own_hook(
    tmp_path: Path, form: str, kept: bool
) -> None:
    first = make_trainer()
    stock = StockUpdateWeights(first.collector, 2)
    if kept:
        stock.register(first)
    else:
        first.register_op("post_steps", stock)
    file = saved(first, tmp_path / "trainer", form)
    again = make_trainer(batches=6)
    drop_in = UpdateWeights(again.collector, 2, weight_update_map=ACTOR, trainer=again)
    drop_in.register(again)
    again.checkpoint = Checkpoint() if form == "Checkpoint" else None
    again.load_from_file(file)
    assert drop_in.counter == (3 if kept else 0)
    again.train()
    published = [(receipt.reason, receipt.batches) for receipt in drop_in.receipts]
    assert (
        published == [("resume", 3), ("trigger", 4), ("trigger", 6)]
        if kept
        else published[0] == ("resume", 0)
    )


@pytest.mark.one_case
@pytest.mark.parametrize("form", FORMATS)
def test_torchrls_own_hook_goes_on_from_a_checkpoint_of_the_drop_in(tmp_path: Path, form: str) -> None:
    first = make_trainer()
    UpdateWeights(first.collector, 2, weight_update_map=ACTOR, trainer=first).register(first)
    file = saved(first, tmp_path / "trainer", form)
    again = make_trainer()
    stock = CountingUpdate(again.collector, 2)
    stock.register(again)
    with_form(again, form).load_from_file(file)
    assert stock.counter == 3
    again.train()
    assert stock.counter == 6


@pytest.mark.parametrize("form", FORMATS)
def test_a_module_of_somebody_else_that_a_checkpoint_lacks_is_still_an_error(
    tmp_path: Path, form: str
) -> None:
    first = make_trainer()
    SyncWeights(ACTOR).register(first)
    file = saved(first, tmp_path / "trainer", form)
    again = make_trainer()
    SyncWeights(ACTOR).register(again)
    again.register_module("theirs", StockUpdateWeights(again.collector))
    with pytest.raises((KeyError, RuntimeError), match="theirs"):
        with_form(again, form).load_from_file(file)
    assert "theirs" in again._modules
    again.collector.shutdown()
