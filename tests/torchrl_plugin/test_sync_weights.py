"""The hook on real trainers: when it publishes, what it leaves alone, what survives a resume."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from torchrl.collectors import MultiAsyncCollector, MultiSyncCollector

from rlsync import BoardScheme, Every, PublishError, StepsAhead, SyncWeights
from rlsync.transport.board import BoardReader
from rlsync.transport.board import format as fmt
from tests.tools.parts import (
    FRAMES_PER_BATCH,
    make_a2c_trainer,
    make_collector,
    make_continuous_env,
    make_continuous_policy,
    make_counting_env,
    make_dqn_trainer,
    make_plain_policy,
    make_policy,
    make_ppo_trainer,
    make_q_policy,
    make_sac_trainer,
    make_workers,
)

ACTOR = "loss_module.actor_network"
MAP = {"policy": ACTOR}
STOCK = {
    "ppo": (make_ppo_trainer, make_policy, ACTOR),
    "a2c": (make_a2c_trainer, make_policy, ACTOR),
    "dqn": (make_dqn_trainer, make_q_policy, "loss_module.value_network"),
    "sac": (make_sac_trainer, make_continuous_policy, ACTOR),
}


def make_stock(name: str, kind=MultiSyncCollector, batches: int = 4):
    """A stock trainer on two board workers, its hook's map, and the stamps that its batches bring."""
    make, make_actor, source = STOCK[name]
    actor = make_actor()
    env = {"env": make_continuous_env} if name == "sac" else {}
    collector = make_workers(kind, actor, schemes={"policy": BoardScheme()}, **env)
    needs_map = {"weight_update_map": {"policy": source}} if name in ("ppo", "a2c") else {}
    trainer = make(collector, actor, total_frames=batches * FRAMES_PER_BATCH, **needs_map)
    return trainer, {"policy": source}, watch_stamps(trainer)


def watch_stamps(trainer) -> list[tuple[set[int], set[int]]]:
    stamps: list[tuple[set[int], set[int]]] = []

    def watch(batch):
        root, after = batch["policy_version"], batch["next", "policy_version"]
        stamps.append((set(root.flatten().tolist()), set(after.flatten().tolist())))
        return batch

    trainer.register_op("batch_process", watch)
    return stamps


def make_local(batches: int = 4):
    """A PPO trainer whose in-process collector acts with a copy."""
    actor = make_policy()
    collector = make_collector(copy.deepcopy(actor))
    return make_ppo_trainer(collector, actor, total_frames=batches * FRAMES_PER_BATCH)


def test_asynchronous_workers_never_deliver_a_frame_older_than_the_first_publish(fork_workers):
    trainer, sync_map, stamps = make_stock("a2c", MultiAsyncCollector, batches=6)
    hook = SyncWeights(sync_map)
    hook.register(trainer)
    trainer.train()
    seen = [min(root) for root, _ in stamps]
    assert min(seen) == 2
    assert all(len(root) == 1 and root == after for root, after in stamps)


def test_frames_and_lag_trigger_together():
    trainer = make_local(batches=6)
    hook = SyncWeights(MAP, when=Every(3 * FRAMES_PER_BATCH, "frames") | StepsAhead(10_000))
    hook.register(trainer)
    trainer.train()
    assert [r.frames for r in hook.receipts] == [0, 3 * FRAMES_PER_BATCH, 6 * FRAMES_PER_BATCH]


def test_a_collector_that_shares_the_learners_memory_is_a_no_op():
    actor = make_policy()
    trainer = make_ppo_trainer(make_collector(actor), actor)
    hook = SyncWeights(MAP, trainer=trainer)
    assert {str(row.verdict) for row in hook.plan.rows} == {"aliased"}
    assert "4 aliased, 0 bytes" in hook.plan.summary()
    receipt = hook.publish()
    assert (receipt.copied_leaves, receipt.copied_bytes, receipt.aliased_leaves) == (0, 0, 4)
    assert receipt.aliased_bytes == sum(p.nbytes for p in actor.parameters())
    trainer.collector.shutdown()


@pytest.mark.seconds
def test_a_thread_that_collects_takes_weights_between_rollouts_only():
    from torchrl.data import LazyTensorStorage, ReplayBuffer

    from tests.tools.parts import CanaryPolicy, make_counting_env

    learner = CanaryPolicy(tensors=20, size=20_000)
    from torchrl.collectors import Collector

    buffer = ReplayBuffer(storage=LazyTensorStorage(20_000))
    collector = Collector(
        make_counting_env,
        copy.deepcopy(learner),
        frames_per_batch=20,
        total_frames=-1,
        replay_buffer=buffer,
        track_policy_version=True,
    )
    trainer = make_ppo_trainer(make_collector(make_policy()))
    trainer.collector.shutdown()
    trainer.collector, trainer.canary = collector, learner
    hook = SyncWeights({"policy": "canary"}, trainer=trainer)
    learner.fill(1)
    hook.publish()
    collector.start()
    while buffer.write_count < 200:
        learner.fill(hook.version + 1)
        hook.publish()
    collector.shutdown()
    frames = buffer[:]
    assert torch.equal(frames["canary_min"], frames["canary_max"])
    assert torch.equal(frames["canary_min"].long(), frames["policy_version"].long())
    assert torch.equal(frames["policy_version"], frames["next", "policy_version"])
    assert len(frames["policy_version"].unique()) > 1


def test_receipts_are_appended_to_a_file_and_kept_in_a_bounded_history(tmp_path):
    trainer = make_local(batches=5)
    hook = SyncWeights(MAP, history=2, receipts_file=tmp_path / "receipts.jsonl")
    hook.register(trainer)
    trainer.train()
    assert [r.version for r in hook.receipts] == [5, 6]
    lines = (tmp_path / "receipts.jsonl").read_text().splitlines()
    assert [json.loads(line)["version"] for line in lines] == [1, 2, 3, 4, 5, 6]


def test_a_coalesced_publish_is_owed_and_made_up_for(fork_workers, monkeypatch):
    trainer, sync_map, _ = make_stock("ppo")
    hook = SyncWeights(sync_map, when=Every(2, "batches"), trainer=trainer)
    hook._settle()
    board = trainer.collector._weight_sync_schemes["policy"].board
    monkeypatch.setattr(board.writer._slots, "take", lambda: None)
    hook._batches = 2
    hook()
    assert hook.receipts[-1].coalesced
    assert hook.receipts[-1].version == hook.version == 2
    monkeypatch.undo()
    hook._batches = 3
    hook()
    assert not hook.receipts[-1].coalesced
    assert hook.version == 3
    trainer.collector.shutdown()


def test_the_first_publish_is_owed_until_it_finds_room(monkeypatch):
    trainer = make_local()
    hook = SyncWeights(MAP, trainer=trainer)
    with monkeypatch.context() as full:
        full.setattr(hook.bound.endpoint.publisher.transport, "publish", lambda *_, **__: None)
        hook._settle()
    hook()
    assert [(r.reason, r.coalesced, r.version) for r in hook.receipts] == [
        ("start", True, 0),
        ("start", False, 1),
    ]
    trainer.collector.shutdown()


def test_seconds_of_training_are_summed_over_resumed_runs():
    trainer = make_local()
    hook = SyncWeights(MAP, when=Every(60, "seconds"), trainer=trainer)
    saved = hook.state_dict() | {"seconds": 1000.0, "last_seconds": 990.0}
    hook.load_state_dict(saved)
    assert hook.counters().seconds >= 1000.0
    assert hook.when.due(hook._last, hook.counters()) is False
    trainer.collector.shutdown()


def test_whoever_reads_a_board_along_with_the_workers_is_none_of_them(fork_workers):
    trainer, sync_map, _ = make_stock("ppo")
    hook = SyncWeights(sync_map, trainer=trainer)
    board = trainer.collector._weight_sync_schemes["policy"].board
    reader = BoardReader(board.handle, lambda version, layout, views: False)
    assert {0, 1, reader.reader} == {status.reader for status in board.status()}
    assert [worker.reader for worker in hook.acting_workers()] == [0, 1]
    reader.close()
    trainer.collector.shutdown()


def test_waiting_for_workers_that_do_not_collect_ends_at_the_deadline_with_their_names(
    fork_workers,
):
    trainer, sync_map, _ = make_stock("ppo")
    hook = SyncWeights(sync_map, trainer=trainer)
    hook.publish()
    with pytest.raises(PublishError) as late:
        hook.wait(0.2)
    pids = [p.pid for p in trainer.collector.procs]
    assert all(f"pid {pid}" in str(late.value) for pid in pids)
    assert hook.lag_versions() >= 1
    trainer.collector.shutdown()


@pytest.mark.processes
@pytest.mark.parametrize("compiled", [False, {"backend": "eager"}], ids=["eager", "compiled"])
@pytest.mark.one_case
def test_compiled_policies_copy_by_themselves_and_act_with_what_was_published(compiled):
    policy = make_plain_policy()
    collector = MultiSyncCollector(
        [make_counting_env] * 2,
        policy,
        frames_per_batch=FRAMES_PER_BATCH,
        total_frames=-1,
        compile_policy=compiled,
        weight_sync_schemes={"policy": BoardScheme("alias")},
    )
    batches = iter(collector)
    for action in (0, 1, 0, 1):
        bias = torch.zeros(2)
        bias[action] = 1e6
        policy.module.net[2].bias.data = bias
        collector.update_policy_weights_(policy)
        batch = next(batches)
        assert (batch["action"].argmax(-1) == action).all()
        assert (batch["policy_version"] == collector.policy_version).all()
    writer = collector._weight_sync_schemes["policy"].board.writer
    slot = fmt.unpack_head(writer._words[fmt.HEAD])[1]
    leased = writer._file.is_locked(fmt.SLOT_LOCK + slot, exclusively=False)
    assert leased is not bool(compiled), "a copy keeps no lease"
    collector.shutdown()
