"""Policies that cannot be pickled are refused before a process is started, with a way out that works."""

from __future__ import annotations

import gc

import pytest
from torch import nn
from torch.nn.utils import parametrizations
from torchrl.collectors import BaseCollector, MultiAsyncCollector, MultiSyncCollector
from torchrl.collectors.distributed import DistributedCollector

from rlsync import BoardScheme, ConfigError, SyncWeights
from rlsync.runs.actors.collector import UnrollCollector
from rlsync.runs.actors.settings import CollectSettings
from rlsync.runs.recipes.impala import Categorical, GymnasiumEnvs, ImpalaNet
from tests.conftest import LeakCheck, start_method
from tests.laws.zoo.parts import ACTOR, actor_of, make_trainer
from tests.tools.parts import (
    ACTIONS,
    OBSERVATIONS,
    child_pids,
    make_counting_env,
    make_ppo_loss,
    make_workers,
)
from tests.tools.running import in_three_lines, running


def make_normed_actor() -> nn.Module:
    return actor_of(parametrizations.weight_norm(nn.Linear(OBSERVATIONS, ACTIONS)))


@pytest.mark.processes
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector, DistributedCollector])
def test_a_policy_that_cannot_be_pickled_is_refused_and_nothing_is_left(
    method: str, kind: type[BaseCollector], no_leaks: LeakCheck
) -> None:
    options = {"launcher": "mp"} if kind is DistributedCollector else {}

    def refused() -> None:
        with start_method(method), pytest.raises(ConfigError, match="torch does not pickle") as raised:
            kind(
                [make_counting_env] * 2,
                make_normed_actor(),
                frames_per_batch=10,
                weight_sync_schemes={"policy": BoardScheme()},
                **options,
            )
        assert in_three_lines(raised.value)
        assert raised.value.what.startswith("policy.module.0.module (ParametrizedLinear) cannot be sent")
        assert raised.value.where == f"policy of {kind.__name__}, start method {method!r}"
        assert raised.value.cure.startswith("pass policy_factory=...")

    refused()
    gc.collect()
    no_leaks.rebase()
    before = child_pids()
    refused()
    gc.collect()
    assert child_pids() == before


@pytest.mark.processes
@pytest.mark.seconds
def test_the_way_out_is_a_policy_factory() -> None:
    schemes = {"policy": BoardScheme()}
    made = make_workers(MultiSyncCollector, schemes=schemes, workers=1, policy_factory=make_normed_actor)
    with running(made) as collector:
        trainer = make_trainer(collector, make_ppo_loss(make_normed_actor()))
        hook = SyncWeights(ACTOR, trainer=trainer)
        assert {row.note for row in hook.plan.rows} == {""}


@pytest.mark.processes
def test_a_player_and_an_environment_that_cannot_be_pickled_are_refused() -> None:
    net = ImpalaNet((4,), Categorical(2))
    odd = ImpalaNet((4,), Categorical(2))
    odd.extra = lambda: None
    before = child_pids()
    for player, env, name in (
        (odd, GymnasiumEnvs("CartPole-v1"), r"policy \(ImpalaNet\)"),
        (net, GymnasiumEnvs(lambda: None), "the environment"),
    ):
        with pytest.raises(ConfigError, match=f"^{name} cannot be sent to worker processes") as raised:
            UnrollCollector(player, env, CollectSettings(steps=5, envs_per_worker=1))
        assert in_three_lines(raised.value)
        assert raised.value.cure.endswith("or give start_method='fork'")
    assert child_pids() == before
