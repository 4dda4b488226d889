"""Each kind of collector of TorchRL: who carries the weights, and what rlsync promises of its frames."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

from tensordict import TensorDictBase
from torchrl.collectors import AsyncCollector, BaseCollector, MultiAsyncCollector, MultiSyncCollector
from torchrl.trainers import Trainer
from torchrl.weight_update import (
    MultiProcessWeightSyncScheme,
    SharedMemWeightSyncScheme,
    WeightSyncScheme,
)

from rlsync import BoardScheme, BoundStaleness, Every, LogPolicyLag, RlsyncError, SyncWeights, VerifySync
from rlsync.core.errors import first_line
from tests.faults.running import running
from tests.parts import (
    CanaryPolicy,
    make_collector,
    make_counting_env,
    make_dqn_trainer,
    make_small_canary,
    make_workers,
)
from tests.parts.servers import make_async_batched
from tests.table.row import Cells, Row

#: The columns.
COLUMNS = ("weights by", "frames", "LogPolicyLag", "BoundStaleness", "VerifySync")
BATCHES = 4


Made = AbstractContextManager[BaseCollector]
Make = Callable[[CanaryPolicy], Made]


def _in_process(policy: CanaryPolicy) -> Made:
    return running(make_collector(policy))


def _workers(
    kind: type[BaseCollector], scheme: type[WeightSyncScheme] | None, policy: CanaryPolicy
) -> AbstractContextManager[BaseCollector]:
    schemes = None if scheme is None else {"policy": scheme()}
    return running(make_workers(kind, policy, schemes=schemes, workers=1))


def _one_process(policy: CanaryPolicy) -> Made:
    schemes = {"policy": BoardScheme()}
    collector = AsyncCollector(
        make_counting_env, policy, frames_per_batch=20, total_frames=-1, weight_sync_schemes=schemes
    )
    return running(collector)


def observed(make: Make) -> Cells:
    """What rlsync does with a collector, by column."""
    policy = make_small_canary().fill(1)
    try:
        making = make(policy)
    except RlsyncError as error:
        return dict.fromkeys(COLUMNS, "") | {"weights by": f"refused: {first_line(error)}"}
    with making as collector, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = make_dqn_trainer(collector, total_frames=BATCHES * 20)
        trainer.canary = make_small_canary()
        return _with_hooks(trainer)


def _with_hooks(trainer: Trainer) -> Cells:
    hook = SyncWeights({"policy": "canary"})
    batches: list[TensorDictBase] = []

    def renew() -> None:
        trainer.canary.fill(hook.version + 1)

    trainer.register_op("setup", renew)
    trainer.register_op("post_steps", renew)
    trainer.register_op("batch_process", lambda batch: batches.append(batch.clone()) or batch)
    promised = True
    cells = {"weights by": _registered(lambda: hook.register(trainer))}
    if not cells["weights by"]:
        cells["weights by"] = re.split("[:,]", hook.plan.transport)[0]
        promised = "stamps may be wrong" not in hook.plan.summary()
        verify = VerifySync(hook, when=Every(1, "batches"))
        cells["LogPolicyLag"] = _registered(lambda: LogPolicyLag(hook).register(trainer)) or "yes"
        bound = BoundStaleness(hook, 100)
        cells["BoundStaleness"] = _registered(lambda: bound.register(trainer)) or "yes"
        cells["VerifySync"] = _registered(lambda: verify.register(trainer)) or "yes"
    trainer.train()
    cells["frames"] = stamps(batches) if promised else "stamps may be wrong"
    return cells


def _registered(register: Callable[[], object]) -> str:
    try:
        register()
    except RlsyncError as error:
        return f"refused: {first_line(error)}"
    return ""


def stamps(batches: list[TensorDictBase]) -> str:
    """What the frames say, held against the canary in them."""
    if any(key not in batch.keys(True) for batch in batches for key in _KEYS):
        return "no stamp"
    wrong = 0
    seen = set()
    for batch in batches:
        columns = [batch[key].flatten().tolist() for key in (*_KEYS, "canary_min", "canary_max")]
        frames = list(zip(*columns, strict=True))
        wrong += sum(len(set(frame)) > 1 for frame in frames)
        seen |= {frame[0] for frame in frames}
    if wrong:
        return "wrong stamps"
    return "exact" if len(seen) > 1 else "never synced"


_KEYS = ("policy_version", ("next", "policy_version"))


def _server(how: str, scheme: type[WeightSyncScheme] | None, policy: CanaryPolicy) -> Made:
    given = None if scheme is None else scheme()
    return running(make_async_batched(how, given, policy=policy, factory=make_small_canary))


def _row(collector: str, scheme: str, make: Make, more: str = "") -> Row:
    name = f"`{collector}`, {more}" if more else f"`{collector}`"
    return Row("collectors", (name, scheme and f"`{scheme}`"), partial(observed, make))


_BATCHED = "AsyncBatchedCollector"

ROWS = (
    _row("Collector", "", _in_process),
    *(
        _row(kind.__name__, scheme.__name__ if scheme else "", partial(_workers, kind, scheme))
        for kind in (MultiSyncCollector, MultiAsyncCollector)
        for scheme in (BoardScheme, SharedMemWeightSyncScheme, MultiProcessWeightSyncScheme, None)
    ),
    _row("AsyncCollector", "BoardScheme", _one_process),
    *(
        _row(
            "AsyncBatchedCollector",
            f"{scheme.__name__ if scheme else ''}",
            partial(_server, how, scheme),
            where,
        )
        for how, where in (("thread", "server in a thread"), ("slots", "server in a process"))
        for scheme in (BoardScheme, None)
    ),
)
