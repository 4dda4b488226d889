"""Stock collectors that stamp `policy_version` on every frame."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torchrl.collectors import BaseCollector, Collector
from torchrl.envs import EnvBase
from torchrl.weight_update import WeightSyncScheme

from tests.tools.parts.envs import make_counting_env
from tests.tools.parts.sizes import FRAMES_PER_BATCH


def make_collector(
    policy: nn.Module | None = None,
    *,
    env: Callable[[], EnvBase] = make_counting_env,
    frames_per_batch: int = FRAMES_PER_BATCH,
    postproc: nn.Module | None = None,
    compile_policy: dict[str, str] | None = None,
) -> Collector:
    """A stock in-process collector that stamps `policy_version`."""
    return Collector(
        env,
        policy,
        frames_per_batch=frames_per_batch,
        total_frames=-1,
        track_policy_version=True,
        postproc=postproc,
        compile_policy=compile_policy,
    )


def make_workers(
    kind: type[BaseCollector],
    policy: nn.Module | None = None,
    *,
    schemes: dict[str, WeightSyncScheme] | None = None,
    policy_factory: Callable[[], nn.Module] | None = None,
    workers: int = 2,
    env: Callable[[], EnvBase] = make_counting_env,
    frames_per_batch: int = FRAMES_PER_BATCH,
    postproc: nn.Module | None = None,
    compile_policy: dict[str, str] | None = None,
) -> BaseCollector:
    """A stock MultiSyncCollector or MultiAsyncCollector that stamps `policy_version`."""
    return kind(
        [env] * workers,
        policy,
        policy_factory=policy_factory,
        frames_per_batch=frames_per_batch,
        total_frames=-1,
        track_policy_version=True,
        weight_sync_schemes=schemes,
        postproc=postproc,
        compile_policy=compile_policy,
    )
