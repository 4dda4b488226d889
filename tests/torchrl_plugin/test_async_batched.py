"""AsyncBatchedCollector: the hook finds the inference server behind it, and every frame names its version."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torchrl.collectors import AsyncBatchedCollector
from torchrl.data import LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer
from torchrl.trainers import Trainer

from rlsync import (
    AdoptionTimeout,
    BoardScheme,
    ConfigError,
    Every,
    LayoutMismatch,
    LogPolicyLag,
    PublishError,
    SyncWeights,
    VerifySync,
    WatchWorkers,
    WorkerLost,
    resolve,
)
from tests.laws.test_canary import Census, Learner
from tests.tools.parts import CanaryPolicy, kill, make_dqn_loss, make_dqn_trainer, make_q_policy, stopped
from tests.tools.parts.servers import COLLECTORS, make_async_batched, make_canary_policy
from tests.tools.running import Witness, in_three_lines, running, values

MAP = {"policy": "policy"}
SILENT_S = 3.0  # longer than a loaded machine keeps a process waiting
#: Their server is spawned, which takes seconds; that of "slots" is forked by the fork server of the tests.
SPAWNED = ("process", "auto")
hows = pytest.mark.parametrize(
    "how", [pytest.param(how, marks=[pytest.mark.seconds] * (how in SPAWNED)) for how in COLLECTORS]
)
pytestmark = pytest.mark.processes


def on(collector: AsyncBatchedCollector, policy: nn.Module) -> Trainer:
    trainer = make_dqn_trainer(collector)
    trainer.policy = policy
    return trainer


# ---------------------------------------------------------------------------- whole and exact


@hows
@pytest.mark.one_case
def test_no_frame_is_torn_or_misnamed_while_the_learner_publishes_without_a_pause(how: str) -> None:
    census, policy = Census(), make_canary_policy()
    with running(make_async_batched(how, BoardScheme())) as collector:
        learner, batches = Learner(collector, policy=policy), iter(collector)
        learner.publish()
        census.take(next(batches))  # now all processes stand
        with learner.publishing():
            while len(census.versions) < 30:
                census.take(next(batches))
    census.assert_clean()


def test_frames_that_the_collector_writes_to_a_replay_buffer_are_never_torn_or_misnamed() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(10_000), batch_size=10)
    policy, census = make_canary_policy(), Census()
    with running(make_async_batched("thread", BoardScheme(), replay_buffer=buffer)) as collector:
        learner = Learner(collector, policy=policy)
        with learner.publishing():
            for count, _ in enumerate(collector):
                if count == 12:
                    break
    census.take(buffer[:])
    census.assert_clean()


def test_whole_trajectories_name_the_version_of_each_step() -> None:
    policy, census = make_canary_policy(), Census()
    collector = make_async_batched("thread", BoardScheme(), yield_completed_trajectories=True)
    with running(collector):
        learner = Learner(collector, policy=policy)
        with learner.publishing():
            for batch in collector:
                assert batch.shape == (10,)
                census.take(batch)
                if len(census.versions) > 30:
                    break
    census.assert_clean()
    assert census.mixed_batches > 0  # an episode spans versions, and each of its steps says which


# -------------------------------------------------------------------------------- under a Trainer


@pytest.mark.parametrize("scheme", [None, BoardScheme()], ids=["TorchRL's update", "board"])
def test_a_stock_trainer_trains_on_the_collector(scheme: BoardScheme | None) -> None:
    policy = make_q_policy()
    collector = make_async_batched("thread", scheme, policy=policy, total_frames=40)
    with running(collector):
        trainer = make_dqn_trainer(collector, policy, total_frames=40)
        SyncWeights({"policy": "loss_module.value_network"}).register(trainer)
        trainer.train()
    assert trainer.collected_frames == 40


def test_each_frame_of_a_training_was_made_by_the_weights_that_it_names() -> None:
    policy = make_q_policy()
    collector = make_async_batched("thread", BoardScheme(), policy=policy, total_frames=120)
    with running(collector):
        trainer = make_dqn_trainer(collector, policy, total_frames=120)
        hook = SyncWeights({"policy": "loss_module.value_network"})
        hook.register(trainer)
        LogPolicyLag(hook).register(trainer)
        verify = VerifySync(hook, Every(1, "batches"))
        verify.register(trainer)
        witness = Witness(trainer, hook, make_q_policy, "action_value")
        trainer.train()
    assert witness.agrees()
    assert verify.checks > 0
    assert len(set().union(*witness.stamps())) > 3


def test_a_trainer_with_asynchronous_collection_trains_on_the_collector() -> None:
    policy = make_q_policy()
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(1000), batch_size=10)
    collector = make_async_batched(
        "thread", BoardScheme(), policy=policy, total_frames=200, replay_buffer=buffer
    )
    with running(collector):
        loss = make_dqn_loss(policy)
        trainer = Trainer(
            collector=collector,
            total_frames=200,
            frame_skip=1,
            loss_module=loss,
            optimizer=torch.optim.Adam(loss.parameters()),
            optim_steps_per_batch=1,
            replay_buffer=buffer,
            async_collection=True,
            progress_bar=False,
        )
        trainer.register_op("process_optim_batch", lambda _: buffer.sample())
        SyncWeights({"policy": "loss_module.value_network"}).register(trainer)
        trainer.train()
    stamps = values(buffer[:], "policy_version")
    assert stamps == values(buffer[:], "next", "policy_version")
    assert len(stamps) > 1
    assert min(stamps) >= 1


# --------------------------------------------------------------------------- a hand-written loop


@pytest.mark.parametrize("how", ["thread", "slots"])
def test_a_hand_written_loop_publishes_by_the_collectors_own_method(how: str) -> None:
    policy, scheme = make_canary_policy(), BoardScheme()
    with running(make_async_batched(how, scheme, frames_per_batch=10)) as collector:
        scheme.init_on_sender(model_id="policy", context=collector)
        collector.update_policy_weights_(policy.fill(1))
        seen: set[float] = set()
        for batch in collector:
            assert torch.equal(batch["canary_min"], batch["policy_version"].float())
            assert torch.equal(batch["canary_min"], batch["next", "policy_version"].float())
            seen |= values(batch, "policy_version")
            if len(seen) > 3:
                break
            collector.update_policy_weights_(policy.fill(scheme.board.version + 1))
    assert min(seen) == 1


def test_an_update_by_a_collector_that_nobody_told_of_its_board_is_refused() -> None:
    with running(make_async_batched("thread", BoardScheme())) as collector:
        next(iter(collector))
        with pytest.raises(PublishError, match="come from a board") as caught:
            collector.update_policy_weights_(make_canary_policy())
    assert in_three_lines(caught.value)


# ------------------------------------------------------------------------------ checked before


def narrow() -> CanaryPolicy:
    return CanaryPolicy(tensors=40, size=1)


def shallow() -> CanaryPolicy:
    return CanaryPolicy(tensors=10, size=2000)


@pytest.mark.parametrize("scheme", [None, BoardScheme()], ids=["TorchRL's update", "board"])
@pytest.mark.parametrize("how", COLLECTORS)
@pytest.mark.parametrize("wrong", [narrow, shallow])
@pytest.mark.each_value
def test_a_source_that_does_not_fit_is_refused_before_anything_runs(how: str, wrong, scheme) -> None:
    with running(make_async_batched(how, scheme and BoardScheme())) as collector:
        trainer = on(collector, wrong())
        with pytest.raises(LayoutMismatch) as caught:
            SyncWeights(MAP).register(trainer)
        assert not collector._workers
        assert in_three_lines(caught.value)
        trainer.policy = make_canary_policy()
        SyncWeights(MAP).register(trainer)  # what was refused left nothing behind


def test_the_plan_of_a_collector_without_a_board_names_what_works_there() -> None:
    with running(make_async_batched("thread")) as collector:
        plan = resolve(MAP, on(collector, make_canary_policy()))
    assert "weight_sync=rlsync.BoardScheme()" in str(plan.notes)
    assert "the server's own count of updates" in str(plan.notes)
    assert "weight_sync_schemes" not in str(plan.notes)


def test_a_plan_changes_nothing_on_the_collector() -> None:
    with running(make_async_batched("thread", BoardScheme())) as collector:
        before = dict(vars(collector))
        plan = resolve(MAP, on(collector, make_canary_policy()))
        assert vars(collector) == before
    assert plan.transport.startswith("board: an inference server in a thread")


def test_a_collector_that_does_not_stamp_is_told_in_the_plan() -> None:
    with running(make_async_batched("thread", BoardScheme(), policy_version_key=None)) as collector:
        hook = SyncWeights(MAP)
        hook.register(on(collector, make_canary_policy()))
    assert "frames are not stamped" in str(hook.plan.notes)


@pytest.mark.parametrize("make", [VerifySync, lambda hook: WatchWorkers()])
def test_a_hook_that_needs_a_board_says_what_works_there(make) -> None:
    with running(make_async_batched("thread")) as collector:
        trainer = on(collector, make_canary_policy())
        hook = SyncWeights(MAP)
        hook.register(trainer)
        with pytest.raises(ConfigError, match="weight_sync=") as caught:
            make(hook).register(trainer)
    assert in_three_lines(caught.value)


# ----------------------------------------------------------------------------------------- faults


def test_a_killed_server_is_told_to_the_learner_that_waits_for_frames() -> None:
    with running(make_async_batched("slots", BoardScheme())) as collector:
        trainer = on(collector, make_canary_policy())
        hook = SyncWeights(MAP)
        hook.register(trainer)
        WatchWorkers().register(trainer)
        hook.publish()
        batches = iter(collector)
        next(batches)
        kill(collector._server.health()["pid"])
        with pytest.raises(WorkerLost, match="killed by SIGKILL") as caught:
            for _ in batches:
                pass
    assert in_three_lines(caught.value)


def test_a_stopped_server_is_told_to_the_learner_that_waits_for_frames() -> None:
    with running(make_async_batched("slots", BoardScheme())) as collector:
        trainer = on(collector, make_canary_policy())
        hook = SyncWeights(MAP)
        hook.register(trainer)
        WatchWorkers(silent_timeout_s=SILENT_S).register(trainer)
        hook.publish()
        batches = iter(collector)
        next(batches)
        with stopped(collector._server.health()["pid"]):
            with pytest.raises(AdoptionTimeout, match="stopped") as caught:
                for _ in batches:
                    pass
    assert in_three_lines(caught.value)
