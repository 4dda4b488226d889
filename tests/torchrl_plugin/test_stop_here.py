"""Stop for collectors whose environments, or the threads that step them, are in the learner's process."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torchrl.checkpoint import Checkpoint
from torchrl.collectors import AsyncBatchedCollector, BaseCollector, Collector
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs import ParallelEnv
from torchrl.trainers import Trainer

from rlsync import BoardScheme, Stop, SyncWeights, WatchWorkers, WorkerLost
from rlsync.runs.recipes.run_files import CHECKPOINT
from rlsync.torchrl_plugin.compat.endings import processes_behind
from tests.tools.parts import (
    FRAMES_PER_BATCH,
    child_pids,
    descendant_pids,
    is_alive,
    make_dqn_loss,
    make_dqn_trainer,
    make_q_policy,
    wait_until,
)
from tests.tools.parts.envs import HangsWhile, hanging
from tests.tools.parts.servers import COLLECTORS, make_async_batched
from tests.tools.running import running
from tests.torchrl_plugin.test_stop import AT_ONCE_S, FOR_EVER, NEVER_S, at_batch, saved_frames

pytestmark = [pytest.mark.usefixtures("fork_workers", "_little_time_to_leave"), pytest.mark.processes]

WAIT_S = 60.0
FAULTS = {"stopped": signal.SIGSTOP, "killed": signal.SIGKILL}


@pytest.fixture
def _little_time_to_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlsync.torchrl_plugin.ending.stop.LEAVE_WITHIN_S", 2.0)


@pytest.fixture
def flag(tmp_path: Path) -> Iterator[Path]:
    """While this file is there, environments hang; afterwards they go on."""
    file = tmp_path / "hang"
    try:
        yield file
    finally:
        file.unlink(missing_ok=True)


def trainer_of(collector: BaseCollector, run_dir: Path, policy: Any = None) -> Trainer:
    trainer = make_dqn_trainer(collector, policy, total_frames=FOR_EVER)
    trainer.checkpoint = Checkpoint()
    trainer.save_trainer_file = run_dir / CHECKPOINT
    return trainer


def soon(call: Callable[[], object], true: Callable[[], bool] = lambda: True) -> None:
    """Call from another thread, as soon as something is true."""

    def watch() -> None:
        if wait_until(true, WAIT_S):
            call()

    threading.Thread(target=watch, daemon=True).start()


def test_healthy_environments_end_with_the_batch(tmp_path: Path) -> None:
    policy = make_q_policy()
    collector = Collector(
        HangsWhile(tmp_path / "no"), policy, frames_per_batch=FRAMES_PER_BATCH, total_frames=-1
    )
    trainer = trainer_of(collector, tmp_path, policy)
    with Stop(trainer, NEVER_S) as stop:
        at_batch(trainer, 3, stop)
        trainer.train()
    assert (stop.lost, stop.saved, stop.hangs) == (None, None, "")
    assert trainer.collected_frames == saved_frames(tmp_path) == 3 * FRAMES_PER_BATCH


def test_an_environment_that_hangs_in_the_learners_thread_is_named_and_the_checkpoint_is_there(
    tmp_path: Path, flag: Path, caplog: pytest.LogCaptureFixture
) -> None:
    policy = make_q_policy()
    collector = Collector(HangsWhile(flag), policy, frames_per_batch=FRAMES_PER_BATCH, total_frames=-1)
    trainer = trainer_of(collector, tmp_path, policy)
    stop = Stop(trainer, AT_ONCE_S)

    def train() -> None:
        with stop:
            at_batch(trainer, 2, flag.touch)
            trainer.train()

    learner = threading.Thread(target=train, daemon=True)
    learner.start()
    assert wait_until(lambda: hanging(flag) == 1, WAIT_S)
    stop("enough")
    assert wait_until(lambda: stop.saved is not None and "cure" in caplog.text, WAIT_S)
    assert learner.is_alive(), "a thread cannot be ended"
    assert saved_frames(tmp_path) == 2 * FRAMES_PER_BATCH
    assert re.search(r'tests/tools/parts/envs\.py", line \d+, in _step', stop.hangs)
    assert stop.hangs in caplog.text
    assert f"kill -9 {os.getpid()}" in caplog.text
    flag.unlink()  # it comes back after all: the batch counts
    learner.join(WAIT_S)
    assert not learner.is_alive()
    assert stop.lost is None
    assert saved_frames(tmp_path) == trainer.collected_frames == 3 * FRAMES_PER_BATCH


def test_nothing_is_trained_while_the_checkpoint_of_a_hanging_learner_is_written(
    tmp_path: Path, flag: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = make_q_policy()
    collector = Collector(HangsWhile(flag), policy, frames_per_batch=FRAMES_PER_BATCH, total_frames=-1)
    trainer = trainer_of(collector, tmp_path, policy)
    stop, writes = Stop(trainer, AT_ONCE_S), threading.Event()
    save, seen = trainer.save_trainer, []

    def slow_save(*given: Any, **named: Any) -> None:
        if threading.current_thread().name == "rlsync-stop":
            flag.unlink()  # the environment comes back now
            before = trainer.collected_frames
            time.sleep(0.5)
            seen.append((before, trainer.collected_frames))
            writes.set()
        save(*given, **named)

    monkeypatch.setattr(trainer, "save_trainer", slow_save)
    with stop:
        at_batch(trainer, 2, flag.touch)
        soon(stop, lambda: hanging(flag) == 1)
        trainer.train()
    assert writes.is_set()
    assert seen == [(2 * FRAMES_PER_BATCH, 2 * FRAMES_PER_BATCH)]


@pytest.mark.one_case
@pytest.mark.parametrize("fault", FAULTS)
def test_processes_of_a_parallel_env_do_not_hold_the_learner(tmp_path: Path, flag: Path, fault: str) -> None:
    policy = make_q_policy()
    env = ParallelEnv(2, partial(HangsWhile, flag))
    collector = Collector(env, policy, frames_per_batch=FRAMES_PER_BATCH, total_frames=-1)
    trainer = trainer_of(collector, tmp_path, policy)
    with Stop(trainer, AT_ONCE_S) as stop:

        def fail_them() -> None:
            for process in processes_behind(collector):
                os.kill(process.pid, FAULTS[fault])
            stop()

        def hang() -> None:
            flag.touch()
            soon(fail_them, lambda: hanging(flag) == 2)

        at_batch(trainer, 2, hang)
        trainer.train()
    assert stop.lost is not None
    assert stop.saved is not None
    assert trainer.collected_frames == saved_frames(tmp_path) == 2 * FRAMES_PER_BATCH
    assert child_pids() == set()


@pytest.mark.one_case
@pytest.mark.parametrize("frames", [0, FRAMES_PER_BATCH])
def test_a_collecting_thread_that_hangs_does_not_hold_the_learner(
    tmp_path: Path, flag: Path, frames: int, caplog: pytest.LogCaptureFixture
) -> None:
    policy = make_q_policy()
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(1000), batch_size=10)
    collector = Collector(
        HangsWhile(flag), policy, frames_per_batch=FRAMES_PER_BATCH, total_frames=-1, replay_buffer=buffer
    )
    loss = make_dqn_loss(policy)
    trainer = Trainer(
        collector=collector,
        total_frames=FOR_EVER,
        frame_skip=1,
        loss_module=loss,
        optimizer=torch.optim.Adam(loss.parameters()),
        optim_steps_per_batch=1,
        replay_buffer=buffer,
        async_collection=True,
        progress_bar=False,
        checkpoint=Checkpoint(),
        save_trainer_file=tmp_path / CHECKPOINT,
    )
    trainer.register_op("process_optim_batch", lambda _: buffer.sample())
    if frames == 0:
        flag.touch()
    with Stop(trainer, AT_ONCE_S) as stop:
        trainer.register_op("post_steps", lambda: None if flag.exists() else flag.touch())
        soon(stop, lambda: hanging(flag) == 1)
        trainer.train()
    if frames:
        assert stop.lost is None
        assert saved_frames(tmp_path) == trainer.collected_frames <= buffer.write_count
    else:
        assert isinstance(stop.lost, WorkerLost)
        assert str(stop.saved) == "no batch had arrived, so there is nothing to go on from"
    assert re.search(r"threads hang in environments of this process(.|\n)*in _step", caplog.text)


# ------------------------------------------------------------------ with an inference server


def served_trainer(
    how: str, run_dir: Path, flag: Path, watched: bool
) -> tuple[AsyncBatchedCollector, Trainer]:
    collector = make_async_batched(how, BoardScheme(), env=partial(HangsWhile, flag))
    trainer = trainer_of(collector, run_dir)
    trainer.canary = collector._policy_factory()
    SyncWeights({"policy": "canary"}).register(trainer)
    if watched:
        WatchWorkers(NEVER_S).register(trainer)
    return collector, trainer


def ended(trainer: Trainer, run_dir: Path) -> None:
    assert trainer.collected_frames == saved_frames(run_dir) == len(trainer.replay_buffer) >= 2 * 20
    assert child_pids() == set()


def at_rest(trainer: Trainer) -> bool:
    """Whether the learner waits: what the queue still had makes no other batch."""
    before = trainer.collected_frames
    time.sleep(0.5)
    return trainer.collected_frames == before


watched_or_not = pytest.mark.parametrize("watched", [True, False], ids=["watched", "unwatched"])


@pytest.mark.parametrize("how", COLLECTORS)
@pytest.mark.one_case
def test_a_healthy_server_and_its_environments_end_with_the_batch(how: str, tmp_path: Path) -> None:
    collector, trainer = served_trainer(how, tmp_path, tmp_path / "no", watched=False)
    with running(collector), Stop(trainer, NEVER_S) as stop:
        at_batch(trainer, 3, stop)
        trainer.train()
    assert stop.lost is None
    ended(trainer, tmp_path)


@pytest.mark.thorough
@watched_or_not
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("how", ["process", "slots", "shared environments"])
def test_processes_of_server_and_environments_do_not_hold_the_learner(
    how: str, fault: str, watched: bool, tmp_path: Path
) -> None:
    collector, trainer = served_trainer(how, tmp_path, tmp_path / "no", watched)
    with running(collector), Stop(trainer, AT_ONCE_S) as stop:

        def fail_them() -> None:
            pids.update(process.pid for process in processes_behind(collector))
            for pid in pids:
                os.kill(pid, FAULTS[fault])
            stop()

        pids: set[int] = set()
        at_batch(trainer, 2, fail_them)
        trainer.train()
        assert pids
    ended(trainer, tmp_path)
    assert not any(map(is_alive, pids | descendant_pids()))


@pytest.mark.one_case
@watched_or_not
@pytest.mark.parametrize("how", COLLECTORS)
def test_environments_that_hang_do_not_hold_the_learner(
    how: str, watched: bool, tmp_path: Path, flag: Path, caplog: pytest.LogCaptureFixture
) -> None:
    collector, trainer = served_trainer(how, tmp_path, flag, watched)
    began = 0.0

    def stop_now() -> None:
        nonlocal began
        began = time.monotonic()
        stop()

    def hang() -> None:
        flag.touch()
        soon(stop_now, lambda: hanging(flag) == 2 and at_rest(trainer))

    with running(collector), Stop(trainer, AT_ONCE_S) as stop:
        at_batch(trainer, 2, hang)
        trainer.train()
    assert time.monotonic() - began < 30.0
    assert isinstance(stop.lost, WorkerLost)
    ended(trainer, tmp_path)
    in_threads = how in ("thread", "process")
    assert in_threads == bool(re.search(r"2 threads hang in environments(.|\n)*in _step", caplog.text))
