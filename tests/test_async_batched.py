"""AsyncBatchedCollector under a Trainer: the hook finds the inference server behind it."""

from __future__ import annotations

from torchrl.collectors import AsyncBatchedCollector

from rlsync import SyncWeights
from tests.faults.running import running
from tests.parts import make_counting_env, make_dqn_trainer, make_q_policy


def test_a_stock_trainer_trains_on_the_collector_with_the_hook() -> None:
    policy = make_q_policy()
    collector = AsyncBatchedCollector(
        [make_counting_env] * 2, policy=policy, frames_per_batch=20, total_frames=40, env_backend="threading"
    )
    with running(collector):
        trainer = make_dqn_trainer(collector, policy, total_frames=40)
        SyncWeights({"policy": "loss_module.value_network"}).register(trainer)
        trainer.train()
    assert trainer.collected_frames == 40
