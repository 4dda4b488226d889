"""Collectors of torch.distributed and RPC: on a board, stamped by TorchRL's own schemes, or refused."""

from __future__ import annotations

import socket
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchrl.collectors import BaseCollector, MultiSyncCollector
from torchrl.collectors.distributed import DistributedCollector, DistributedSyncCollector
from torchrl.envs import EnvBase
from torchrl.trainers import Trainer

from rlsync import (
    BoardScheme,
    BoundStaleness,
    ConfigError,
    LayoutMismatch,
    NoBoard,
    PublishError,
    RlsyncWarning,
    Source,
    SyncWeights,
    VerifySync,
    WatchWorkers,
    WeightBoard,
    WorkerLost,
)
from rlsync.torchrl_plugin.compat.distributed import DistributedWorkers, workers_of
from tests.laws.test_canary import Census
from tests.tools.parts import (
    CanaryPolicy,
    child_pids,
    make_counting_env,
    make_dqn_trainer,
    make_env_with_module,
    make_policy,
    make_ppo_trainer,
    make_small_canary,
    make_workers,
    wait_until,
)
from tests.tools.programs import run_program
from tests.tools.running import Witness, acted, in_three_lines, running, values

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("same_rendezvous")]

CANARY = {"policy": "canary"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def make_nodes(
    kind: type[BaseCollector],
    policy: nn.Module | None = None,
    *,
    env: Callable[[], EnvBase] = make_counting_env,
    workers: int = 2,
    **options: Any,
) -> BaseCollector:
    """A stock collector with workers on this host; batches of 20 frames."""
    options = {"frames_per_batch": 20, "total_frames": 10_000, "launcher": "mp", **options}
    return kind([env] * workers, policy, tcp_port=free_port(), **options)


@contextmanager
def ended(collector: BaseCollector) -> Iterator[BaseCollector]:
    try:
        yield collector
    finally:
        collector.shutdown()


@contextmanager
def killed(collector: BaseCollector) -> Iterator[BaseCollector]:
    """A collector with TorchRL's own scheme: its workers would take 5 s to leave."""
    try:
        yield collector
    finally:
        for job in collector.jobs:
            job.kill()
            job.join()
        collector._shutdown = True
        torch.distributed.destroy_process_group()


def on_a_board(policy: nn.Module | None, **options: Any) -> Any:
    schemes = options.pop("schemes", None) or {"policy": BoardScheme()}
    return ended(make_nodes(DistributedCollector, policy, weight_sync_schemes=schemes, **options))


def with_canary(collector: BaseCollector, **canary: int) -> tuple[Trainer, CanaryPolicy]:
    trainer = make_dqn_trainer(collector)
    trainer.canary = CanaryPolicy(**{"tensors": 4, "size": 10, **canary})
    return trainer, trainer.canary


# --------------------------------------------------------------------------------- on a board


@pytest.mark.seconds
@pytest.mark.parametrize("sync", [True, False], ids=["sync", "async"])
@pytest.mark.one_case
def test_frames_of_a_distributed_collector_on_a_board_carry_the_version_that_acted(sync: bool) -> None:
    learners = make_small_canary()
    with on_a_board(learners, sync=sync) as collector:
        trainer, canary = with_canary(collector)
        hook = SyncWeights(CANARY)
        hook.register(trainer)
        assert hook.plan.transport == "board: 2 worker processes, adopted by alias, one copy a publish"
        assert hook.bound.endpoint.in_flight is not sync
        census, stop = Census(), threading.Event()

        def publish() -> None:
            while not stop.is_set():
                canary.fill(hook.version + 1)
                hook.publish()

        canary.fill(hook.version + 1)
        hook.publish()
        publishing = threading.Thread(target=publish)
        publishing.start()
        try:
            for _, batch in zip(range(20), collector, strict=False):
                census.take(batch)
        finally:
            stop.set()
            publishing.join()
    census.assert_clean()
    assert learners.canary.low_high() == (0, 0)
    assert not any(weight.is_shared() for weight in learners.canary.weights), "the learner's policy was moved"


@pytest.mark.seconds
def test_a_stock_trainer_runs_a_distributed_collector_and_each_frame_names_what_made_it() -> None:
    with ended(
        make_nodes(
            DistributedCollector,
            make_policy(),
            sync=True,
            total_frames=60,
            init_random_frames=0,
            weight_sync_schemes={"policy": BoardScheme()},
        )
    ) as collector:
        trainer = make_ppo_trainer(
            collector, total_frames=60, weight_update_map={"policy": "loss_module.actor_network"}
        )
        hook = SyncWeights({"policy": "loss_module.actor_network"})
        hook.register(trainer)
        BoundStaleness(hook, 0, "raise").register(trainer)
        VerifySync(hook).register(trainer)
        witness = Witness(trainer, hook, make_policy, "logits")
        trainer.train()
    assert witness.stamps() == [{2}, {3}, {4}]
    assert witness.agrees()


@pytest.mark.seconds
def test_two_destinations_of_a_distributed_collector_are_one_version_and_a_dead_worker_is_told() -> None:
    board = WeightBoard()
    schemes = {"env.transform[0].module": board.scheme(), "policy": board.scheme("copy")}
    options = {"policy_factory": make_small_canary, "env": make_env_with_module, "sync": True}
    with on_a_board(None, schemes=schemes, **options) as collector:
        trainer, canary = with_canary(collector)
        trainer.scaler = make_env_with_module().transform[0].module
        hook = SyncWeights({"policy": "canary", "env.transform[0].module": "scaler"})
        hook.register(trainer)
        canary.fill(7)
        trainer.scaler.fill(7)
        hook.publish()
        batch = next(iter(collector))
        assert acted(batch) == {7}
        assert values(batch, "next", "transform_min") == values(batch, "next", "transform_max") == {7}
        collector.update_policy_weights_()
        assert hook.version == 2
        collector.jobs[1].kill()
        with pytest.raises(WorkerLost, match=r"worker 1 .*killed by SIGKILL"):
            hook.wait(30)
        # TorchRL's own shutdown waits for the dead one, and raises.
        workers_of(collector, DistributedWorkers).shutdown(1.0)


def make_no_env() -> EnvBase:
    raise RuntimeError("there is no such environment")


@pytest.mark.seconds
def test_a_node_that_cannot_make_its_environment_is_told_and_no_process_is_left() -> None:
    env = [make_counting_env, make_no_env]
    scheme = BoardScheme()
    with pytest.raises(
        WorkerLost, match=r"worker 1 .*exited with status 1.* ended before it was ready"
    ) as lost:
        DistributedCollector(
            env,
            make_small_canary(),
            frames_per_batch=20,
            total_frames=100,
            launcher="mp",
            tcp_port=free_port(),
            weight_sync_schemes={"policy": scheme},
        )
    assert in_three_lines(lost.value)
    assert wait_until(lambda: not child_pids(), 60)
    assert not torch.distributed.is_initialized()


REFUSED_BOARDS: dict[str, tuple[dict[str, Any], str]] = {
    "another host": ({"launcher": "submitit"}, "launcher='submitit' may start workers on others"),
    "workers of workers": ({"collector_class": "sync"}, "the workers of a MultiSyncCollector in each node"),
    "one at a time, after each batch": ({"update_after_each_batch": True}, "to one at a time"),
    "one at a time, every so often": ({"update_interval": 2}, "to one at a time"),
    "one at a time, when it is late": ({"max_weight_update_interval": 2}, "to one at a time"),
}


@pytest.mark.parametrize(("options", "told"), REFUSED_BOARDS.values(), ids=REFUSED_BOARDS)
def test_a_board_refuses_nodes_that_it_does_not_reach_before_they_start(
    options: dict[str, Any], told: str
) -> None:
    before = child_pids()
    with pytest.raises(ConfigError, match=told) as refused:
        make_nodes(
            DistributedCollector,
            make_small_canary(),
            weight_sync_schemes={"policy": BoardScheme()},
            **options,
        )
    assert in_three_lines(refused.value)
    assert child_pids() == before


RPC = str(Path(__file__).parents[1] / "tools" / "rpc_program.py")


@pytest.mark.seconds
def test_a_board_refuses_rpc_and_ends_the_processes_that_torchrl_started(tmp_path: Path) -> None:
    ran = run_program(RPC, "refused", cwd=tmp_path)
    what, where, cure, left = ran.stdout.splitlines()
    assert what == (
        "a board must know a collector before its workers start, and RPCCollector starts them first"
    ), ran.stderr
    assert where.strip() == "where  weight_sync_schemes['policy'] of RPCCollector"
    assert "DistributedCollector(launcher='mp')" in cure
    assert "Ray" in cure
    assert left == "left: False"
    assert ran.returncode == 0, ran.stderr


# ------------------------------------------------------------------------ TorchRL's own schemes


def hooks_of(trainer: Trainer) -> tuple[list[object], list[str]]:
    """The operations and the modules of a trainer."""
    ops = [op for name, held in vars(trainer).items() if name.endswith("_ops") for op in held]
    return ops, list(trainer._modules)


@contextmanager
def left_as_it_was(trainer: Trainer) -> Iterator[None]:
    before = hooks_of(trainer)
    yield
    assert hooks_of(trainer) == before


def refuses_an_excluded_leaf(trainer: Trainer) -> None:
    """TorchRL's workers receive one tensor for each leaf that they have."""
    one_less = {"policy": Source("canary", exclude=("canary.weights.1",))}
    with left_as_it_was(trainer), pytest.raises(LayoutMismatch, match=r"canary\.weights\.1 ") as refused:
        SyncWeights(one_less).register(trainer)
    assert in_three_lines(refused.value)


@pytest.mark.seconds
def test_with_torchrls_own_scheme_workers_of_rpc_that_wait_for_the_learner_have_exact_stamps(
    tmp_path: Path,
) -> None:
    ran = run_program(RPC, "stamped", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert "stamps are exact" in ran.stdout


@pytest.mark.seconds
def test_with_torchrls_own_scheme_nodes_that_wait_for_the_learner_have_exact_stamps() -> None:
    with killed(make_nodes(DistributedCollector, make_small_canary(), sync=True, workers=1)) as collector:
        trainer, canary = with_canary(collector, size=11)
        with (
            left_as_it_was(trainer),
            pytest.raises(LayoutMismatch, match=r"shape \[11\] does not fit \[10\]"),
        ):
            SyncWeights(CANARY).register(trainer)
        trainer.canary = canary = make_small_canary()
        hook = SyncWeights(CANARY)
        with warnings.catch_warnings():
            warnings.simplefilter("error", RlsyncWarning)
            hook.register(trainer)
        assert "stamps are exact" in hook.plan.summary()
        BoundStaleness(hook, 1, "raise").register(trainer)
        census, batches = Census(), iter(collector)
        for _ in range(10):
            canary.fill(hook.version + 1)
            hook.publish()
            census.take(next(batches))
        census.assert_clean()
        collector.update_policy_weights_(canary.fill(hook.version + 1))
        assert hook.version == 11, "an update by hand is a version, too"
        census.take(next(batches))
        census.assert_clean()
        with pytest.raises(PublishError, match="with one version") as refused:
            collector.update_policy_weights_(canary, worker_ids=[0])
        assert in_three_lines(refused.value)


@pytest.mark.seconds
@pytest.mark.parametrize("sync", [True, False], ids=["sync", "async"])
def test_with_torchrls_own_scheme_a_map_that_leaves_a_leaf_out_is_refused_for_nodes_would_wait_for_it(
    sync: bool,
) -> None:
    with killed(make_nodes(DistributedCollector, make_small_canary(), sync=sync, workers=1)) as collector:
        refuses_an_excluded_leaf(with_canary(collector)[0])


@pytest.mark.seconds
def test_with_torchrls_own_scheme_nodes_that_run_on_have_no_stamps_and_the_hook_says_so() -> None:
    with killed(make_nodes(DistributedCollector, make_small_canary(), workers=1)) as collector:
        trainer, _ = with_canary(collector)
        hook = SyncWeights(CANARY)
        with pytest.warns(NoBoard, match="applies weights while a rollout runs") as told:
            hook.register(trainer)
        assert "weight_sync_schemes={'policy': rlsync.BoardScheme()}" in str(told[0].message)
        assert "no version can be named for a frame" in hook.plan.summary()
        for other in (BoundStaleness(hook, 1), VerifySync(hook), WatchWorkers()):
            with left_as_it_was(trainer), pytest.raises(ConfigError) as refused:
                other.register(trainer)
            assert in_three_lines(refused.value)


@pytest.mark.seconds
def test_a_collector_that_sends_by_itself_refuses_the_hook_and_says_which_one_takes_it() -> None:
    with killed(
        make_nodes(DistributedSyncCollector, make_small_canary(), workers=1, total_frames=20)
    ) as collector:
        trainer, _ = with_canary(collector)
        with left_as_it_was(trainer), pytest.raises(ConfigError, match="takes no weights") as refused:
            SyncWeights(CANARY).register(trainer)
        assert in_three_lines(refused.value)
        assert "DistributedCollector(sync=True, launcher='mp'" in refused.value.cure
        for _ in collector:
            pass


# ------------------------------------------------------------------------- TorchRL's interface

INTERFACE: dict[str, Callable[[], object]] = {
    "a model": lambda: BoardScheme().init_on_sender(
        model_id="policy", model=make_small_canary(), devices=[0]
    ),
    "weights for each worker": lambda: BoardScheme().init_on_sender(params_map={0: {}, 1: {}}),
    "nothing": lambda: BoardScheme().init_on_sender(),
    "a scheme for each worker's weights": lambda: BoardScheme(per_worker_weights=True),
}


@pytest.mark.parametrize("use", INTERFACE.values(), ids=INTERFACE)
def test_what_a_board_does_not_serve_of_torchrls_interface_is_refused(use: Callable[[], object]) -> None:
    with pytest.raises(ConfigError, match=r"a board (serves|has)") as refused:
        use()
    assert in_three_lines(refused.value)


def test_weights_by_worker_number_are_refused_by_a_board() -> None:
    weights = make_small_canary()
    with (
        running(
            make_workers(MultiSyncCollector, make_small_canary(), schemes={"policy": BoardScheme()})
        ) as workers,
        pytest.raises(PublishError, match="one newest version for all workers") as refused,
    ):
        workers.update_policy_weights_({0: weights, 1: weights})
    assert in_three_lines(refused.value)
