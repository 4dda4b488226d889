"""Frames that name no version: their age is unknown, is logged as such, and is not guessed."""

from __future__ import annotations

import copy

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict
from torchrl.data import LazyTensorStorage, OfflineToOnlineReplayBuffer, ReplayBuffer
from torchrl.objectives import SoftUpdate
from torchrl.trainers.algorithms import OfflineToOnlineTrainer

from rlsync import BoundStaleness, LogPolicyLag, StalenessExceeded, SyncWeights
from rlsync.runs.recipes.hooks.measuring import StalenessHistogram
from rlsync.torchrl_plugin.hooks.ages import counts_by_age
from tests.tools.parts import (
    FRAMES_PER_BATCH,
    make_collector,
    make_continuous_env,
    make_continuous_policy,
    make_policy,
    make_ppo_trainer,
    make_sac_loss,
)
from tests.tools.running import ACTOR, in_three_lines

BATCH = 10


def recorded(stamp: int | None) -> ReplayBuffer:
    """Frames that somebody recorded, without a version or with a stamp that names none."""
    collector = make_collector(make_continuous_policy(), env=make_continuous_env)
    frames = next(iter(collector)).exclude("collector", "policy_version", ("next", "policy_version"))
    collector.shutdown()
    if stamp is not None:
        frames["policy_version"] = torch.full(frames.shape, stamp)
    buffer = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=BATCH)
    buffer.extend(frames)
    return buffer


def mixing(stamp: int | None, batches: int = 6) -> tuple[OfflineToOnlineTrainer, SyncWeights]:
    """TorchRL's trainer that mixes recorded frames with collected ones, half of each at first."""
    actor = make_continuous_policy()
    collector = make_collector(copy.deepcopy(actor), env=make_continuous_env)
    loss = make_sac_loss(actor)
    trainer = OfflineToOnlineTrainer(
        collector=collector,
        total_frames=batches * FRAMES_PER_BATCH,
        frame_skip=1,
        optim_steps_per_batch=2,
        loss_module=loss,
        optimizer=torch.optim.Adam(loss.parameters()),
        replay_buffer=OfflineToOnlineReplayBuffer(recorded(stamp), online_capacity=1000, batch_size=BATCH),
        target_net_updater=SoftUpdate(loss, eps=0.99),
        progress_bar=False,
        enable_logging=False,
        auto_log_optim_steps=False,
    )
    sync = SyncWeights(ACTOR)
    sync.register(trainer)
    return trainer, sync


def logged(trainer: OfflineToOnlineTrainer, name: str) -> list[float]:
    return [float(value) for value in trainer._log_dict[name]]


@pytest.mark.seconds
def test_frames_that_lost_their_stamps_in_the_mix_are_logged_as_of_unknown_age() -> None:
    trainer, sync = mixing(None)
    LogPolicyLag(sync).register(trainer)
    histogram = StalenessHistogram(sync)
    histogram.register(trainer)
    trainer.train()
    assert logged(trainer, "policy_lag/consumed_frames") == [2 * BATCH] * 6
    assert logged(trainer, "policy_lag/share_of_unknown_age") == [1.0] * 6
    assert "policy_lag/staleness_versions_max" not in trainer._log_dict
    assert histogram.counts == {}


def test_recorded_frames_with_stamp_minus_one_are_unknown_and_the_others_keep_their_ages() -> None:
    trainer, sync = mixing(-1)
    LogPolicyLag(sync).register(trainer)
    seen = []
    trainer.register_op("process_optim_batch", lambda batch: seen.append(batch["policy_version"]) or batch)
    trainer.train()
    unknown = logged(trainer, "policy_lag/frames_of_unknown_age")
    assert unknown == [sum(int((s == -1).sum()) for s in seen[i : i + 2]) for i in range(0, 12, 2)]
    assert unknown[0] == BATCH
    assert 0 < unknown[-1] < BATCH  # TorchRL mixes fewer and fewer recorded frames in
    oldest = logged(trainer, "policy_lag/staleness_versions_max")
    assert oldest[0] == 0.0
    assert 1.0 <= max(oldest) < sync.version


def test_frames_of_a_version_that_the_ledger_forgot_are_of_unknown_age_in_optimizer_steps_only() -> None:
    actor = make_policy()
    trainer = make_ppo_trainer(make_collector(copy.deepcopy(actor)), actor)
    sync = SyncWeights(ACTOR, trainer=trainer)
    lag = LogPolicyLag(sync)
    lag.register(trainer)
    sync.publish()
    sync.ledger.load_state_dict({"version": 6, "generation": 1, "published": []})
    sync.publish()
    for stamps, versions in (([7, 6, 4, 4], 3), ([7, 7, 7, 7], 1)):
        lag._consume(TensorDict({"policy_version": torch.tensor(stamps)}, [4]))
        found = lag._report()
        unknown = sum(stamp != 7 for stamp in stamps)
        assert found["policy_lag/frames_of_unknown_age"] == unknown
        assert found["policy_lag/share_of_unknown_age"] == unknown / 4
        assert found["policy_lag/consumed_versions"] == versions
        assert found["policy_lag/staleness_versions_max"] == 7 - min(stamps)
        assert found["policy_lag/staleness_optim_steps_max"] == 0
    trainer.collector.shutdown()


@pytest.mark.parametrize("stamp", [None, -1], ids=["no stamp", "stamp -1"])
def test_a_bound_raises_for_a_frame_of_unknown_age_unless_told_otherwise(stamp: int | None) -> None:
    trainer, sync = mixing(stamp)
    BoundStaleness(sync, 100, "drop").register(trainer)
    with pytest.raises(StalenessExceeded, match="of 10 frames do not say which version made them") as raised:
        trainer.train()
    assert in_three_lines(raised.value)
    assert "unknown='keep'" in raised.value.cure


@pytest.mark.seconds
def test_a_bound_may_keep_frames_of_unknown_age_and_bounds_the_others() -> None:
    trainer, sync = mixing(-1)
    BoundStaleness(sync, 1, "drop", unknown="keep").register(trainer)
    LogPolicyLag(sync).register(trainer)
    trainer.train()
    assert max(logged(trainer, "policy_lag/staleness_versions_max")) <= 1.0
    assert logged(trainer, "policy_lag/frames_of_unknown_age")[0] == BATCH
    assert logged(trainer, "staleness/dropped_frames")[-1] > 0


@pytest.mark.seconds
def test_a_bound_may_drop_frames_of_unknown_age() -> None:
    trainer, sync = mixing(-1)
    BoundStaleness(sync, 100, "drop", unknown="drop").register(trainer)
    LogPolicyLag(sync).register(trainer)
    trainer.train()
    assert set(logged(trainer, "policy_lag/frames_of_unknown_age")) == {0.0}
    assert logged(trainer, "staleness/dropped_frames")[0] == BATCH


@pytest.mark.seconds
def test_a_bound_that_waits_puts_publishes_off_for_known_frames_only() -> None:
    trainer, sync = mixing(-1)
    hook = BoundStaleness(sync, 100, "wait", unknown="keep")
    hook.register(trainer)
    trainer.train()
    assert hook.put_off_publishes == 0
    assert len(sync.receipts) == 7


def test_a_stamp_that_this_learner_has_not_published_is_of_unknown_age() -> None:
    actor = make_policy()
    trainer = make_ppo_trainer(make_collector(copy.deepcopy(actor)), actor)
    sync = SyncWeights(ACTOR, trainer=trainer)
    sync.publish()
    sync.publish()
    age = sync.staleness(TensorDict({"policy_version": torch.tensor([[2, 1], [9, -1]])}, [2, 2]))
    assert age.versions.tolist() == [0, 1, -1, -1]
    assert age.optim_steps.tolist() == [0, 0, -1, -1]
    assert sync.staleness(TensorDict({"reward": torch.zeros(2, 3)}, [2, 3])).versions.tolist() == [-1] * 6
    mixed = LazyStackedTensorDict(TensorDict({"policy_version": torch.tensor(2)}), TensorDict({}))
    assert sync.staleness(mixed).versions.tolist() == [-1, -1]
    stamps = torch.tensor([2, 1, 2, 9, -1])
    assert counts_by_age(stamps, sync.ledger, newest=2) == {0: 2, 1: 1}
    sync.publish()
    assert counts_by_age(stamps, sync.ledger, newest=2) == {0: 2, 1: 1}, "as old as they were when consumed"
    trainer.collector.shutdown()
