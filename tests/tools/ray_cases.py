"""RayCollector: stamped by its actors, checked, or refused. tests/laws/test_on_ray.py runs these tests.

They share one Ray, in a network of its own: Ray opens ports, and more than one for each worker.
"""

from __future__ import annotations

import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import ray
from torch import nn
from torchrl.collectors.distributed import RayCollector
from torchrl.envs import EnvBase

from rlsync import (
    BoardScheme,
    BoundStaleness,
    ConfigError,
    LayoutMismatch,
    NoBoard,
    RlsyncWarning,
    SyncWeights,
    VerifySync,
)
from tests.laws.test_canary import Census
from tests.tools.parts import (
    make_counting_env,
    make_policy,
    make_ppo_trainer,
    make_small_canary,
)
from tests.tools.parts.ray_cluster import in_time
from tests.tools.running import ACTOR, Witness, in_three_lines
from tests.torchrl_plugin.test_distributed_collectors import (
    CANARY,
    ended,
    left_as_it_was,
    refuses_an_excluded_leaf,
    with_canary,
)

pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.usefixtures("one_node")]

STAMPED = {"track_policy_version": True}


@contextmanager
def own_ray() -> Iterator[None]:
    """A Ray of this process's own."""
    folder = tempfile.mkdtemp(prefix="ray")  # short: Ray puts sockets there
    in_time(
        lambda: ray.init(
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            object_store_memory=80 * 2**20,
            _temp_dir=folder,
        ),
        clean_up=ray.shutdown,
    )
    try:
        yield
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def make_actors(
    policy: nn.Module | None,
    stamped: Mapping[str, Any],
    *,
    actors: int = 1,
    env: Callable[[], EnvBase] = make_counting_env,
    **options: Any,
) -> RayCollector:
    """A stock RayCollector of actors that hardly count; batches of 20 frames."""
    return RayCollector(
        [env] * actors,
        policy,
        frames_per_batch=20,
        collector_kwargs=dict(stamped),
        remote_configs={"num_cpus": 0.1, "memory": 1},
        **{"total_frames": 10_000, **options},
    )


def test_frames_of_actors_that_run_on_carry_the_version_that_acted() -> None:
    with ended(make_actors(make_small_canary(), STAMPED)) as collector:
        trainer, canary = with_canary(collector, size=11)
        with (
            left_as_it_was(trainer),
            pytest.raises(LayoutMismatch, match=r"shape \[11\] does not fit \[10\]"),
        ):
            SyncWeights(CANARY).register(trainer)
        trainer.canary = canary = make_small_canary()
        refuses_an_excluded_leaf(trainer)
        hook = SyncWeights(CANARY)
        with warnings.catch_warnings():
            warnings.simplefilter("error", RlsyncWarning)
            hook.register(trainer)
        assert "stamps are exact" in hook.plan.summary()
        assert hook.bound.endpoint.in_flight
        canary.fill(1)
        hook.publish()
        census, batches = Census(), iter(collector)
        for _ in range(12):
            census.take(next(batches))
            canary.fill(hook.version + 1)
            hook.publish()
            canary.fill(hook.version + 1)
            collector.update_policy_weights_(canary)  # by hand: a version, too
        census.assert_clean()
        assert hook.version == 25
        with left_as_it_was(trainer), pytest.raises(ConfigError, match="cannot be asked") as refused:
            VerifySync(hook).register(trainer)
        assert in_three_lines(refused.value)
        assert "RayBoardScheme" in refused.value.cure


@pytest.mark.thorough
def test_a_stock_trainer_runs_actors_and_each_frame_names_what_made_it() -> None:
    with ended(make_actors(make_policy(), STAMPED, sync=True, total_frames=60)) as collector:
        trainer = make_ppo_trainer(collector, total_frames=60, weight_update_map=ACTOR)
        hook = SyncWeights(ACTOR)
        hook.register(trainer)
        BoundStaleness(hook, 0, "raise").register(trainer)
        witness = Witness(trainer, hook, make_policy, "logits")
        trainer.train()
    assert witness.stamps() == [{1}, {2}, {3}]
    assert witness.agrees()


@pytest.mark.thorough
def test_actors_that_do_not_stamp_are_told_at_register_and_hooks_that_need_stamps_refuse() -> None:
    with ended(make_actors(make_small_canary(), {})) as collector:
        trainer, _ = with_canary(collector)
        hook = SyncWeights(CANARY)
        with pytest.warns(NoBoard, match="collector_kwargs={'track_policy_version': True}"):
            hook.register(trainer)
        assert "frames carry no policy_version" in hook.plan.summary()
        with left_as_it_was(trainer), pytest.raises(ConfigError, match="version that acted") as refused:
            BoundStaleness(hook, 1).register(trainer)
        assert in_three_lines(refused.value)


def test_a_board_refuses_actors() -> None:
    with pytest.raises(ConfigError, match="Ray starts workers on any node") as refused:
        make_actors(make_small_canary(), {}, weight_sync_schemes={"policy": BoardScheme()})
    assert in_three_lines(refused.value)
    assert "RayBoardScheme" in refused.value.cure
