"""Mistakes that a strict type checker finds, with the code that it gives. Checked by test_typing.py."""

from typing import Any

import rlsync
from rlsync import (
    BoardScheme,
    BoundStaleness,
    Every,
    Receipt,
    Source,
    StepsAhead,
    SyncPlan,
    SyncWeights,
    resolve,
)


def triggers() -> None:
    Every("4")  # refused: arg-type
    Every(4, "batch")  # refused: arg-type
    StepsAhead(0.5)  # refused: arg-type
    told = Every(4) | 3  # refused: operator
    told = Every(4) & Every  # refused: operator
    assert told


def misspelt() -> object:
    return rlsync.Evry(4)  # refused: attr-defined


def maps_and_hooks(trainer: Any) -> None:
    SyncWeights({"policy": 3})  # refused: dict-item
    SyncWeights(["policy", "loss_module.actor_network"])  # refused: arg-type
    SyncWeights({"policy": "net"}, 4)  # refused: arg-type
    SyncWeights({"policy": "net"}, Every(4), None)  # refused: call-arg
    SyncWeights({"policy": "net"}, every=4)  # refused: call-arg
    Source()  # refused: call-arg
    Source("net", exclude="*.running_mean")  # refused: arg-type
    BoundStaleness(Every(4), 2)  # refused: arg-type
    resolve("policy", trainer)  # refused: arg-type


def schemes() -> None:
    BoardScheme("both")  # refused: arg-type
    BoardScheme("alias", "rollout")  # refused: call-arg


def what_is_frozen_stays(source: Source, receipt: Receipt, plan: SyncPlan) -> None:
    source.path = "other"  # refused: misc
    receipt.version = 3  # refused: misc
    plan.rows[0].payload_bytes = 0  # refused: misc


def fields_are_known(receipt: Receipt, plan: SyncPlan) -> str:
    told = receipt.bytes, plan.rows  # refused: attr-defined
    assert plan.routes[0].target, told  # refused: attr-defined
    return receipt.version  # refused: return-value
