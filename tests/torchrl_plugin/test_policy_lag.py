"""Staleness is what the stamps and the publishes say it is, in every mode of collection."""

from __future__ import annotations

import copy

import pytest
import torch
from torchrl.collectors import Collector, MultiSyncCollector
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from rlsync import BoardScheme, Every, LogPolicyLag, SyncWeights
from tests.tools.parts import (
    FRAMES_PER_BATCH,
    make_collector,
    make_continuous_env,
    make_continuous_policy,
    make_counting_env,
    make_free_sac_trainer,
    make_policy,
    make_ppo_trainer,
    make_sac_trainer,
    make_workers,
)

MAP = {"policy": "loss_module.actor_network"}


def logged(trainer, name: str) -> list[float]:
    return [float(value) for value in trainer._log_dict[f"policy_lag/{name}"]]


def watched(trainer, when) -> SyncWeights:
    sync = SyncWeights(MAP, when=when)
    sync.register(trainer)
    LogPolicyLag(sync).register(trainer)
    return sync


def test_on_policy_frames_are_fresh_when_every_batch_is_published(fork_workers):
    actor = make_policy()
    collector = make_workers(MultiSyncCollector, actor, schemes={"policy": BoardScheme()})
    trainer = make_ppo_trainer(collector, actor, total_frames=4 * FRAMES_PER_BATCH, weight_update_map=MAP)
    watched(trainer, Every(1, "batches"))
    trainer.train()
    assert logged(trainer, "staleness_versions_max") == [0.0] * len(logged(trainer, "staleness_versions_max"))
    assert logged(trainer, "staleness_versions_max")
    assert max(logged(trainer, "staleness_optim_steps_max")) == 1.0  # the second step of a batch


def test_publishes_in_the_middle_of_a_batch_age_its_frames_step_by_step():
    actor = make_policy()
    trainer = make_ppo_trainer(make_collector(copy.deepcopy(actor)), actor, total_frames=FRAMES_PER_BATCH)
    trainer.optim_steps_per_batch = None
    trainer.num_epochs = 3
    seen = []
    sync = watched(trainer, Every(1, "optim_steps"))
    trainer.register_op("process_optim_batch", lambda b: seen.append(sync.staleness(b)) or b)
    trainer.train()
    ages = [int(age.versions.unique()) for age in seen]
    assert ages == list(range(len(ages)))
    assert ages == [int(age.optim_steps.unique()) for age in seen]
    assert logged(trainer, "staleness_versions_max") == [float(ages[-1])]
    assert logged(trainer, "staleness_versions_mean") == [sum(ages) / len(ages)]
    assert logged(trainer, "consumed_frames") == [float(sum(len(age.versions) for age in seen))]


def test_frames_of_a_replay_buffer_age_with_every_publish(fork_workers):
    actor = make_continuous_policy()
    collector = make_workers(
        MultiSyncCollector, actor, schemes={"policy": BoardScheme()}, env=make_continuous_env
    )
    trainer = make_sac_trainer(collector, actor, total_frames=6 * FRAMES_PER_BATCH)
    sync = watched(trainer, Every(1, "batches"))
    trainer.train()
    oldest = logged(trainer, "staleness_versions_max")
    assert oldest[0] == 0.0
    assert 1.0 < oldest[-1] <= sync.version - 2  # version 2 made the oldest frames
    p95, mean = logged(trainer, "staleness_versions_p95"), logged(trainer, "staleness_versions_mean")
    assert all(m <= p <= o for m, p, o in zip(mean, p95, oldest, strict=True))


@pytest.mark.seconds
def test_asynchronous_collection_reports_from_sampled_batches():
    actor = make_continuous_policy()
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(5000), batch_size=10)
    collector = Collector(
        make_continuous_env,
        copy.deepcopy(actor),
        frames_per_batch=FRAMES_PER_BATCH,
        total_frames=-1,
        replay_buffer=buffer,
        track_policy_version=True,
    )
    # Many: on a quiet machine its thread makes hundreds of frames before the first batch is sampled.
    trainer = make_free_sac_trainer(collector, actor, buffer, total_frames=1500)
    watched(trainer, Every(1, "batches"))
    trainer.train()
    assert logged(trainer, "consumed_frames")
    assert max(logged(trainer, "staleness_versions_max")) > 0
    assert min(logged(trainer, "lag_versions")) >= 0


def test_ages_survive_a_resume(tmp_path):
    def build():
        actor = make_policy()
        trainer = make_ppo_trainer(make_collector(copy.deepcopy(actor)), actor, total_frames=30)
        sync = SyncWeights(MAP, when=Every(1, "optim_steps"))
        sync.register(trainer)
        return trainer, sync

    trainer, sync = build()
    trainer.train()
    again, resumed = build()
    resumed.load_state_dict(sync.state_dict())
    stamps = make_counting_env().fake_tensordict().expand(3).clone()
    stamps["policy_version"] = torch.tensor([1, 2, 3])
    assert torch.equal(resumed.staleness(stamps).optim_steps, sync.staleness(stamps).optim_steps)
    again.collector.shutdown()
