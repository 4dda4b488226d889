"""Mistakes that a strict type checker finds: each on its line, under its code, or `make types` fails."""

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
    Every("4")  # type: ignore[arg-type]
    Every(4, "batch")  # type: ignore[arg-type]
    StepsAhead(0.5)  # type: ignore[arg-type]
    told = Every(4) | 3  # type: ignore[operator]
    told = Every(4) & Every  # type: ignore[operator]
    assert told


def misspelt() -> object:
    return rlsync.Evry(4)  # type: ignore[attr-defined]


def maps_and_hooks(trainer: Any) -> None:
    SyncWeights({"policy": 3})  # type: ignore[dict-item]
    SyncWeights(["policy", "loss_module.actor_network"])  # type: ignore[arg-type]
    SyncWeights({"policy": "net"}, 4)  # type: ignore[arg-type]
    SyncWeights({"policy": "net"}, Every(4), None)  # type: ignore[call-arg]
    SyncWeights({"policy": "net"}, every=4)  # type: ignore[call-arg]
    Source()  # type: ignore[call-arg]
    Source("net", exclude="*.running_mean")  # type: ignore[arg-type]
    BoundStaleness(Every(4), 2)  # type: ignore[arg-type]
    resolve("policy", trainer)  # type: ignore[arg-type]


def schemes() -> None:
    BoardScheme("both")  # type: ignore[arg-type]
    BoardScheme("alias", "rollout")  # type: ignore[call-arg]


def what_is_frozen_stays(source: Source, receipt: Receipt, plan: SyncPlan) -> None:
    source.path = "other"  # type: ignore[misc]
    receipt.version = 3  # type: ignore[misc]
    plan.rows[0].payload_bytes = 0  # type: ignore[misc]


def fields_are_known(receipt: Receipt, plan: SyncPlan) -> str:
    told = receipt.bytes, plan.rows  # type: ignore[attr-defined]
    assert plan.routes[0].target, told  # type: ignore[attr-defined]
    return receipt.version  # type: ignore[return-value]
