"""What TorchRL bounds by versions or by counts, in a trainer with a sync map on a board."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torchrl.data
from tensordict import TensorDictBase
from torchrl.collectors import MultiAsyncCollector, MultiSyncCollector
from torchrl.data import LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import StalenessAwareSampler
from torchrl.envs.transforms import PolicyAgeFilter
from torchrl.objectives import SoftUpdate
from torchrl.trainers import Trainer
from torchrl.trainers.algorithms import SACTrainer

from rlsync import BoardScheme, Every, SyncWeights
from tests.laws.test_canary import Census, Learner
from tests.tools.parts import (
    FRAMES_PER_BATCH,
    make_continuous_env,
    make_continuous_policy,
    make_sac_loss,
    make_small_canary,
    make_workers,
    wait_until,
)
from tests.tools.running import make_buffered_env, running

BATCHES = 8
BOUND = 2
IS_NEXT = hasattr(torchrl.data, "RateLimitedReplayBuffer")

pytestmark = pytest.mark.processes
forked = pytest.mark.usefixtures("fork_workers")


@contextmanager
def training(buffer: ReplayBuffer, **options: Any) -> Iterator[tuple[Trainer, SyncWeights]]:
    """A SACTrainer with a buffer, whose worker gets a version after each batch through a board."""
    actor = make_continuous_policy()
    schemes = {"policy": BoardScheme()}
    collector = make_workers(MultiSyncCollector, actor, schemes=schemes, workers=1, env=make_continuous_env)
    with running(collector):
        loss = make_sac_loss(actor)
        trainer = SACTrainer(
            collector=collector,
            total_frames=BATCHES * FRAMES_PER_BATCH,
            frame_skip=1,
            optim_steps_per_batch=2,
            loss_module=loss,
            optimizer=torch.optim.Adam(loss.parameters(), lr=1e-2),
            replay_buffer=buffer,
            target_net_updater=SoftUpdate(loss, eps=0.99),
            enable_logging=False,
            progress_bar=False,
            **options,
        )
        sync = SyncWeights({"policy": "loss_module.actor_network"}, when=Every(1, "batches"))
        sync.register(trainer)
        yield trainer, sync


def ages_of_draws(trainer: Trainer, sync: SyncWeights) -> list[int]:
    """The age of each frame that is consumed, filled while the trainer trains."""
    ages: list[int] = []

    def note(batch: TensorDictBase) -> TensorDictBase:
        ages.extend(sync.staleness(batch).versions.tolist())
        return batch

    trainer.register_op("process_optim_batch", note)
    return ages


@forked
def test_a_sampler_by_staleness_keeps_its_bound_if_it_gets_the_version_of_the_hook() -> None:
    sampler = StalenessAwareSampler(max_staleness=BOUND)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(1000), sampler=sampler, batch_size=10)
    with training(buffer) as (trainer, sync):
        trainer.register_op("pre_optim_steps", lambda: setattr(sampler, "consumer_version", sync.version))
        ages = ages_of_draws(trainer, sync)
        trainer.train()
    assert max(ages) == BOUND
    assert min(ages) == 0


@forked
def test_a_sampler_by_staleness_that_gets_no_version_lets_old_frames_pass() -> None:
    sampler = StalenessAwareSampler(max_staleness=BOUND)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(1000), sampler=sampler, batch_size=10)
    with training(buffer) as (trainer, sync):
        ages = ages_of_draws(trainer, sync)
        trainer.train()
    assert max(ages) > BOUND


@forked
def test_a_filter_by_age_may_ask_a_collector_on_a_board_for_its_version() -> None:
    policy = make_small_canary()
    with running(
        make_workers(MultiAsyncCollector, policy, schemes={"policy": BoardScheme()}, workers=1)
    ) as collector:
        buffer = ReplayBuffer(
            storage=LazyTensorStorage(1000),
            transform=PolicyAgeFilter(lambda: collector.policy_version, max_policy_lag=BOUND),
        )
        batches = iter(collector)
        buffer.extend(next(batches).reshape(-1))
        assert len(buffer) == FRAMES_PER_BATCH
        for _ in range(BOUND + 1):
            collector.update_policy_weights_()
        assert collector.policy_version == 1 + BOUND + 1
        # They have become too old since they came in.
        assert len(buffer.sample(10)) == 0


@pytest.mark.skipif(not IS_NEXT, reason="TorchRL has it from 0.15 on")
@pytest.mark.seconds
def test_workers_that_write_whole_trajectories_stamp_each_step_exactly() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(10_000), shared=True)
    policy = make_small_canary()
    collector = MultiAsyncCollector(
        [make_buffered_env] * 2,
        policy,
        frames_per_batch=4,  # less than an episode
        total_frames=-1,
        replay_buffer=buffer,
        replay_write_mode="trajectory",
        weight_sync_schemes={"policy": BoardScheme()},
    )
    with running(collector):
        learner = Learner(collector, policy=policy)
        with learner.publishing():
            collector.start()
            assert wait_until(lambda: len(buffer) > 1000, 60)
    census = Census()
    frames = buffer[:]
    census.take(frames)
    census.assert_clean()
    # Whole episodes, one after the other. They span versions, and each step says which.
    ends = frames["next", "done"].flatten().nonzero().flatten() + 1
    assert torch.equal(ends, torch.arange(10, len(frames) + 1, 10))
    episodes = frames["policy_version"].reshape(-1, 10)
    assert bool((episodes != episodes[:, :1]).any())


@pytest.mark.skipif(not IS_NEXT, reason="TorchRL has it from 0.15 on")
@forked
@pytest.mark.parametrize("samples_per_insert", [2.0, 1.0])
def test_a_rate_limit_refuses_an_update_too_many_and_no_other(samples_per_insert: float) -> None:
    buffer = torchrl.data.RateLimitedReplayBuffer(
        samples_per_insert=samples_per_insert, storage=LazyTensorStorage(1000), batch_size=10
    )
    with training(buffer) as (trainer, _):  # 2 updates with 10 frames each for 10 frames
        if samples_per_insert < 2:
            with pytest.raises(RuntimeError, match="sample-to-insert ratio does not"):
                trainer.train()
        else:
            trainer.train()
    assert buffer.stats()["samples_per_insert"] == samples_per_insert
