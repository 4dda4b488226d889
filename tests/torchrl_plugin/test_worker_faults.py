"""Workers and learners that are killed or stopped: nobody waits for them, nothing of theirs stays."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from torchrl.collectors import BaseCollector, MultiAsyncCollector, MultiSyncCollector

from rlsync import AdoptionTimeout, BoardScheme, SyncWeights, WorkerLost
from rlsync.tensors.layout import Layout, LeafSpec
from rlsync.transport.board import BoardHandle, BoardReader
from tests.conftest import LeakCheck
from tests.tools.counted_board import CountedBoard
from tests.tools.parts import (
    CanaryPolicy,
    descendant_pids,
    is_alive,
    kill,
    make_dqn_trainer,
    make_small_canary,
    make_workers,
    stopped,
    wait_until,
)
from tests.tools.programs import Program, fresh_python
from tests.tools.running import in_three_lines, on_a_board, values

SOON_S = 60.0
PUSHES = 200


def _hooked(collector: BaseCollector, policy: CanaryPolicy) -> SyncWeights:
    trainer = make_dqn_trainer(collector)
    trainer.canary = policy
    hook = SyncWeights({"policy": "canary"})
    hook.register(trainer)
    return hook


def _push(hook: SyncWeights, policy: CanaryPolicy) -> None:
    """Publish many versions; each returns, whoever reads or does not."""
    for _ in range(PUSHES):
        policy.fill(hook.version + 1)
        receipt = hook.publish()
        assert not receipt.coalesced
        assert receipt.duration_s < SOON_S


# --------------------------------------------------------------------------- a worker, mid-rollout


@contextmanager
def _mid_rollout(adopt: str) -> Iterator[tuple[BaseCollector, Iterator, SyncWeights, CanaryPolicy]]:
    """Two asynchronous workers that hold their leases in the middle of a rollout."""
    policy = make_small_canary()
    with on_a_board(policy, MultiAsyncCollector, adopt=adopt, frames_per_batch=50) as collector:
        hook, batches = _hooked(collector, policy), iter(collector)
        policy.fill(hook.version + 1)
        hook.publish()
        while values(next(batches), "policy_version") != {2}:
            pass
        yield collector, batches, hook, policy


@pytest.mark.one_case
@pytest.mark.usefixtures("fork_workers")
@pytest.mark.parametrize("adopt", ["alias", "copy"])
def test_killing_a_worker_delays_no_publish_and_a_wait_names_it(adopt: str) -> None:
    with _mid_rollout(adopt) as (collector, _, hook, policy):
        pid = collector.procs[0].pid
        kill(pid)
        _push(hook, policy)
        started = time.monotonic()
        with pytest.raises(
            WorkerLost, match=f"worker 0 .pid {pid}, killed by SIGKILL, acted with version"
        ) as lost:
            hook.wait(60)
        assert time.monotonic() - started < SOON_S
        assert in_three_lines(lost.value)
        board = collector._weight_sync_schemes["policy"].board
        assert [status.state for status in board.status()] == ["dead", "running"]
        assert board.writer.slot_count <= 6  # what the dead had leased is free again


@pytest.mark.one_case
@pytest.mark.usefixtures("fork_workers")
@pytest.mark.parametrize("adopt", ["alias", "copy"])
def test_stopping_a_worker_delays_no_publish_and_a_wait_names_it_within_its_deadline(
    adopt: str,
) -> None:
    with _mid_rollout(adopt) as (collector, batches, hook, policy):
        pid = collector.procs[1].pid
        with stopped(pid):
            _push(hook, policy)
            started = time.monotonic()
            with pytest.raises(AdoptionTimeout, match=f"worker 1 .pid {pid}, stopped") as late:
                hook.wait(0.3)
            assert 0.3 <= time.monotonic() - started < SOON_S
            assert in_three_lines(late.value)
            assert hook.lag_versions() >= PUSHES
        batches, newest = iter(collector), hook.version
        assert wait_until(lambda: values(next(batches), "policy_version") == {newest}, SOON_S, poll_s=0)


# ----------------------------------------------------------------------------- the learner is killed


def _learn_for_ever(start_method: str) -> None:
    """Run as a script: workers that collect, until somebody kills this process."""
    multiprocessing.set_start_method(start_method, force=True)
    policy = make_small_canary()
    collector = make_workers(MultiAsyncCollector, policy, schemes={"policy": BoardScheme()})
    print("workers", *(process.pid for process in collector.procs), flush=True)  # noqa: T201
    for _ in collector:
        collector.update_policy_weights_()


@pytest.mark.slow
@pytest.mark.one_case
@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_no_process_is_left_when_the_learner_is_killed(start_method: str, tmp_path: Path) -> None:
    script = tmp_path / "learner.py"
    code = "from tests.torchrl_plugin.test_worker_faults import _learn_for_ever as learn\n"
    script.write_text(f"{code}if __name__ == '__main__': learn({start_method!r})")
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    learner = Program(str(script), cwd=tmp_path, env=env, start_method=start_method)
    family: set[int] = set()
    try:
        words = learner.stdout.readline().split()
        assert words[:1] == ["workers"]
        workers = {int(word) for word in words[1:]}
        family = descendant_pids(learner.pid) | workers
        time.sleep(0.5)  # they collect
        assert all(is_alive(pid) for pid in workers)
        learner.kill()
        learner.wait(SOON_S)
        assert wait_until(lambda: not any(is_alive(pid) for pid in family), SOON_S, poll_s=0.1)
    finally:
        learner.kill()
        learner.wait(SOON_S)
        learner.stdout.close()
        learner.stderr.close()
        for pid in family:
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)


# -------------------------------------------------------------------------- nothing is left behind

CYCLES = 200
LAYOUT = Layout.build({"policy": [LeafSpec("w", "parameter", (1000,), torch.float32)]})


def _read_for_ever(handle: BoardHandle, ready: Connection) -> None:
    held: list[torch.Tensor] = []
    reader = BoardReader(handle, lambda version, layout, views: held.extend(views) is None)
    ready.send(reader.adopt())
    time.sleep(60)


def _board_with_readers(readers: int) -> None:
    """A board, two processes that read it and are killed with their lease, and a publish past them."""
    board = CountedBoard()
    board.lay_out(LAYOUT)
    board.publish([torch.ones(1000)])
    fork, ends, children = multiprocessing.get_context("fork"), [], []
    for _ in range(readers):
        ours, theirs = fork.Pipe()
        child = fork.Process(target=_read_for_ever, args=(board.handle, theirs))
        child.start()
        theirs.close()
        ends.append(ours)
        children.append(child)
    for end in ends:
        assert end.poll(SOON_S)
        assert end.recv() == 1
        end.close()
    for child in children:
        child.kill()
        child.join(SOON_S)
        child.close()
    assert board.publish([torch.ones(1000)]) == 2
    assert [status.alive for status in board.status()] == [False] * readers
    board.close()


def _collector_with_a_killed_worker(kind: Callable[..., BaseCollector]) -> None:
    with on_a_board(make_small_canary(), kind) as collector:
        next(iter(collector))
        collector.update_policy_weights_()
        kill(collector.procs[0].pid)
        collector.update_policy_weights_()


@pytest.mark.slow
@pytest.mark.thorough
def test_two_hundred_boards_whose_readers_are_killed_leave_nothing_behind(
    no_leaks: LeakCheck,
) -> None:
    _board_with_readers(2)
    no_leaks.rebase()
    for _ in range(CYCLES):
        _board_with_readers(2)
    assert not no_leaks.leaks()


@pytest.mark.thorough
@pytest.mark.usefixtures("fork_workers")
@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
def test_five_collectors_whose_workers_are_killed_leave_nothing_behind(
    kind: type, no_leaks: LeakCheck
) -> None:
    _collector_with_a_killed_worker(kind)
    no_leaks.rebase()
    for _ in range(5):
        _collector_with_a_killed_worker(kind)


@pytest.mark.thorough
def test_a_script_that_leaves_its_collector_to_the_end_of_the_interpreter_says_nothing() -> None:
    code = (
        "import multiprocessing\n"
        "from tests.torchrl_plugin.test_worker_faults import *\n"
        "multiprocessing.set_start_method('fork', force=True)\n"
        "schemes = {'policy': BoardScheme()}\n"
        "collector = make_workers(MultiSyncCollector, make_small_canary(), schemes=schemes)\n"
        "next(iter(collector))\n"
        "collector.shutdown()\n"
    )
    done = fresh_python("-c", code)
    assert "Exception ignored" not in done.stderr
