"""Stop ends a training from any thread within a deadline: the learner returns, and no worker is left."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tensordict import TensorDictBase
from torchrl.checkpoint import Checkpoint
from torchrl.collectors import MultiAsyncCollector, MultiSyncCollector
from torchrl.trainers import Trainer

from rlsync import BoardScheme, ConfigError, Stop, SyncWeights, WatchWorkers, WorkerLost
from rlsync.runs.recipes.checks import check
from rlsync.runs.recipes.impala.recipe import RECIPE
from rlsync.runs.recipes.impala.settings import ImpalaConfig
from rlsync.runs.recipes.run_files import CHECKPOINT
from rlsync.runs.recipes.settings import CollectorConfig, Config, EnvConfig
from tests.runs.actors.test_unroll_collector import CARTPOLE, Restarts, cartpole_net, collecting
from tests.runs.cli.test_main import ENDLESS, Run
from tests.runs.recipes.test_off_policy import built, small
from tests.tools.parts import (
    FRAMES_PER_BATCH,
    CountingEnv,
    child_pids,
    hanging,
    is_alive,
    make_dqn_trainer,
    make_small_canary,
    wait_until,
)
from tests.tools.parts.stopping import stopped_run
from tests.tools.running import running

pytestmark = [pytest.mark.usefixtures("fork_workers"), pytest.mark.processes]

FOR_EVER = 10**9
AT_ONCE_S = 0.3
NEVER_S = 600.0
with_and_without_lag = pytest.mark.parametrize("lag", [1, None])


def endless(lag: int | None, run_dir: Path) -> Trainer:
    return built(small("dqn", lag=lag, run_dir=run_dir, total_frames=FOR_EVER))


def at_batch(trainer: Trainer, number: int, do: Callable[[], object]) -> None:
    count = iter(range(1, FOR_EVER))
    trainer.register_op("post_steps", lambda: do() if next(count) == number else None)


class Counters:
    """Receives the counters of a checkpoint."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.frames = int(state["collected_frames"])


def saved_frames(run_dir: Path) -> int:
    counters = Counters()
    Checkpoint(trainer_state=counters).load(run_dir / CHECKPOINT)
    return counters.frames


def once_it_waits(
    trainer: Trainer, call: Callable[[], object], none_can_come: Callable[[], bool] = lambda: True
) -> None:
    """Call from another thread when the learner waits for frames, and none can come."""
    queue, waits = trainer.collector.queue_out, threading.Event()
    inner = queue.get

    def get(*given: Any, **named: Any) -> Any:
        waits.set()
        try:
            return inner(*given, **named)
        finally:
            waits.clear()

    def watch() -> None:
        if wait_until(lambda: none_can_come() and waits.is_set() and queue.empty(), 60.0):
            call()

    queue.get = get
    threading.Thread(target=watch, daemon=True).start()


def in_another_thread(call: Callable[[], object]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


@with_and_without_lag
@pytest.mark.one_case
def test_healthy_workers_end_with_the_batch_and_the_first_of_many_calls_counts(
    lag: int | None, tmp_path: Path
) -> None:
    trainer = endless(lag, tmp_path)
    with Stop(trainer, NEVER_S) as stop:

        def call_often() -> None:
            for why in ("first", "second"):
                in_another_thread(partial(stop, why))
            stop("third")

        at_batch(trainer, 3, call_often)
        trainer.train()
    assert (stop.why, stop.lost, stop.saved) == ("first", None, None)
    assert stop.join(0.0)
    assert trainer.collected_frames == saved_frames(tmp_path) == len(trainer.replay_buffer) == 3 * 64
    assert child_pids() == set()
    stop("after the end")
    assert stop.why == "first"


@pytest.mark.one_case
@with_and_without_lag
@pytest.mark.parametrize("fault", ["stopped", "killed"])
def test_workers_that_do_not_answer_are_killed_and_all_batches_are_saved(
    lag: int | None, fault: str, tmp_path: Path
) -> None:
    trainer = endless(lag, tmp_path)
    pids = [process.pid for process in trainer.collector.procs]
    if fault == "stopped":
        stop = stopped_run(trainer, AT_ONCE_S, fault, tmp_path / "never hangs", lambda: pids).stop
        assert isinstance(stop.lost, WorkerLost)
        assert stop.saved is not None
        assert stop.saved.path == tmp_path / CHECKPOINT
    else:
        with Stop(trainer, AT_ONCE_S) as stop:

            def kill_and_stop() -> None:
                for pid in pids:
                    os.kill(pid, signal.SIGKILL)
                stop("enough")

            at_batch(trainer, 3, kill_and_stop)
            trainer.train()
    taken = trainer.collected_frames
    assert taken >= 3 * 64
    assert taken == saved_frames(tmp_path) == len(trainer.replay_buffer)
    assert child_pids() == set()
    again = built(small("dqn", lag=lag, total_frames=taken + 64))
    with Stop(again):
        again.load_from_file(tmp_path / CHECKPOINT)
        again.train()
    assert again.collected_frames == taken + 64


class HangingEnv(CountingEnv):
    """Never comes back from a step after it was told to hang. Forked workers share what it is told."""

    told = multiprocessing.get_context("fork").Event()
    hanging = multiprocessing.get_context("fork").Value("i", 0)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        if self.told.is_set():
            with self.hanging.get_lock():
                self.hanging.value += 1
            time.sleep(NEVER_S)
        return super()._step(tensordict)


@pytest.mark.one_case
@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
@pytest.mark.parametrize("watched", [True, False], ids=["watched", "unwatched"])
def test_an_environment_that_hangs_does_not_hold_a_trainer_of_ones_own(kind: type, watched: bool) -> None:
    HangingEnv.told.clear()
    HangingEnv.hanging.value = 0
    policy = make_small_canary()
    collector = kind(
        [HangingEnv] * 2,
        policy,
        frames_per_batch=FRAMES_PER_BATCH,
        total_frames=-1,
        weight_sync_schemes={"policy": BoardScheme()},
    )
    with running(collector):
        trainer = make_dqn_trainer(collector, total_frames=FOR_EVER)
        trainer.canary = policy
        SyncWeights({"policy": "canary"}).register(trainer)
        if watched:
            WatchWorkers(NEVER_S).register(trainer)
        with Stop(trainer, AT_ONCE_S) as stop:

            def hang() -> None:
                HangingEnv.told.set()
                once_it_waits(trainer, stop, lambda: HangingEnv.hanging.value == 2)

            at_batch(trainer, 1, hang)
            trainer.train()
    assert stop.lost is not None
    assert stop.saved is not None
    assert stop.saved.why_not == "the run has no folder"
    assert child_pids() == set()


def test_workers_that_are_started_again_when_they_die_do_not_hold_the_learner_either() -> None:
    with collecting(cartpole_net(), CARTPOLE, num_workers=2, restarts=Restarts(100)) as collector:
        trainer = make_dqn_trainer(collector, total_frames=FOR_EVER)
        pids = [process.pid for process in collector.procs]
        batches = iter(collector)
        next(batches)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        with Stop(trainer, AT_ONCE_S) as stop:
            stop()
            while True:
                next(batches)
    assert isinstance(stop.lost, WorkerLost)


@pytest.mark.one_case
@pytest.mark.parametrize("fault", ["stopped", "hanging"])
def test_the_actor_learner_ends_although_no_worker_answers(fault: str, tmp_path: Path) -> None:
    flag = tmp_path / "hang"
    config = Config(
        run_dir=str(tmp_path),
        env=EnvConfig(hanging.ID, 2, {"flag": str(flag)}),
        collector=CollectorConfig(frames_per_batch=20, lag=None),
        recipe=ImpalaConfig(total_frames=FOR_EVER, target_return=None, unroll_length=5, batch_size=4),
    )
    trainer = RECIPE.build(config)
    pids = {process.pid for process in trainer.collector.procs}
    ended = stopped_run(trainer, AT_ONCE_S, fault, flag, lambda: pids)
    assert isinstance(ended.stop.lost, WorkerLost)
    assert ended.seconds < 30.0
    assert trainer.collected_frames == saved_frames(tmp_path) >= 3 * 20
    assert not any(map(is_alive, pids))
    assert child_pids() == set()


def test_the_actor_learner_ends_although_its_workers_die_again_and_again(tmp_path: Path) -> None:
    config = Config(
        run_dir=str(tmp_path),
        env=EnvConfig("CartPole-v1", 2),
        collector=CollectorConfig(frames_per_batch=20, lag=None),
        recipe=ImpalaConfig(total_frames=FOR_EVER, target_return=None, unroll_length=5, batch_size=4),
    )
    trainer = RECIPE.build(config)
    collector, killing = trainer.collector, threading.Event()

    def kill_all() -> None:
        while killing.wait(0.01) and not collector.closed:
            for process in list(collector.procs):
                with suppress(ValueError, TypeError, ProcessLookupError):  # closed meanwhile
                    os.kill(process.pid, signal.SIGKILL)

    killer = threading.Thread(target=kill_all, daemon=True)
    killer.start()
    with Stop(trainer, AT_ONCE_S) as stop:

        def stop_in_the_storm() -> None:
            killing.set()
            stop()

        at_batch(trainer, 3, stop_in_the_storm)
        trainer.train()
    killing.clear()
    assert trainer.collected_frames == saved_frames(tmp_path) >= 3 * 20
    assert child_pids() == set()


def test_an_error_that_nobody_asked_for_passes_and_the_workers_are_gone(tmp_path: Path) -> None:
    trainer = endless(1, tmp_path)

    lost = WorkerLost("the workers are lost", "a test", "none")
    at_batch(trainer, 2, lambda: trainer.collector.stop_waiting(lost))
    with pytest.raises(WorkerLost), Stop(trainer) as stop:
        trainer.train()
    assert stop.lost is None
    assert child_pids() == set()


def test_two_threads_that_ask_at_once_start_one_deadline(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = endless(1, tmp_path)
    barrier = threading.Barrier(8)

    def ask(number: int) -> None:
        barrier.wait()
        stop(f"thread {number}")

    with caplog.at_level(logging.WARNING), Stop(trainer, NEVER_S) as stop:
        threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]

        def all_ask() -> None:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            deadlines = [t for t in threading.enumerate() if t.name == "rlsync-stop"]
            assert len(deadlines) == 1

        at_batch(trainer, 1, all_ask)
        trainer.train()
    assert not any(thread.name == "rlsync-stop" for thread in threading.enumerate())
    assert "is killed" not in caplog.text


def test_ctrl_c_ends_a_run_whose_workers_are_stopped(tmp_path: Path) -> None:
    words = ("logger=none", "stop_within_s=1", "collector.frames_per_batch=256", "recipe.num_epochs=1")
    run = Run(tmp_path, "train", *words, "run_dir=it", *ENDLESS)
    try:
        run.wait_for("^frames", 60)
        workers = child_pids(run.process.pid)
        for pid in workers:
            os.kill(pid, signal.SIGSTOP)
        os.kill(run.process.pid, signal.SIGINT)
        assert run.exit_status(120) == 130, run.output
        assert wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers), 30)
    finally:
        run.kill()
    assert "Traceback" not in run.output
    assert "stopped: interrupted  frames" in run.output
    assert saved_frames(tmp_path / "it") > 0


def test_the_settings_of_a_run_refuse_a_deadline_of_nothing() -> None:
    with pytest.raises(ConfigError) as refused:
        check(Config(stop_within_s=0.0))
    assert refused.value.where == "stop_within_s"
