"""Environments that write into what they have answered: frames of TorchRL's collectors would show it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import gymnasium
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torchrl.collectors import MultiAsyncCollector, MultiSyncCollector
from torchrl.envs import (
    CatFrames,
    Compose,
    EnvBase,
    GymEnv,
    GymWrapper,
    SerialEnv,
    StepCounter,
    TransformedEnv,
)

from rlsync import BoardScheme, ConfigError, SyncWeights, WorkerLost
from tests.tools.parts import make_a2c_trainer, make_cartpole, make_collector, make_policy, make_workers
from tests.tools.parts.answering_envs import SAME_ARRAY

MAP = {"policy": "loss_module.actor_network"}
FRAMES = 24
WRITTEN = "the environment has written into 'observation' after it had answered it: the frames are wrong"


def make_same(kept: str = "always") -> EnvBase:
    return GymEnv(SAME_ARRAY, kept=kept)


def make_vector(copy: bool) -> EnvBase:
    make = partial(gymnasium.make, "CartPole-v1")
    return GymWrapper(SyncVectorEnv([make, make], copy=copy, autoreset_mode=AutoresetMode.DISABLED))


def make_serial() -> EnvBase:
    return TransformedEnv(SerialEnv(2, make_same), Compose())


def make_transformed() -> EnvBase:
    stack = CatFrames(N=1, dim=-1, in_keys=["observation"])
    return TransformedEnv(make_cartpole(), Compose(StepCounter(), stack))


def train(env: Callable[[], EnvBase], frames_per_batch: int = FRAMES) -> None:
    actor = make_policy()
    collector = make_collector(actor, env=env, frames_per_batch=frames_per_batch)
    trainer = make_a2c_trainer(collector, actor, total_frames=FRAMES)
    SyncWeights(MAP).register(trainer)
    try:
        trainer.train()
    finally:
        collector.shutdown(raise_on_error=False)


@pytest.mark.parametrize("frames_per_batch", [2, FRAMES])
@pytest.mark.parametrize("kept", ["always", "steps", "resets", "two"])
def test_an_environment_that_writes_into_its_answers_is_refused(kept: str, frames_per_batch: int) -> None:
    with pytest.raises(ConfigError, match=WRITTEN) as refusal:
        train(partial(make_same, kept), frames_per_batch)
    assert len(str(refusal.value).splitlines()) == 3


def test_a_vector_environment_that_does_not_copy_is_refused() -> None:
    with pytest.raises(ConfigError, match=WRITTEN):
        train(partial(make_vector, False))


@pytest.mark.parametrize(
    "env",
    [partial(make_same, "constant"), partial(make_vector, True), make_serial, make_transformed],
    ids=["constant", "vector", "serial", "stack"],
)
def test_one_whose_frames_stay_what_they_are_is_not(env: Callable[[], EnvBase]) -> None:
    train(env)


@pytest.mark.processes
@pytest.mark.usefixtures("spawn_workers")
@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
@pytest.mark.one_case
def test_one_in_workers_ends_the_run_with_the_workers_own_words(
    kind: type, capfd: pytest.CaptureFixture[str]
) -> None:
    actor = make_policy()
    collector = make_workers(kind, actor, schemes={"policy": BoardScheme()}, env=make_same)
    trainer = make_a2c_trainer(collector, actor, total_frames=10_000, weight_update_map=MAP)
    SyncWeights(MAP).register(trainer)
    try:
        with pytest.raises(WorkerLost):
            trainer.train()
    finally:
        collector.shutdown(raise_on_error=False)
    assert f"rlsync.core.errors.ConfigError: {WRITTEN}" in capfd.readouterr().err
