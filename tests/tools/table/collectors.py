"""Each kind of collector of TorchRL on this host: who carries the weights, and what its frames say."""

from __future__ import annotations

from functools import partial

from torchrl.collectors import AsyncCollector, BaseCollector, MultiAsyncCollector, MultiSyncCollector
from torchrl.collectors.llm import LLMCollector
from torchrl.envs import AsyncEnvPool
from torchrl.weight_update import (
    MultiProcessWeightSyncScheme,
    SharedMemWeightSyncScheme,
    WeightSyncScheme,
)

from rlsync import BoardScheme
from tests.tools.parts import CanaryPolicy, make_collector, make_counting_env, make_small_canary, make_workers
from tests.tools.parts.servers import make_async_batched
from tests.tools.running import running
from tests.tools.table.observing import Made, row


def _in_process(policy: CanaryPolicy) -> Made:
    return running(make_collector(policy))


def _workers(kind: type[BaseCollector], scheme: type[WeightSyncScheme] | None, policy: CanaryPolicy) -> Made:
    schemes = None if scheme is None else {"policy": scheme()}
    return running(make_workers(kind, policy, schemes=schemes, workers=1))


def _one_process(policy: CanaryPolicy) -> Made:
    schemes = {"policy": BoardScheme()}
    collector = AsyncCollector(
        make_counting_env, policy, frames_per_batch=20, total_frames=-1, weight_sync_schemes=schemes
    )
    return running(collector)


def _server(how: str, scheme: type[WeightSyncScheme] | None, policy: CanaryPolicy) -> Made:
    given = None if scheme is None else scheme()
    return running(make_async_batched(how, given, policy=policy, factory=make_small_canary))


def _llm(policy: CanaryPolicy) -> Made:
    return running(
        LLMCollector(make_counting_env, policy=policy, dialog_turns_per_batch=20, track_policy_version=True)
    )


def _llm_ahead(policy: CanaryPolicy) -> Made:
    pool = AsyncEnvPool([make_counting_env] * 2, backend="threading")
    return running(LLMCollector(pool, policy=policy, yield_completed_trajectories=True))


ROWS = (
    row("Collector", "", _in_process),
    *(
        row(kind.__name__, scheme.__name__ if scheme else "", partial(_workers, kind, scheme))
        for kind in (MultiSyncCollector, MultiAsyncCollector)
        for scheme in (BoardScheme, SharedMemWeightSyncScheme, MultiProcessWeightSyncScheme, None)
    ),
    row("AsyncCollector", "BoardScheme", _one_process),
    row("LLMCollector", "", _llm),
    row("LLMCollector", "", _llm_ahead, "on an AsyncEnvPool"),
    *(
        row(
            "AsyncBatchedCollector",
            f"{scheme.__name__ if scheme else ''}",
            partial(_server, how, scheme),
            where,
        )
        for how, where in (("thread", "server in a thread"), ("slots", "server in a process"))
        for scheme in (BoardScheme, None)
    ),
)
