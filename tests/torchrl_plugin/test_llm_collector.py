"""TorchRL's LLMCollector: served as any collector in the learner's process, or refused."""

from __future__ import annotations

import pytest
from torchrl.collectors.llm import LLMCollector
from torchrl.envs import AsyncEnvPool, SerialEnv
from torchrl.trainers import Trainer

from rlsync import ConfigError, SyncWeights
from tests.tools.parts import make_counting_env, make_dqn_trainer, make_small_canary
from tests.tools.running import acted, in_three_lines, values


def with_canary(**options: object) -> tuple[Trainer, SyncWeights]:
    collector = LLMCollector(policy=make_small_canary(), track_policy_version=True, **options)
    trainer = make_dqn_trainer(collector)
    trainer.canary = make_small_canary()
    return trainer, SyncWeights({"policy": "canary"})


def make_two_envs() -> SerialEnv:
    return SerialEnv(2, make_counting_env)


WAYS = {
    "every step": {"env": make_counting_env, "dialog_turns_per_batch": 5},
    "whole trajectories": {"env": make_two_envs, "yield_completed_trajectories": True},
}


def test_every_frame_of_an_llm_collector_carries_the_version_that_acted() -> None:
    trainer, sync = with_canary(**WAYS["every step"])
    sync.register(trainer)
    batches = iter(trainer.collector)
    for version in (1, 2, 3):
        trainer.canary.fill(version)
        sync.publish()
        batch = next(batches)
        stamps = values(batch, "policy_version") | values(batch, "next", "policy_version")
        assert acted(batch) == stamps == {version}
    trainer.collector.shutdown()


def test_a_trajectory_that_spans_versions_carries_each_with_its_frames() -> None:
    trainer, sync = with_canary(**WAYS["whole trajectories"])
    sync.register(trainer)
    batches = iter(trainer.collector)
    seen = set()
    for version in (1, 2, 3, 4):
        trainer.canary.fill(version)
        sync.publish()
        batch = next(batches)
        seen |= values(batch, "policy_version")
        for end in ("canary_min", "canary_max"):
            assert batch["policy_version"].tolist() == batch[end].tolist()
    assert len(seen) > 1
    trainer.collector.shutdown()


@pytest.mark.processes
def test_an_llm_collector_that_acts_ahead_is_refused() -> None:
    pool = AsyncEnvPool([make_counting_env] * 2, backend="threading")
    collector = LLMCollector(pool, policy=make_small_canary(), yield_completed_trajectories=True)
    with pytest.raises(ConfigError, match="computed in the rollout before") as refusal:
        SyncWeights({"policy": "loss_module.value_network"}).register(make_dqn_trainer(collector))
    assert in_three_lines(refusal.value)
    collector.shutdown()
