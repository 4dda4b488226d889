"""Worker processes and what they start, in a program whose fork server is killed, and they themselves."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from rlsync.core.errors import ConfigError
from rlsync.sync.families import end_group, start_process
from tests.tools.processes import is_alive, wait_until
from tests.tools.programs import ENDS_WITHIN_S, Program, run_program

ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}

pytestmark = [pytest.mark.processes]

PROGRAM = """
import os, signal, subprocess, sys, time
from multiprocessing import forkserver
from rlsync.sync.families import end_at_once, end_group, lead_group, start_process

def work(pipe, how):
    lead_group()
    child = subprocess.Popen(["sleep", "600"])
    os.write(pipe, f"{child.pid}\\n".encode())
    if how == "ends at once":
        end_at_once()
    if how == "waits":
        time.sleep(600)

def started(method, how):
    reading, writing = os.pipe()
    process = start_process(method, work, (writing, how), "a worker") if method == "fork" else None
    return process, int(os.fdopen(reading).readline())

def idle():
    time.sleep(600)

if __name__ == "__main__":
    what = sys.argv[1]
    if what == "server":
        before = start_process("forkserver", idle, (), "before")
        server = forkserver._forkserver._forkserver_pid
        os.kill(server, signal.SIGKILL)
        os.waitid(os.P_PID, server, os.WEXITED | os.WNOWAIT)
        print(before.exitcode, before.is_alive(), before.join(0.1))
        after = start_process("forkserver", idle, (), "after")
        print(before.exitcode, after.exitcode, before.pid != after.pid)
        for process in (before, after):
            end_group(process)
            process.join(60)
            print(process.exitcode, process.is_alive())
            process.close()
    else:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        process, child = started("fork", what)
        print(child, flush=True)
        if what == "waits":
            assert os.getpgid(process.pid) == os.getpgid(child) == process.pid != os.getpgrp()
            process.kill() if sys.argv[2] == "killed" else end_group(process)
            process.join()
            end_group(process)
        process.join()
        print(process.exitcode, flush=True)
        time.sleep(600)
"""


@contextmanager
def program(folder: Path, *words: str) -> Iterator[Program]:
    file = folder / "program.py"
    file.write_text(PROGRAM)
    started = Program(str(file), *words, cwd=folder, env=ENVIRONMENT, start_method="forkserver")
    try:
        yield started
    finally:
        started.kill()
        started.wait(ENDS_WITHIN_S)
        started.stdout.close()
        started.stderr.close()


@pytest.mark.thorough
def test_a_worker_that_outlives_its_fork_server_is_alive_until_it_is_ended(tmp_path: Path) -> None:
    with program(tmp_path, "server") as started:
        told = started.stdout.read()
    assert told.splitlines() == ["None True None", "None None True", "255 False", f"{-signal.SIGKILL} False"]


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("leaves",), 0),
        (("ends at once",), -signal.SIGKILL),
        (("waits", "killed"), -signal.SIGKILL),
        (("waits", "ended"), -signal.SIGKILL),
    ],
)
def test_what_a_worker_has_started_ends_with_it_and_the_learner_lives(
    words: tuple[str, ...], code: int, tmp_path: Path
) -> None:
    with program(tmp_path, *words) as started:
        child = int(started.stdout.readline())
        assert int(started.stdout.readline()) == code
        assert wait_until(lambda: not is_alive(child), 20)
        assert started.poll() is None


SERVERS_ARE_KILLED = """
import os, signal, sys, threading, time
from multiprocessing import forkserver
from rlsync.core.errors import WorkerLost
from rlsync.sync.families import start_process

def strike(times):
    struck = set()
    while len(struck) < times:
        server = forkserver._forkserver._forkserver_pid
        if server is not None and server not in struck:
            os.kill(server, signal.SIGSTOP)
            time.sleep(0.3)
            os.kill(server, signal.SIGKILL)
            struck.add(server)
        time.sleep(0.001)

if __name__ == "__main__":
    threading.Thread(target=strike, args=(int(sys.argv[1]),), daemon=True).start()
    time.sleep(0.05)
    try:
        process = start_process("forkserver", time.sleep, (600,), "rlsync worker 3")
        print(process.is_alive())
        process.kill()
    except WorkerLost as lost:
        print(lost)
"""


@pytest.mark.parametrize(
    ("times", "told"),
    [
        (2, ["True"]),
        (
            3,
            [
                "the fork server was ended while it started a process, three times",
                "  where  rlsync worker 3",
                "  cure   look what ends it (out of memory?)",
            ],
        ),
    ],
)
@pytest.mark.thorough
def test_a_fork_server_that_is_killed_while_it_starts_a_worker_is_replaced_or_told_of(
    times: int, told: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "program.py"
    file.write_text(SERVERS_ARE_KILLED)
    ran = run_program(str(file), str(times), cwd=tmp_path, env=ENVIRONMENT, start_method="forkserver")
    assert ran.stdout.splitlines() == told, ran.stderr


def test_a_process_that_got_the_number_of_a_worker_that_has_ended_is_left_alone() -> None:
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as other:
        try:
            end_group(cast("BaseProcess", SimpleNamespace(pid=other.pid, exitcode=0)))
            assert is_alive(other.pid)
            end_group(cast("BaseProcess", SimpleNamespace(pid=other.pid, exitcode=None)))
            assert other.wait(20) == -signal.SIGKILL
        finally:
            other.kill()


class HostsContext(SpawnContext):
    """What a library adds to multiprocessing, as joblib's loky does: a way of its own to start processes."""

    _name = "of the host"


@pytest.fixture
def hosts_start_method() -> Iterator[None]:
    """This process was started by the host program's way, which so is the default here."""
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.context._concrete_contexts["of the host"] = HostsContext()  # type: ignore[attr-defined]
    multiprocessing.set_start_method("of the host", force=True)
    try:
        yield
        assert multiprocessing.get_start_method() == "of the host"
    finally:
        multiprocessing.set_start_method(before, force=True)
        del multiprocessing.context._concrete_contexts["of the host"]  # type: ignore[attr-defined]


@pytest.mark.usefixtures("hosts_start_method")
@pytest.mark.parametrize("method", ["forkserver", pytest.param("spawn", marks=pytest.mark.thorough)])
def test_a_host_programs_own_way_to_start_processes_reaches_no_worker(method: str) -> None:
    process = start_process(method, time.sleep, (0,), "a worker")
    process.join(ENDS_WITHIN_S)
    assert process.exitcode == 0


def start_in_daemon(pipe: Connection) -> None:
    try:
        start_process("spawn", time.sleep, (0,), "a worker")
    except ConfigError as error:
        pipe.send(str(error))


def test_a_daemonic_process_is_told_before_it_starts_workers_that_it_cannot() -> None:
    ours, theirs = multiprocessing.Pipe(duplex=False)
    context = multiprocessing.get_context("fork")
    process = context.Process(target=start_in_daemon, args=(theirs,), name="of a pool", daemon=True)
    process.start()
    process.join(ENDS_WITHIN_S)
    assert ours.poll(0)
    what, where, cure = ours.recv().splitlines()
    assert (
        what
        == "this process is daemonic, so Python lets it start no processes, and there would be no workers"
    )
    assert where == "  where  process 'of a pool'"
    assert "concurrent.futures.ProcessPoolExecutor" in cure
