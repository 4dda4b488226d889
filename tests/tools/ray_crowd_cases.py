"""RayCollector whose actors hold collectors with worker processes; run by tests/laws/test_on_ray.py."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from torchrl.collectors.distributed import RayCollector

from rlsync import BoundStaleness, Every, NodeBoardScheme, RayBoardScheme, SyncWeights, VerifySync
from tests.laws.test_canary import FEW_VERSIONS, Learner, make_canary
from tests.tools.parts import make_policy, make_ppo_trainer
from tests.tools.ray_board_cases import collect_until
from tests.tools.ray_cases import STAMPED, make_actors
from tests.tools.running import ACTOR, Witness
from tests.torchrl_plugin.test_distributed_collectors import ended

pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.usefixtures("one_node")]

WORKERS = 2


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "actors", "options"), [("async", 1, {"policy_factory": make_canary}), ("sync", 2, {})]
)
def test_worker_processes_of_actors_never_act_with_a_torn_or_a_misnamed_version(
    kind: str, actors: int, options: dict[str, Any]
) -> None:
    policy = make_canary().fill(1)
    with ended(make_crowds(None if options else policy, kind, actors=actors, **options)) as collector:
        learner = Learner(collector, policy=policy)
        assert f"{actors * WORKERS} worker processes" in learner.hook.plan.summary()
        census = collect_until(collector, learner, versions=FEW_VERSIONS)
        workers = collector._weight_sync_schemes["policy"].publisher.transport.status()
    census.assert_clean()
    assert census.mixed_batches == 0  # adoption happens between rollouts
    assert sorted(worker.reader for worker in workers) == list(range(actors * WORKERS))


@pytest.mark.thorough
def test_worker_processes_of_actors_that_wait_act_with_what_was_published_last() -> None:
    with ended(make_crowds(make_policy(), "sync", sync=True, total_frames=120)) as collector:
        trainer = make_ppo_trainer(collector, total_frames=120, weight_update_map=ACTOR)
        hook = SyncWeights(ACTOR)
        hook.register(trainer)
        BoundStaleness(hook, 0, "raise").register(trainer)
        verify = VerifySync(hook, when=Every(1, "batches"))
        verify.register(trainer)
        witness = Witness(trainer, hook, make_policy, "logits")
        trainer.train()
    assert all(len(of_batch) == 1 for of_batch in witness.stamps()), witness.stamps()
    assert witness.agrees()
    assert verify.checks >= 1
    assert verify.deviations == []


def make_crowds(policy: nn.Module | None, kind: str, **options: Any) -> RayCollector:
    """Actors, each with a collector of some worker processes."""
    return make_actors(
        policy,
        {**STAMPED, "weight_sync_schemes": {"policy": NodeBoardScheme()}},
        collector_class=kind,
        num_workers_per_collector=WORKERS,
        weight_sync_schemes={"policy": RayBoardScheme()},
        **options,
    )
