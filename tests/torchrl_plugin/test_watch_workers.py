"""A learner that waits for its workers is told when one dies, stops or hangs, and none is left."""

from __future__ import annotations

import gc
import os
import re
import signal
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torchrl.collectors import BaseCollector, MultiAsyncCollector, MultiSyncCollector
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.trainers import Trainer

from rlsync import AdoptionTimeout, BoardScheme, SyncWeights, WatchWorkers, WorkerLost
from rlsync.torchrl_plugin.collectors.choose import endpoint_of
from rlsync.torchrl_plugin.ending import watch
from rlsync.torchrl_plugin.ending.waits import lost_workers
from tests.tools.parts import (
    FRAMES_PER_BATCH,
    CanaryPolicy,
    CountingEnv,
    child_pids,
    is_alive,
    kill,
    make_continuous_env,
    make_continuous_policy,
    make_dqn_trainer,
    make_free_sac_trainer,
    make_small_canary,
    make_workers,
    stopped,
    wait_until,
)
from tests.tools.running import ACTOR, in_three_lines, on_a_board, running, values

pytestmark = pytest.mark.usefixtures("fork_workers", "_little_time_to_leave")

IDLE_S = 1.0  # so long after a batch all workers wait for the learner
SILENT_S = 4.0  # longer than a loaded machine keeps a process waiting
NEVER_S = 600.0
SOON_S = 30.0
FOR_EVER = 10**9
both_kinds = pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])


@pytest.fixture
def _little_time_to_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "END_WITHIN_S", 1.0)


def _watched(
    collector: BaseCollector, policy: CanaryPolicy, *, frames: int = FOR_EVER, timeout_s: float = NEVER_S
) -> Trainer:
    """A real trainer that publishes `policy` after every batch, with a watch over its workers."""
    trainer = make_dqn_trainer(collector, total_frames=frames)
    trainer.canary = policy
    SyncWeights({"policy": "canary"}, max_unchanged_publishes=None).register(trainer)
    WatchWorkers(timeout_s).register(trainer)
    return trainer


def _at_batch(trainer: Trainer, number: int, fault: Callable[[], object]) -> None:
    """Call `fault` when batch `number` is being learned from."""
    count = iter(range(1, FOR_EVER))
    trainer.register_op("post_steps", lambda: fault() if next(count) == number else None)


def _pids(collector: BaseCollector) -> list[int]:
    return [process.pid for process in collector.procs]


@contextmanager
def _ends_soon(pids: list[int]) -> Iterator[None]:
    """The block ends within the deadline, and the workers with it, without anybody's shutdown."""
    started = time.monotonic()
    yield
    assert time.monotonic() - started < SOON_S
    assert wait_until(lambda: not any(is_alive(pid) for pid in pids), 20.0)


def _signal(sent: signal.Signals, *pids: int) -> None:
    for pid in pids:
        os.kill(pid, sent)


def _stop(pid: int) -> None:
    _signal(signal.SIGSTOP, pid)


# ------------------------------------------------------------------- iterated: sync and async


@pytest.mark.one_case
@both_kinds
def test_a_worker_killed_while_the_learner_learns_is_named_at_the_next_batch(kind: type) -> None:
    policy = make_small_canary()
    with on_a_board(policy, kind) as collector:
        trainer, pids = _watched(collector, policy), _pids(collector)
        _at_batch(trainer, 3, lambda: kill(pids[1]))
        with _ends_soon(pids), pytest.raises(WorkerLost) as lost:
            trainer.train()
    said = str(lost.value)
    assert f"worker 1 (pid {pids[1]}, killed by SIGKILL, acted with version" in said
    assert str(pids[0]) not in said, "TorchRL ends the other worker; it was not lost"
    assert in_three_lines(lost.value)


@pytest.mark.one_case
@both_kinds
def test_a_worker_killed_before_it_answers_a_question_is_named(kind: type) -> None:
    policy = make_small_canary()
    with on_a_board(policy, kind) as collector:
        trainer, pids = _watched(collector, policy), _pids(collector)

        def ask() -> None:
            _stop(pids[1])
            threading.Timer(0.5, kill, [pids[1]]).start()
            collector.state_dict()

        _at_batch(trainer, 3, ask)
        with _ends_soon(pids), pytest.raises(WorkerLost) as lost:
            trainer.train()
    assert f"worker 1 (pid {pids[1]}, killed by SIGKILL, acted with version" in str(lost.value)
    assert in_three_lines(lost.value)


@pytest.mark.one_case
@both_kinds
def test_a_worker_killed_before_the_training_begins_is_named(kind: type) -> None:
    """TorchRL seeds the workers first, after a look for dead ones in which it closes those that still run."""
    policy = make_small_canary()
    with on_a_board(policy, kind) as collector:
        trainer, pids = _watched(collector, policy), _pids(collector)
        kill(pids[1])
        assert wait_until(lambda: not collector.procs[1].is_alive(), SOON_S)
        with _ends_soon(pids), pytest.raises(WorkerLost, match=f"worker 1 .pid {pids[1]}, killed by") as lost:
            trainer.train()
    assert in_three_lines(lost.value)


def test_workers_that_were_ended_because_another_one_died_are_not_named() -> None:
    with on_a_board(make_small_canary()) as collector:
        pids, publisher = _pids(collector), endpoint_of(collector).publisher
        _signal(signal.SIGTERM, pids[0])
        kill(pids[1])
        assert wait_until(lambda: not any(process.is_alive() for process in collector.procs), 30.0)
        lost = lost_workers(publisher, publisher.transport.status(), "a test")
    assert f"worker 1 (pid {pids[1]}, killed by SIGKILL" in str(lost)
    assert str(pids[0]) not in str(lost)


@both_kinds
def test_a_worker_killed_while_the_learner_waits_for_it_is_named_at_once(kind: type) -> None:
    policy = make_small_canary()
    with on_a_board(policy, kind) as collector:
        trainer, pids = _watched(collector, policy), _pids(collector)

        def keep_waiting_then_kill() -> None:
            _signal(signal.SIGSTOP, *pids)
            threading.Timer(0.5, _signal, (signal.SIGKILL, pids[0])).start()

        _at_batch(trainer, 3, keep_waiting_then_kill)
        with _ends_soon(pids), pytest.raises(WorkerLost) as lost:
            trainer.train()
    assert f"worker 0 (pid {pids[0]}, killed by SIGKILL, acted with version" in str(lost.value)
    # The watch sees it before TorchRL does, unless TorchRL asks for a batch only now and finds a broken pipe.
    assert lost.value.__cause__ is None or isinstance(lost.value.__cause__, ConnectionError)
    assert in_three_lines(lost.value)


def test_a_stopped_worker_ends_a_synchronous_training_and_is_named_alone() -> None:
    policy = make_small_canary()
    with on_a_board(policy) as collector:
        trainer, pids = _watched(collector, policy, timeout_s=SILENT_S), _pids(collector)
        _at_batch(trainer, 3, lambda: _signal(signal.SIGSTOP, pids[1]))
        shutdown, left = collector.shutdown, []

        def shut_down(**keys: object) -> None:
            left.append(wait_until(lambda: not is_alive(pids[1]), 1.0))
            shutdown(**keys)

        collector.shutdown = shut_down
        with _ends_soon(pids), pytest.raises(AdoptionTimeout) as late:
            trainer.train()
    assert left[0], "what is stopped cannot leave, so nobody is to wait for it"
    said = str(late.value)
    assert f"worker 1 (pid {pids[1]}, stopped, acts with version" in said
    assert str(pids[0]) not in said
    assert in_three_lines(late.value)


@pytest.mark.parametrize("learns_s", [0.0, pytest.param(SILENT_S / 4, marks=pytest.mark.thorough)])
def test_a_stopped_worker_ends_an_asynchronous_training_although_another_delivers(learns_s: float) -> None:
    """Whether the learner waits for frames, or they for it: then it never finds the queue empty."""
    policy = make_small_canary()
    with on_a_board(policy, MultiAsyncCollector, workers=3) as collector:
        trainer, pids = _watched(collector, policy, timeout_s=SILENT_S), _pids(collector)

        def stop_one_that_waits() -> None:
            time.sleep(IDLE_S)  # stopped while it sends a batch, it would hold the lock of all workers
            _signal(signal.SIGSTOP, pids[1])

        _at_batch(trainer, 6, stop_one_that_waits)
        trainer.register_op("post_steps", lambda: time.sleep(learns_s))
        with _ends_soon(pids), pytest.raises(AdoptionTimeout) as late:
            trainer.train()
    said = str(late.value)
    assert f"worker 1 (pid {pids[1]}, stopped, acts with version" in said
    assert str(pids[0]) not in said
    assert str(pids[2]) not in said


def test_a_worker_stopped_before_its_first_batch_is_read_does_not_hold_the_read() -> None:
    """TorchRL's first message of a worker names tensors, and the reader asks the sender for their memory."""
    policy = make_small_canary()
    with on_a_board(policy, MultiAsyncCollector) as collector:
        _watched(collector, policy, timeout_s=SILENT_S)
        pids, batches = _pids(collector), iter(collector)
        next(batches)
        assert wait_until(lambda: collector.queue_out.qsize() >= 1, 60.0)
        _signal(signal.SIGSTOP, *pids)
        with _ends_soon(pids), pytest.raises(AdoptionTimeout, match=r"worker \d .pid \d+, stopped") as late:
            list(batches)
    assert in_three_lines(late.value)


class _HangingEnv(CountingEnv):
    """Never comes back from a step of a later rollout, in the worker that ought to hang."""

    def __init__(self, hangs: bool) -> None:
        super().__init__()
        self.left = 3 * FRAMES_PER_BATCH if hangs else FOR_EVER

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.left -= 1
        if self.left < 0:
            time.sleep(600)
        return super()._step(tensordict)


def test_a_worker_that_hangs_in_its_environment_is_named_and_those_that_wait_are_not() -> None:
    policy = make_small_canary()
    with running(
        MultiSyncCollector(
            [partial(_HangingEnv, hangs) for hangs in (False, True, False)],
            policy,
            frames_per_batch=3 * FRAMES_PER_BATCH,
            total_frames=-1,
            weight_sync_schemes={"policy": BoardScheme()},
        )
    ) as collector:
        trainer, pids = _watched(collector, policy, timeout_s=SILENT_S), _pids(collector)
        with _ends_soon(pids), pytest.raises(AdoptionTimeout) as late:
            trainer.train()
    said = str(late.value)
    assert f"worker 1 (pid {pids[1]}, running, acts with version" in said
    assert str(pids[0]) not in said
    assert str(pids[2]) not in said


# ----------------------------------------------------------------- what a worker itself raises


class _BreakingEnv(CountingEnv):
    """Breaks down after some steps."""

    left = 25

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("the emulator broke down")
        return super()._step(tensordict)


@pytest.mark.one_case
@both_kinds
def test_an_error_in_an_environment_ends_the_training_and_stands_on_stderr(
    kind: type, capfd: pytest.CaptureFixture[str]
) -> None:
    policy = make_small_canary()
    with on_a_board(policy, kind, env=_BreakingEnv) as collector:
        trainer, pids = _watched(collector, policy), _pids(collector)
        with _ends_soon(pids), pytest.raises(WorkerLost, match="exited with status 1, acted with") as lost:
            trainer.train()
    assert in_three_lines(lost.value)
    assert isinstance(lost.value, RuntimeError), "as without a board, so what caught that goes on to"
    assert "RuntimeError: the emulator broke down" in capfd.readouterr().err


class _GrowingPolicy(CanaryPolicy):
    """Replaces one of its weights by a longer one after some calls, in the worker only."""

    learner_pid = 0
    left = 25

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.left -= 1
        if self.left == 0 and os.getpid() != self.learner_pid:
            self.canary.weights[0] = nn.Parameter(torch.zeros(11))
        return super().forward(tensordict)


@pytest.mark.one_case
@both_kinds
def test_weights_that_do_not_fit_a_workers_module_end_the_training_and_are_named_on_stderr(
    kind: type, capfd: pytest.CaptureFixture[str]
) -> None:
    policy = _GrowingPolicy(tensors=4, size=10)
    policy.learner_pid = os.getpid()
    with on_a_board(policy, kind) as collector:
        trainer, pids = _watched(collector, policy), _pids(collector)
        with _ends_soon(pids), pytest.raises(WorkerLost, match="exited with status 1, acted with"):
            trainer.train()
    told = capfd.readouterr().err
    assert "LayoutMismatch" in told
    assert "canary.weights.0" in told


def _env_that_cannot_be_made() -> CountingEnv:
    if os.getpid() != LEARNER_PID:
        raise ValueError("no such level")
    return CountingEnv()


def _env_with_an_error_of_two_arguments() -> CountingEnv:
    if os.getpid() != LEARNER_PID:
        raise subprocess.CalledProcessError(3, "simulator")
    return CountingEnv()


LEARNER_PID = os.getpid()


@pytest.mark.parametrize(
    ("env", "error", "says"),
    [
        (_env_that_cannot_be_made, ValueError, "no such level"),
        (_env_with_an_error_of_two_arguments, RuntimeError, "CalledProcessError: Command 'simulator' .*3"),
    ],
)
def test_what_a_worker_raises_that_cannot_be_made_is_raised_from_an_error_that_names_it(
    env: Callable[[], CountingEnv], error: type[Exception], says: str
) -> None:
    """As TorchRL does; a class that does not take a text alone is named in a RuntimeError."""
    with pytest.raises(error, match=f"^{says}") as raised:
        make_workers(MultiSyncCollector, make_small_canary(), schemes={"policy": BoardScheme()}, env=env)
    lost = raised.value.__cause__
    assert isinstance(lost, WorkerLost)
    assert in_three_lines(lost)
    assert re.search(rf"^worker [01] .*{says}", str(lost))


def _env_that_is_never_made() -> CountingEnv:
    if os.getpid() != LEARNER_PID:
        time.sleep(600)
    return CountingEnv()


def _env_that_kills() -> CountingEnv:
    if os.getpid() != LEARNER_PID:
        _signal(signal.SIGKILL, os.getpid())
    return CountingEnv()


@pytest.mark.one_case
@both_kinds
@pytest.mark.parametrize(
    ("env", "error", "says"),
    [
        (_env_that_is_never_made, AdoptionTimeout, r"worker 1 .pid \d+. is not ready after 5 s"),
        (_env_that_kills, WorkerLost, r"worker 1 .pid \d+, killed by SIGKILL. ended before it was ready"),
    ],
)
def test_a_worker_that_never_starts_ends_the_construction_and_is_named(
    kind: type, env: Callable[[], CountingEnv], error: type[Exception], says: str
) -> None:
    before = child_pids()
    start_timeout_s = 5.0 if error is AdoptionTimeout else 240.0
    with pytest.raises(error, match=says) as refusal:
        kind(
            [CountingEnv, env],
            make_small_canary(),
            frames_per_batch=FRAMES_PER_BATCH,
            total_frames=-1,
            weight_sync_schemes={"policy": BoardScheme(start_timeout_s=start_timeout_s)},
        )
    assert in_three_lines(refusal.value)
    assert child_pids() <= before


class _AsksForMore(nn.Module):
    """A policy that TorchRL cannot wrap: the environment has nothing for its second argument."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)

    def forward(self, observation: Tensor, other_stuff: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(observation), other_stuff.sum()


@both_kinds
@pytest.mark.one_case
def test_a_worker_that_cannot_be_built_raises_what_it_raised(kind: type) -> None:
    before = child_pids()
    wrapping = "Arguments to policy.forward are incompatible|Failed to wrap the policy"
    with pytest.raises(TypeError, match=wrapping) as refusal:  # as in TorchRL's test_auto_wrap_error
        kind(
            [CountingEnv] * 2,
            _AsksForMore(),
            frames_per_batch=FRAMES_PER_BATCH,
            total_frames=-1,
            weight_sync_schemes={"policy": BoardScheme()},
        )
    assert isinstance(refusal.value.__cause__, WorkerLost)
    assert child_pids() <= before


# --------------------------------------------------------- workers that fill a buffer themselves


@contextmanager
def _free_running(
    storage: Callable[[int], LazyTensorStorage] = LazyTensorStorage, timeout_s: float = NEVER_S
) -> Iterator[Trainer]:
    """A stock trainer with `async_collection`: its loop goes round whether frames come or not."""
    actor = make_continuous_policy()
    buffer = TensorDictReplayBuffer(storage=storage(5000), batch_size=10, shared=True)
    with running(
        MultiAsyncCollector(
            [make_continuous_env] * 2,
            actor,
            frames_per_batch=FRAMES_PER_BATCH,
            total_frames=-1,
            replay_buffer=buffer,
            weight_sync_schemes={"policy": BoardScheme()},
        )
    ) as collector:
        trainer = make_free_sac_trainer(collector, actor, buffer, total_frames=FOR_EVER)
        SyncWeights(ACTOR).register(trainer)
        WatchWorkers(timeout_s).register(trainer)
        yield trainer


def test_a_killed_worker_that_fills_a_buffer_ends_the_training_at_once() -> None:
    with _free_running() as trainer:
        pids = _pids(trainer.collector)
        _at_batch(trainer, 3, lambda: kill(pids[1]))
        with _ends_soon(pids), pytest.raises(WorkerLost) as lost:
            trainer.train()
    assert f"worker 1 (pid {pids[1]}, killed by SIGKILL, acted with version" in str(lost.value)
    assert in_three_lines(lost.value)


@pytest.mark.thorough
def test_a_stopped_worker_that_fills_a_buffer_is_named_although_the_other_goes_on() -> None:
    with _free_running(timeout_s=SILENT_S) as trainer:
        pids = _pids(trainer.collector)
        _at_batch(trainer, 3, lambda: _signal(signal.SIGSTOP, pids[1]))
        with _ends_soon(pids), pytest.raises(AdoptionTimeout) as late:
            trainer.train()
    assert f"worker 1 (pid {pids[1]}, stopped, acts with version" in str(late.value)
    assert str(pids[0]) not in str(late.value)
    assert in_three_lines(late.value)


@pytest.mark.one_case
@pytest.mark.parametrize(("fault", "error"), [(kill, WorkerLost), (_stop, AdoptionTimeout)])
def test_a_trainer_that_waits_for_the_first_frame_of_a_buffer_does_not_wait_for_ever(
    fault: Callable[[int], None], error: type[Exception]
) -> None:
    with _free_running(timeout_s=SILENT_S) as trainer:
        pids = _pids(trainer.collector)
        for pid in pids:
            fault(pid)
        with _ends_soon(pids), pytest.raises(error, match=f"worker 0 .pid {pids[0]}, "):
            trainer.train()


def test_a_loop_that_only_publishes_is_told_of_a_dead_worker_that_filled_its_buffer() -> None:
    with _free_running() as trainer:
        collector, pids = trainer.collector, _pids(trainer.collector)
        collector.start()
        assert wait_until(lambda: trainer.replay_buffer.write_count > 0, SOON_S)
        kill(pids[1])
        with _ends_soon(pids), pytest.raises(WorkerLost, match=f"worker 1 .pid {pids[1]}, killed by SIGKILL"):
            collector.update_policy_weights_()


@pytest.mark.parametrize(
    ("fault", "error", "state"),
    [(kill, WorkerLost, "killed by SIGKILL"), (_stop, AdoptionTimeout, "stopped")],
)
def test_a_pause_that_waits_in_vain_names_the_worker(
    fault: Callable[[int], object], error: type[Exception], state: str
) -> None:
    with _free_running(timeout_s=SILENT_S) as trainer:
        collector, pids = trainer.collector, _pids(trainer.collector)
        collector.start()
        assert wait_until(lambda: trainer.replay_buffer.write_count > 0, SOON_S)
        fault(pids[1])
        with _ends_soon(pids), pytest.raises(error, match=f"worker 1 .pid {pids[1]}, {state}") as lost:
            with collector.pause():
                pass
    assert in_three_lines(lost.value)
    assert "worker 0" not in str(lost.value)


class _DeadlyStorage(LazyTensorStorage):
    """Kills the worker that writes to it for the third time, which holds the buffer's lock then."""

    left = 3

    def set(self, *args: object, **kwargs: object) -> None:
        if os.getpid() != LEARNER_PID:
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        super().set(*args, **kwargs)


def test_a_worker_that_died_with_the_lock_of_the_buffer_does_not_hang_who_samples() -> None:
    with _free_running(_DeadlyStorage) as trainer:
        pids = _pids(trainer.collector)
        trainer.collector.start()
        assert wait_until(lambda: not all(is_alive(pid) for pid in pids), SOON_S)
        with _ends_soon(pids), pytest.raises(WorkerLost, match="killed by SIGKILL"):
            trainer.replay_buffer.sample()


def _suspended(trainer: Trainer) -> None:
    """As after Ctrl-Z and fg: nobody ran for long, and the learner looks before its workers move."""
    for pid in _pids(trainer.collector):
        _stop(pid)
    time.sleep(SILENT_S + 1)


def _paused(trainer: Trainer) -> None:
    with trainer.collector.pause():
        time.sleep(SILENT_S + 1)
        for pid in _pids(trainer.collector):
            _stop(pid)


@pytest.mark.thorough
@pytest.mark.parametrize("rest", [_suspended, _paused])
def test_workers_that_rested_for_long_are_not_taken_for_silent(rest: Callable[[Trainer], None]) -> None:
    with _free_running(timeout_s=SILENT_S) as trainer:

        def look_rest_look() -> None:
            trainer.collector.getattr_rb("write_count")
            rest(trainer)
            trainer.collector.getattr_rb("write_count")
            _signal(signal.SIGCONT, *_pids(trainer.collector))
            trainer.request_stop("nobody was missed")

        _at_batch(trainer, 3, look_rest_look)
        trainer.train()


# --------------------------------------------------------------------- what the watch leaves alone


@both_kinds
def test_a_watched_training_is_the_same_as_any_and_its_workers_leave_by_themselves(kind: type) -> None:
    policy = make_small_canary()
    stamps = []
    with on_a_board(policy, kind) as collector:
        trainer = _watched(collector, policy, frames=6 * FRAMES_PER_BATCH)
        trainer.register_op("batch_process", lambda b: stamps.append(values(b, "policy_version")) or b)
        trainer.train()
    assert [process.exitcode for process in collector.procs] == [0, 0]
    if kind is MultiSyncCollector:
        assert stamps == [{version} for version in range(2, 8)]
    assert len(stamps) == 6


@both_kinds
@pytest.mark.one_case
def test_a_learner_that_is_busy_for_longer_than_the_timeout_is_not_told_that_workers_are_silent(
    kind: type,
) -> None:
    policy = make_small_canary()
    with on_a_board(policy, kind) as collector:
        trainer = _watched(collector, policy, frames=6 * FRAMES_PER_BATCH, timeout_s=SILENT_S)
        pids = _pids(collector)

        def be_busy() -> None:
            time.sleep(SILENT_S + 1)
            _signal(signal.SIGSTOP, *pids)  # they begin when the learner has waited for a while
            threading.Timer(0.5, _signal, (signal.SIGCONT, *pids)).start()

        _at_batch(trainer, 2, be_busy)
        trainer.train()


def test_a_request_to_a_stopped_worker_ends_too() -> None:
    policy = make_small_canary()
    with on_a_board(policy) as collector:
        _watched(collector, policy, timeout_s=SILENT_S)
        pids = _pids(collector)
        next(iter(collector))
        _signal(signal.SIGSTOP, pids[1])
        with _ends_soon(pids), pytest.raises(AdoptionTimeout, match=f"worker 1 .pid {pids[1]}, stopped"):
            collector.state_dict()


def test_the_watch_keeps_no_collector_alive() -> None:
    policy = make_small_canary()
    collector = make_workers(MultiSyncCollector, policy, schemes={"policy": BoardScheme()})
    trainer, gone = _watched(collector, policy), weakref.ref(collector)
    queue, pipes, pids = collector.queue_out, collector.pipes, _pids(collector)
    trainer.train = None
    del trainer, collector
    gc.collect()
    assert gone() is None
    assert not any(is_alive(pid) for pid in pids)
    assert queue is not None
    assert pipes


def test_after_a_shutdown_nobody_is_missed() -> None:
    with _free_running() as trainer:
        trainer.collector.start()
        assert wait_until(lambda: trainer.collector.getattr_rb("write_count") > 0, SOON_S)
        trainer.collector.shutdown()
        assert trainer.collector.getattr_rb("write_count") > 0
        assert len(trainer.replay_buffer.sample()) == 10


def test_without_a_timeout_a_stopped_worker_is_waited_for() -> None:
    policy = make_small_canary()
    with on_a_board(policy, workers=1) as collector:
        trainer = make_dqn_trainer(collector)
        WatchWorkers(None).register(trainer)
        batches, pid = iter(collector), collector.procs[0].pid
        next(batches)
        with stopped(pid):
            threading.Timer(1.0, _signal, (signal.SIGCONT, pid)).start()
            next(batches)


# ----------------------------------------------------------------------------------- refusals
