"""Worker processes as the learner sees them: when one is ready, lost, or silent."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from threading import Timer

import pytest

from rlsync.core.errors import AdoptionTimeout, WorkerLost
from rlsync.sync import processes
from rlsync.sync.families import start_process
from rlsync.sync.processes import Silence, await_ready, has_ended
from rlsync.transport.board.format import process_state
from tests.tools.processes import stopped, wait_until


@dataclass
class Process:
    """As much of a process as is looked at."""

    exitcode: int | None = None
    pid: int = os.getpid()


def test_a_worker_that_said_ready_just_before_it_ended_is_ready() -> None:
    answers = iter([False])
    await_ready([Process(exitcode=0)], lambda worker, seconds: next(answers, True), timeout_s=60.0)


def test_an_exit_code_is_told_in_words() -> None:
    words = ["killed by SIGKILL", "killed by signal 40", "exited with status 1"]
    assert [processes.ending(code) for code in (-9, -40, 1)] == words


def test_a_worker_that_ended_without_a_word_is_named() -> None:
    with pytest.raises(WorkerLost, match=r"worker 1 \(pid \d+, killed by SIGKILL\) ended before it was"):
        await_ready([Process(), Process(-9)], lambda worker, seconds: worker == 0, timeout_s=None)


def test_workers_that_live_and_are_not_ready_are_waited_for_until_the_deadline() -> None:
    with pytest.raises(AdoptionTimeout, match=r"worker 1 .* not ready are the workers 1, 2"):
        await_ready([Process()] * 3, lambda worker, seconds: worker == 0, timeout_s=0.01)


@pytest.mark.processes
def test_a_death_that_the_fork_server_tells_late_is_a_death_and_no_delay() -> None:
    process = start_process("forkserver", time.sleep, (600,), "a worker that dies")
    assert process.pid is not None
    server = forkserver._forkserver._forkserver_pid
    with stopped(server):
        os.kill(process.pid, signal.SIGKILL)
        assert wait_until(lambda: process_state(process.pid or 0) == "dead", 20.0)
        assert process.exitcode is None, "only the fork server can tell"
        goes_on = Timer(0.5, os.kill, (server, signal.SIGCONT))
        goes_on.start()
        with pytest.raises(WorkerLost, match=rf"worker 0 \(pid {process.pid}, killed by SIGKILL\)"):
            await_ready([process], lambda worker, seconds: False, timeout_s=0.0)
        goes_on.join()
    assert has_ended(process)


def leave_variable(file: Path) -> None:
    file.write_text(os.environ.get("SET_LATER", "not set"))


@pytest.mark.processes
def test_a_process_has_the_environment_of_its_start_and_not_that_of_the_fork_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, variable in enumerate(("not set", "now")):
        if number:
            monkeypatch.setenv("SET_LATER", variable)
        process = start_process("forkserver", leave_variable, (tmp_path / "left",), "a worker")
        process.join(60)
        assert (tmp_path / "left").read_text() == variable


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """One number, the time in seconds."""
    now = [1000.0]
    monkeypatch.setattr(processes.time, "monotonic", lambda: now[0])
    return now


def silent(silence: Silence, clock: list[float], after_s: float, ages_s: dict[int, float]) -> list[int]:
    clock[0] += after_s
    return silence.look(ages_s)


def test_a_worker_is_silent_when_it_was_seen_so_for_the_timeout(clock: list[float]) -> None:
    silence = Silence(timeout_s=10.0)
    assert silence.look({0: 500.0, 1: 0.0}) == [], "it may have been silent before anybody waited for it"
    for _ in range(5):
        assert silent(silence, clock, 2.0, {0: 500.0, 1: 0.5}) == []
    assert silent(silence, clock, 2.0, {0: 500.0, 1: 0.5}) == [0]
    assert silent(silence, clock, 2.0, {0: 1.0, 1: 0.5}) == [], "it gave a sign of life"


def test_a_learner_that_was_suspended_has_not_seen_its_workers_silent(clock: list[float]) -> None:
    silence = Silence(timeout_s=10.0)
    silence.look({0: 0.0})
    for _ in range(4):
        assert silent(silence, clock, 3600.0, {0: 3600.0}) == []
    assert silent(silence, clock, 3600.0, {0: 3600.0}) == [0]


def test_what_was_counted_is_forgotten_when_the_timers_start_again(clock: list[float]) -> None:
    silence = Silence(timeout_s=10.0)
    silence.look({0: 500.0})
    for _ in range(5):
        silent(silence, clock, 2.0, {0: 500.0})
    silence.clear()
    assert silent(silence, clock, 2.0, {0: 500.0}) == []
    assert silent(silence, clock, 2.0, {0: 500.0}) == []


@pytest.mark.processes
def test_a_second_ctrl_c_at_the_end_of_a_program_kills_its_workers_and_says_nothing() -> None:
    worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
    worker.start()

    class Interrupted:
        procs = (worker,)

        def shutdown(self, **_: object) -> None:
            raise KeyboardInterrupt

    processes._end_all({Interrupted()}, ())
    worker.join(10)
    assert worker.exitcode == -signal.SIGKILL
