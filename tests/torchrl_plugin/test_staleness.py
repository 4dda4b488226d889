"""No frame beyond the bound is consumed, whatever is done about it, and nothing waits for ever."""

from __future__ import annotations

import copy

import pytest
import torch
from torchrl.collectors import MultiAsyncCollector, MultiSyncCollector

from rlsync import (
    BoardScheme,
    BoundStaleness,
    ConfigError,
    Every,
    LogPolicyLag,
    StalenessExceeded,
    SyncWeights,
)
from tests.tools.parts import (
    FRAMES_PER_BATCH,
    kill,
    make_a2c_trainer,
    make_collector,
    make_continuous_env,
    make_continuous_policy,
    make_policy,
    make_ppo_trainer,
    make_sac_trainer,
    make_workers,
    stopped,
    wait_until,
)

MAP = {"policy": "loss_module.actor_network"}


def ages(trainer) -> list[float]:
    return [float(v) for v in trainer._log_dict["policy_lag/staleness_versions_max"]]


def logged(trainer, name: str) -> float:
    return float(trainer._log_dict[f"staleness/{name}"][-1])


def bound(trainer, when, max_versions: int, action: str) -> tuple[SyncWeights, BoundStaleness]:
    sync = SyncWeights(MAP, when=when)
    sync.register(trainer)
    hook = BoundStaleness(sync, max_versions, action)
    hook.register(trainer)
    LogPolicyLag(sync).register(trainer)
    return sync, hook


def replay_trainer(batches: int):
    actor = make_continuous_policy()
    collector = make_workers(
        MultiSyncCollector, actor, schemes={"policy": BoardScheme()}, env=make_continuous_env
    )
    return make_sac_trainer(collector, actor, total_frames=batches * FRAMES_PER_BATCH)


def async_trainer(batches: int):
    actor = make_policy()
    collector = make_workers(MultiAsyncCollector, actor, schemes={"policy": BoardScheme()})
    return make_a2c_trainer(collector, actor, total_frames=batches * FRAMES_PER_BATCH, weight_update_map=MAP)


@pytest.mark.parametrize("max_versions", [0, 3])
@pytest.mark.one_case
def test_dropping_keeps_replayed_frames_within_the_bound_and_counts(fork_workers, max_versions):
    trainer = replay_trainer(batches=8)
    _, hook = bound(trainer, Every(1, "batches"), max_versions, "drop")
    trainer.train()
    assert max(ages(trainer)) == max_versions
    assert hook.dropped_frames == logged(trainer, "dropped_frames") > 0


@pytest.mark.thorough
def test_a_bound_that_is_never_reached_drops_nothing(fork_workers):
    trainer = replay_trainer(batches=8)
    _, hook = bound(trainer, Every(1, "batches"), 100, "drop")
    trainer.train()
    assert max(ages(trainer)) > 1
    assert hook.dropped_frames == 0


def test_raising_names_the_age_and_the_bound_in_three_lines(fork_workers):
    trainer = replay_trainer(batches=15)
    bound(trainer, Every(1, "batches"), 2, "raise")
    with pytest.raises(StalenessExceeded, match="up to 3 versions old; the bound is 2") as refused:
        trainer.train()
    assert len(str(refused.value).splitlines()) == 3
    trainer.collector.shutdown()


def test_waiting_cannot_make_replayed_frames_younger_and_says_so(fork_workers):
    trainer = replay_trainer(batches=15)
    bound(trainer, Every(1, "batches"), 1, "wait")
    with pytest.raises(StalenessExceeded, match="use action='drop'"):
        trainer.train()
    trainer.collector.shutdown()


def train_and_list_losses(when, max_versions: int | None) -> tuple[list[float], list[int]]:
    torch.manual_seed(0)
    actor = make_policy()
    trainer = make_ppo_trainer(make_collector(copy.deepcopy(actor)), actor, total_frames=6 * FRAMES_PER_BATCH)
    trainer.optim_steps_per_batch = None
    trainer.num_epochs = 2
    losses: list[float] = []
    trainer.register_op(
        "post_optim_complete_log", lambda steps, mean: losses.append(float(mean["loss_objective"]))
    )
    if max_versions is None:
        sync = SyncWeights(MAP, when=when)
        sync.register(trainer)
    else:
        sync, _ = bound(trainer, when, max_versions, "wait")
    trainer.collector.set_seed(0)
    torch.manual_seed(0)
    trainer.train()
    return losses, [r.batches for r in sync.receipts if r.reason == "trigger"]


@pytest.mark.thorough
@pytest.mark.seconds
def test_bound_0_makes_the_updates_of_the_synchronous_run():
    synchronous = train_and_list_losses(Every(1, "batches"), None)
    eager = train_and_list_losses(Every(1, "optim_steps"), None)
    held = train_and_list_losses(Every(1, "optim_steps"), 0)
    assert held == synchronous
    assert eager[1] != synchronous[1], "without the bound it publishes in the middle of batches"


@pytest.mark.parametrize("max_versions", [1, 2])
@pytest.mark.one_case
def test_waiting_holds_the_bound_with_asynchronous_workers_and_goes_on_publishing(fork_workers, max_versions):
    trainer = async_trainer(batches=15)
    sync, _ = bound(trainer, Every(1, "optim_steps"), max_versions, "wait")
    trainer.train()
    assert max(ages(trainer)) <= max_versions
    assert sync.version > 5
    assert logged(trainer, "put_off_publishes") > 0


def test_a_dead_worker_does_not_put_publishes_off(fork_workers):
    trainer = async_trainer(batches=1000)
    sync, hook = bound(trainer, Every(1, "batches"), 1, "wait")
    batches = iter(trainer.collector)
    for _ in range(4):
        next(batches)
    dead, behind = (process.pid for process in trainer.collector.procs)
    # The one is killed and would for ever act with an old version; the other will go on.
    kill(dead)
    with stopped(behind):
        for _ in range(5):
            sync.publish()
        assert wait_until(lambda: len(sync.acting_versions()) == 1, 60)
        assert not hook._may_publish(), "the living one has to catch up first"
    kill(behind)
    assert wait_until(hook._may_publish, 60), "nobody is left to wait for"
    trainer.collector.shutdown()


def test_bound_0_cannot_wait_for_workers_that_collect_in_the_background(fork_workers):
    trainer = async_trainer(batches=2)
    sync = SyncWeights(MAP, trainer=trainer)
    with pytest.raises(ConfigError, match="a bound of at least 1"):
        BoundStaleness(sync, 0, "wait").register(trainer)
    BoundStaleness(sync, 0, "drop").register(trainer)
    trainer.collector.shutdown()


def test_whole_rows_leave_a_batch_of_several_dimensions():
    from tensordict import TensorDict

    actor = make_policy()
    trainer = make_ppo_trainer(make_collector(copy.deepcopy(actor)), actor)
    sync = SyncWeights(MAP, trainer=trainer)
    hook = BoundStaleness(sync, 1, "drop")
    for _ in range(5):
        sync.publish()
    stamps = torch.tensor([[5, 5, 5], [4, 5, 5], [3, 5, 5]])
    batch = TensorDict({"policy_version": stamps}, batch_size=[3, 3])
    assert hook._consume(batch)["policy_version"].tolist() == [[5, 5, 5], [4, 5, 5]]
    assert hook.dropped_frames == 3
    with pytest.raises(StopIteration):
        hook._consume(batch[2:])
    trainer.collector.shutdown()
