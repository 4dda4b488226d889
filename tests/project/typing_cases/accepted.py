"""What a user writes, and the types that a strict checker finds. Read by `make types`, never run."""

from collections.abc import Mapping
from typing import Any

import torch
from typing_extensions import assert_type

import rlsync
from rlsync import (
    BoardScheme,
    BoundStaleness,
    ConfigError,
    Every,
    LogPolicyLag,
    LogReceipts,
    PublishError,
    Receipt,
    RecordSchedule,
    Rerun,
    RlsyncError,
    SendShards,
    Source,
    SourceNotFound,
    StepsAhead,
    SyncMapError,
    SyncPlan,
    SyncWeights,
    UpdateWeights,
    VerifySync,
    WatchWorkers,
    WeightBoard,
    WorkerLost,
    resolve,
)
from rlsync.core.trigger import Trigger
from rlsync.record.schedule import Comparison


def triggers_compose() -> Trigger:
    assert_type(Every(4), Every)
    Every(0.5, "seconds")
    trigger = Every(10, "seconds") | StepsAhead(50) & Every(4, unit="optim_steps")
    assert_type(trigger, Trigger)
    assert_type(trigger | Every(1, "frames"), Trigger)
    return trigger


def a_map_holds_paths_and_sources(trainer: Any) -> SyncWeights:
    paths = {"policy": "loss_module.actor_network"}
    SyncWeights(paths)
    mixed: dict[str, str | Source] = {
        "policy": Source("loss_module.actor_network", dtype=torch.bfloat16, exclude=("*.running_mean",)),
        "env.transform[0]": "norm",
    }
    only_sources: Mapping[str, Source] = {"policy": Source("loss_module.actor_network", dtype="bfloat16")}
    SyncWeights(only_sources, when=Every(1) | StepsAhead(3), history=10, receipts_file="receipts.jsonl")
    SyncWeights(paths, collector=trainer.collector).pin(trainer.evaluator)
    return SyncWeights(mixed, triggers_compose(), trainer=trainer, finite=True, background=True)


def a_hook_tells(sync: SyncWeights, trainer: Any) -> int:
    sync.register(trainer)
    sync.register(trainer, name="sync_weights")
    assert_type(sync.plan, SyncPlan)
    assert_type(sync.version, int)
    assert_type(sync.lag_versions(), int)
    assert_type(sync.acting_versions(), list[int])
    assert_type(sync.publish(), Receipt)
    sync.wait(timeout_s=5)
    sync()
    return sync.receipts[-1].version


def a_receipt_has_typed_fields(receipt: Receipt) -> float:
    assert_type(receipt.version, int)
    assert_type(receipt.reason, str)
    assert_type(receipt.copied_bytes, int)
    assert_type(receipt.coalesced, bool)
    assert_type(receipt.repaired, tuple[str, ...])
    assert_type(receipt.to_json(), str)
    return receipt.duration_s


def a_plan_has_typed_rows(trainer: Any) -> list[tuple[int, ...]]:
    plan = resolve({"policy": "loss_module.actor_network"}, trainer)
    assert_type(plan, SyncPlan)
    assert_type(plan.check(), SyncPlan)
    assert_type(plan.payload_bytes, int)
    assert_type(plan.rows[0].destination, str)
    return [row.shape for row in plan.rows]


def a_board_hands_out_schemes() -> dict[str, BoardScheme]:
    board = WeightBoard()
    assert_type(board.scheme("copy"), BoardScheme)
    BoardScheme(start_timeout_s=None)
    return {"policy": board.scheme(), "env.transform[0]": board.scheme(adopt="alias")}


def the_other_hooks(sync: SyncWeights, trainer: Any) -> None:
    LogPolicyLag(sync, prefix="lag").register(trainer)
    LogReceipts(sync, prefix="sync").register(trainer)
    bound = BoundStaleness(sync, max_versions=2, action="wait")
    bound.register(trainer)
    assert_type(bound.dropped_frames, int)
    VerifySync(sync, Every(100), behaviour=0.01).register(trainer)
    WatchWorkers(silent_timeout_s=None).register(trainer)
    RecordSchedule(sync, "again.bin", every=10).register(trainer)
    assert_type(Rerun("schedule.bin", until=12).run(trainer), Comparison)
    shards = SendShards({"policy": trainer.loss_module}, timeout_s=5.0, in_place=False)
    assert_type(shards(), "int | None")
    UpdateWeights(trainer.collector, 4, weight_update_map={"policy": "net"}, trainer=trainer)
    UpdateWeights(trainer.collector, 4, interval_unit="optim_steps").register(trainer)


def errors_are_one_tree(error: RlsyncError) -> str:
    match error:
        case SourceNotFound() | ConfigError():
            return str(error)
        case WorkerLost():
            publish_error: PublishError = error
            return str(publish_error)
        case SyncMapError():
            return rlsync.__version__
    return ""
