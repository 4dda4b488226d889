"""RayCollector with a RayBoardScheme. tests/laws/test_on_ray.py runs these tests, with a Ray of their own."""

from __future__ import annotations

import time
import warnings
from typing import Any

import pytest
import ray
import torch
from torchrl.collectors import MultiSyncCollector
from torchrl.collectors.distributed import RayCollector
from torchrl.envs import TransformedEnv

from rlsync import (
    BoardScheme,
    BoundStaleness,
    ConfigError,
    Every,
    RayBoardScheme,
    RlsyncWarning,
    SyncWeights,
    VerifySync,
    WorkerLost,
)
from tests.laws.test_canary import FEW_VERSIONS, Census, Learner, make_canary
from tests.tools.parts import (
    Canary,
    CanaryTransform,
    make_counting_env,
    make_dqn_trainer,
    make_policy,
    make_ppo_trainer,
    make_small_canary,
    make_workers,
)
from tests.tools.ray_cases import STAMPED, make_actors
from tests.tools.running import ACTOR, Witness, in_three_lines
from tests.torchrl_plugin.test_distributed_collectors import CANARY, ended, with_canary

pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.usefixtures("one_node")]

LONG_S = 120.0  # for what takes a second on a machine that has nothing else to do


@pytest.mark.parametrize("actors", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_actors_with_boards_never_act_with_a_torn_or_a_misnamed_version(actors: int) -> None:
    policy = make_canary().fill(1)  # what the collector publishes by itself
    schemes = {"policy": RayBoardScheme()}
    with ended(make_actors(policy, STAMPED, actors=actors, weight_sync_schemes=schemes)) as collector:
        learner = Learner(collector, policy=policy)
        census = collect_until(collector, learner, versions=FEW_VERSIONS)
    census.assert_clean()
    assert census.mixed_batches == 0  # adoption happens between rollouts


@pytest.mark.thorough
def test_several_destinations_of_actors_are_one_version() -> None:
    policy = make_canary()
    schemes = {path: RayBoardScheme("copy") for path in ("policy", "env.transform[0].module")}
    with ended(make_actors(policy, STAMPED, env=make_scaled_env, weight_sync_schemes=schemes)) as collector:
        trainer = make_dqn_trainer(collector)
        trainer.policy, trainer.scaler = policy, Canary(tensors=4, size=100)
        hook = SyncWeights({"policy": "policy", "env.transform[0].module": "scaler"})
        hook.register(trainer)
        seen: set[int] = set()
        batches, until = iter(collector), time.monotonic() + LONG_S
        while len(seen) < FEW_VERSIONS and time.monotonic() < until:
            policy.canary.fill(hook.version + 1)
            trainer.scaler.fill(hook.version + 1)
            hook.publish()
            batch = next(batches)
            made_by = batch["next", "policy_version"]
            if int(made_by.min()) < 2:
                continue  # the first version is of the policy alone
            # What a step leads to is observed under the same version as it is acted with.
            for key in ("canary_min", "canary_max"):
                assert torch.equal(batch[key], made_by.float())
            for key in ("transform_min", "transform_max"):
                assert torch.equal(batch["next", key], made_by.float())
            seen |= set(made_by.flatten().tolist())
        assert len(seen) >= FEW_VERSIONS


@pytest.mark.thorough
def test_actors_that_wait_for_the_learner_act_with_what_it_published_last() -> None:
    schemes = {"policy": RayBoardScheme()}
    options = {"sync": True, "actors": 2, "total_frames": 120, "weight_sync_schemes": schemes}
    with ended(make_actors(make_policy(), STAMPED, **options)) as collector:
        trainer = make_ppo_trainer(collector, total_frames=120, weight_update_map=ACTOR)
        hook = SyncWeights(ACTOR)
        with warnings.catch_warnings():
            warnings.simplefilter("error", RlsyncWarning)
            hook.register(trainer)
        BoundStaleness(hook, 0, "raise").register(trainer)
        verify = VerifySync(hook, when=Every(1, "batches"))
        verify.register(trainer)
        witness = Witness(trainer, hook, make_policy, "logits")
        trainer.train()
    stamps = witness.stamps()
    assert all(len(of_batch) == 1 for of_batch in stamps), stamps
    # The collector itself publishes version 1, and the trainer's set-up version 2.
    assert [min(of_batch) for of_batch in stamps] == list(range(2, 2 + len(stamps)))
    assert witness.agrees()
    assert verify.checks >= 1
    assert verify.deviations == []


@pytest.mark.thorough
def test_an_actor_that_was_killed_is_named_where_its_version_is_awaited() -> None:
    schemes = {"policy": RayBoardScheme()}
    with ended(make_actors(make_small_canary(), STAMPED, weight_sync_schemes=schemes)) as collector:
        trainer, _ = with_canary(collector)
        hook = SyncWeights(CANARY)
        hook.register(trainer)
        ray.kill(collector.remote_collectors[0], no_restart=True)
        hook.publish()
        with pytest.raises(WorkerLost, match="worker 0") as lost:
            hook.wait(LONG_S)
        assert in_three_lines(lost.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"stamped": {}}, "would not say which weights acted"),
        ({"update_after_each_batch": True}, "one at a time"),
        ({"collector_class": "sync"}, "MultiSyncCollector"),
        (
            {
                "collector_class": "sync",
                "stamped": {**STAMPED, "weight_sync_schemes": {"policy": BoardScheme()}},
            },
            r"NodeBoardScheme\(\)",
        ),
    ],
)
def test_actors_that_could_not_keep_the_promises_are_refused(options: dict[str, Any], said: str) -> None:
    given = {"stamped": STAMPED, "weight_sync_schemes": {"policy": RayBoardScheme()}, **options}
    with pytest.raises(ConfigError, match=said) as refused:
        make_actors(make_small_canary(), **given)
    assert in_three_lines(refused.value)


def test_boards_on_nodes_refuse_processes() -> None:
    with pytest.raises(ConfigError, match="RayBoardScheme serves RayCollector") as refused:
        make_workers(MultiSyncCollector, make_small_canary(), schemes={"policy": RayBoardScheme()})
    assert in_three_lines(refused.value)


def collect_until(collector: RayCollector, learner: Learner, *, versions: int) -> Census:
    """Collect under continuous publishes until so many versions were seen."""
    census, batches = Census(), iter(collector)
    with learner.publishing():
        until = time.monotonic() + LONG_S
        while len(census.versions) < versions and time.monotonic() < until:
            census.take(next(batches))
    return census


def make_scaled_env() -> TransformedEnv:
    return TransformedEnv(make_counting_env(), CanaryTransform())
