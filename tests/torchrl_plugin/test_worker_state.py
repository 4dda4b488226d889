"""What a collector's state dict shows of the workers' weights, and what becomes of one that is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from typing import Any

import pytest
from torchrl.collectors import BaseCollector, MultiAsyncCollector, MultiSyncCollector

from rlsync import BoardScheme, SyncWeights
from rlsync.sync.publisher import Publisher
from rlsync.torchrl_plugin.worker import WorkerSync
from rlsync.transport.board.writer import BoardWriter
from tests.tools.parts import (
    FRAMES_PER_BATCH,
    CanaryPolicy,
    make_collector,
    make_counting_env,
    make_dqn_trainer,
    make_small_canary,
)
from tests.tools.running import acted, on_a_board, running, values
from tests.torchrl_plugin.test_worker_side import FirstAction

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("fork_workers")]
kinds = pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])


def shown(state_dict: Mapping[str, Any]) -> list[tuple[float, int]]:
    """The canary's value and the version in each worker."""
    workers = [state_dict[f"worker{number}"] for number in (0, 1)]
    weights = [worker["policy_state_dict"]["canary.weights.0"] for worker in workers]
    assert all(bool((weight == weight[0]).all()) for weight in weights)
    versions = [worker["policy_version"] for worker in workers]
    return [(float(weight[0]), version) for weight, version in zip(weights, versions, strict=True)]


@pytest.mark.one_case
@kinds
@pytest.mark.parametrize("adopt", ["alias", "copy"])
def test_a_state_dict_right_after_an_update_shows_what_was_published(
    kind: type[BaseCollector], adopt: str
) -> None:
    policy = make_small_canary()
    with on_a_board(policy, kind, adopt=adopt) as collector:
        assert shown(collector.state_dict()) == [(0, 1)] * 2
        for version in (2, 3):
            collector.update_policy_weights_(policy.fill(version))
            assert shown(collector.state_dict()) == [(version, version)] * 2


def test_a_state_dict_between_two_batches_changes_no_stamp() -> None:
    policy = make_small_canary()
    with on_a_board(policy) as collector:
        batches = iter(collector)
        for version in (2, 3, 4):
            collector.update_policy_weights_(policy.fill(version))
            collector.state_dict()
            batch = next(batches)
            assert acted(batch) == values(batch, "policy_version") == {version}
            assert values(batch, "next", "policy_version") == {version}


def test_a_verification_holds_when_a_worker_has_adopted_for_its_state() -> None:
    policy = make_small_canary()
    with on_a_board(policy) as collector:
        trainer = make_dqn_trainer(collector)
        trainer.policy = policy
        sync = SyncWeights({"policy": "policy"})
        sync.register(trainer)
        sync.publish()
        asked = sync.bound.endpoint.verification()
        asked.ask()
        collector.state_dict()
        next(iter(collector))
        found = asked.hear()
    assert (found.answered, found.whole, found.deviations) == (2, 2, ())


def test_a_state_dict_in_the_middle_of_a_rollout_leaves_it_its_version() -> None:
    board, learner, policy = BoardWriter(), make_small_canary(), make_small_canary()
    publisher = Publisher(board)
    publisher.publish_modules({"policy": learner.fill(1)}, "the learner")
    with running(make_collector(policy)) as collector:
        worker = WorkerSync(board.handle, 0)
        worker.declare("policy", "copy", "rollout", prove=False)
        worker.attach(collector)
        calls = count()

        def look(*_: object) -> None:
            if next(calls) == 3:
                publisher.publish_modules({"policy": learner.fill(2)}, "the learner")
                collector.state_dict()

        policy.register_forward_hook(look)
        batches = iter(collector)
        seen = [next(batches).clone() for _ in range(2)]
        assert [acted(batch) for batch in seen] == [{1}, {2}]
        assert [values(batch, "policy_version") for batch in seen] == [{1}, {2}]
        worker.leave("policy")
    board.close()


@pytest.mark.one_case
@kinds
def test_weights_that_a_collector_loads_act_as_a_new_version(kind: type[BaseCollector]) -> None:
    policy = make_small_canary()
    with on_a_board(policy, kind) as collector:
        collector.update_policy_weights_(policy.fill(7))
        collector.update_policy_weights_(policy.fill(8))
        kept = collector.state_dict()
    assert kept["policy_version"] == 3
    with on_a_board(make_small_canary(), kind) as collector:
        collector.load_state_dict(kept)
        assert shown(collector.state_dict()) == [(8, 4)] * 2  # versions go on counting
        batch = next(iter(collector))
        assert acted(batch) == {8}
        assert values(batch, "policy_version") == {4}
        assert collector.policy_version == 4


def test_a_loaded_state_dict_does_not_replace_what_a_hook_publishes() -> None:
    policy = CanaryPolicy(4, 10)
    with on_a_board(policy) as collector:
        old = collector.state_dict()
        trainer = make_dqn_trainer(collector)
        trainer.policy = policy.fill(5)
        sync = SyncWeights({"policy": "policy"})
        sync.register(trainer)
        sync.publish()
        version = sync.version
        collector.load_state_dict(old)
        batch = next(iter(collector))
        assert acted(batch) == {5}
        assert values(batch, "policy_version") == {version}


def test_a_collector_with_a_policy_without_weights_loads_its_state() -> None:
    scheme, size = {"policy": BoardScheme()}, {"frames_per_batch": FRAMES_PER_BATCH, "total_frames": -1}
    with running(
        MultiSyncCollector([make_counting_env] * 2, FirstAction(), weight_sync_schemes=scheme, **size)
    ) as collector:
        batches = iter(collector)
        next(batches)
        collector.load_state_dict(collector.state_dict())
        assert values(next(batches), "policy_version") == {2}
