"""Versions under TorchRL have one owner: whoever publishes, each is numbered, aged and told the same way."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from torchrl.collectors import MultiSyncCollector
from torchrl.trainers import UpdateWeights as StockUpdateWeights

from rlsync import SyncWeights, WeightBoard
from rlsync.core.ledger import HISTORY
from tests.tools.parts import (
    CanaryPolicy,
    make_collector,
    make_dqn_trainer,
    make_env_with_module,
    make_small_canary,
    make_workers,
)
from tests.tools.running import acted, on_a_board, running

pytestmark = pytest.mark.usefixtures("fork_workers")


def with_canary(collector, **options) -> tuple[CanaryPolicy, SyncWeights]:
    trainer = make_dqn_trainer(collector)
    trainer.canary = make_small_canary()
    sync = SyncWeights({"policy": "canary"}, **options)
    sync.register(trainer)
    return trainer.canary, sync


def stamped(*versions: int) -> TensorDict:
    return TensorDict({"policy_version": torch.tensor(versions)})


def test_a_version_published_outside_the_hook_has_the_age_of_its_own_publish() -> None:
    with on_a_board(make_small_canary()) as collector:
        canary, sync = with_canary(collector)
        sync._optim_steps = 100
        sync.publish()
        sync._optim_steps = 500
        collector.update_policy_weights_(canary)
        sync._optim_steps = 510
        newest = sync.version
        age = sync.staleness(stamped(newest - 1, newest))
        assert age.versions.tolist() == [1, 0]
        assert age.optim_steps.tolist() == [410, 10]


def test_what_a_checkpoint_carries_of_versions_is_bounded() -> None:
    collector = make_collector(make_small_canary())
    _, sync = with_canary(collector)
    for _ in range(HISTORY + 50):
        sync.publish()
    published = sync.state_dict()["published"]
    assert published.shape == (HISTORY, 2)
    assert int(published[-1, 0]) == sync.version
    collector.shutdown()


def test_a_resumed_hook_is_the_next_generation_and_publishes_a_greater_stamp() -> None:
    with on_a_board(make_small_canary()) as collector:
        _, sync = with_canary(collector)
        for _ in range(5):
            sync.publish()
        state = sync.state_dict()
    with on_a_board(make_small_canary()) as collector:
        _, resumed = with_canary(collector)
        resumed.load_state_dict(state)
        receipt = resumed.publish()
        board = collector._weight_sync_schemes["policy"].board
        assert receipt.version == state["version"] + 1
        assert board.writer.newest_stamp == (2, receipt.version)
        assert board.handle.generation == 2


@pytest.mark.parametrize("by", ["the user", "TorchRL's hook", "the user in the background"])
def test_what_torchrl_writes_into_an_in_process_collector_is_a_version_of_its_own(by: str) -> None:
    collector = make_collector(make_small_canary())
    with running(collector):
        trainer = make_dqn_trainer(collector)
        trainer.canary, theirs = make_small_canary(), make_small_canary()
        sync = SyncWeights({"policy": "canary"}, max_unchanged_publishes=None)
        sync.register(trainer)
        hook = StockUpdateWeights(collector, 1, policy_weights_getter=lambda: weights)
        weights = TensorDict.from_module(theirs)
        batches, seen = iter(collector), {}
        for value in (1.0, 2.0, 3.0):
            trainer.canary.fill(value)
            sync.publish()
            for _ in range(2):
                batch = next(batches)
                seen.setdefault(int(batch["policy_version"].unique()), set()).update(acted(batch))
                theirs.fill(100.0 + value)
                if by == "the user in the background":
                    collector.is_running = lambda: True
                hook() if by == "TorchRL's hook" else collector.update_policy_weights_(weights)
        assert [len(values) for values in seen.values()] == [1] * 6
        assert [min(values) for values in seen.values()] == [1.0, 101.0, 2.0, 102.0, 3.0, 103.0]
        assert list(seen) == sorted(seen)


def test_none_and_a_tensor_in_one_call_make_one_version() -> None:
    board = WeightBoard()
    inner = "env.transform[0].module"
    schemes = {"policy": board.scheme(), inner: board.scheme()}
    collector = make_workers(
        MultiSyncCollector, make_small_canary(), schemes=schemes, env=make_env_with_module
    )
    with running(collector):
        trainer = make_dqn_trainer(collector)
        trainer.canary = make_small_canary()
        trainer.inner = make_env_with_module().transform[0].module
        sync = SyncWeights({"policy": "canary", inner: "inner"})
        sync.register(trainer)
        sync.publish()
        before = sync.version
        trainer.canary.fill(7.0)
        explicit = {name: torch.full_like(p, 3.0) for name, p in trainer.inner.state_dict().items()}
        collector.update_policy_weights_(weights_dict={"policy": None, inner: explicit})
        assert sync.version == before + 1
        assert {7.0, 3.0} <= {float(view.min()) for view in board.writer.newest_leaves()[1]}
    board.close()


def test_the_plan_says_how_each_destination_is_adopted() -> None:
    board = WeightBoard()
    inner = "env.transform[0].module"
    schemes = {"policy": board.scheme("copy"), inner: board.scheme("alias")}
    collector = make_workers(
        MultiSyncCollector, make_small_canary(), schemes=schemes, env=make_env_with_module
    )
    with running(collector):
        _, sync = with_canary(collector)
        assert f"adopted by copy (policy), alias ({inner})" in sync.plan.transport
    board.close()
    with on_a_board(make_small_canary()) as collector:
        _, sync = with_canary(collector)
        assert "adopted by alias, one copy a publish" in sync.plan.transport
