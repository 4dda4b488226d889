"""Faults 10 and 21: a board costs a worker one descriptor, and running out of them is said aloud."""

from __future__ import annotations

import multiprocessing
import resource
from collections.abc import Callable
from multiprocessing.connection import Connection

import pytest
from torchrl.collectors import MultiSyncCollector

from rlsync import BoardScheme
from tests.tools.parts import CanaryPolicy, make_counting_env, make_small_canary, open_fds
from tests.tools.running import acted, running

ANSWER_TIMEOUT_S = 240.0
BOARD = "/memfd:rlsync-board"


def _answer(task: Callable[[], object]) -> object:
    """What `task` returns, or the error it ends with, in a process of its own."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_run, args=(task, theirs))
    process.start()
    try:
        assert ours.poll(ANSWER_TIMEOUT_S), "no answer in time"
        return ours.recv()
    finally:
        process.join(5)
        process.kill()
        process.join()


def _run(task: Callable[[], object], answer: Connection) -> None:
    try:
        answer.send(task())
    except Exception as error:
        answer.send(f"{type(error).__name__}: {error}")


def _limit(descriptors: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))


def _collect_a_thousand_tensors() -> dict[str, object]:
    multiprocessing.set_start_method("spawn", force=True)
    _limit(256)
    policy = CanaryPolicy(tensors=1000, size=10)
    found: dict[str, object] = {"versions": []}
    with running(
        MultiSyncCollector(
            [make_counting_env],
            policy,
            frames_per_batch=10,
            total_frames=-1,
            weight_sync_schemes={"policy": BoardScheme(prove=False)},
        )
    ) as collector:
        batches = iter(collector)
        for version in range(2, 8):
            policy.fill(version)
            collector.update_policy_weights_()
            found["versions"] += [acted(next(batches)) == {version}]
        worker = collector.procs[0].pid
        found["of the worker"] = sum(name.startswith(BOARD) for name in open_fds(worker))
        found["of the learner"] = sum(name.startswith(BOARD) for name in open_fds())
        found["in all"] = len(open_fds(worker))
    return found


@pytest.mark.processes
@pytest.mark.thorough
def test_a_thousand_tensors_cost_one_descriptor_and_work_under_a_limit_of_256() -> None:
    found = _answer(_collect_a_thousand_tensors)
    assert isinstance(found, dict), found
    assert found["versions"] == [True] * 6
    assert found["of the worker"] == found["of the learner"] == 1
    assert found["in all"] < 64


def _have_no_descriptor_left() -> None:
    _limit(3)  # fewer than are open already


def _build_workers_without_descriptors() -> None:
    MultiSyncCollector(
        [make_counting_env],
        make_small_canary(),
        frames_per_batch=10,
        total_frames=-1,
        weight_sync_schemes={"policy": BoardScheme(prove=False)},
        init_fn=_have_no_descriptor_left,
    )


def _build_a_learner_without_descriptors() -> None:
    _have_no_descriptor_left()
    BoardScheme(prove=False)


@pytest.mark.processes
@pytest.mark.parametrize("build", [_build_workers_without_descriptors, _build_a_learner_without_descriptors])
def test_running_out_of_descriptors_reaches_the_learner_as_what_it_is(
    build: Callable[[], None],
) -> None:
    assert "Too many open files" in str(_answer(build))
