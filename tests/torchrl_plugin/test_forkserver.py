"""The fork server beside TorchRL's spawn: the same frames, facts, errors and ends."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from rlsync import ConfigError, Forkserver
from tests.tools.processes import is_alive, wait_until
from tests.tools.programs import ENDS_WITHIN_S, Program, fresh_python, run_program

ROOT = Path(__file__).parents[2]
METHODS = ("spawn", "forkserver")


MODULE = "tests.tools.forkserver_program"
ENVIRONMENT = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"} | {
    "PYTHONPATH": str(ROOT)
}


def end(started: Program) -> None:
    with suppress(ProcessLookupError):
        os.killpg(started.pid, signal.SIGKILL)
    started.wait(ENDS_WITHIN_S)
    started.stdout.close()
    started.stderr.close()


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the program found with spawned workers and with those of the fork server."""
    words = ("compare", str(tmp_path_factory.mktemp("facts")))
    done = run_program(MODULE, *words, cwd=ROOT, env=ENVIRONMENT, start_method="spawn")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


# One program for all: it starts four collectors, one of them with spawned workers.
with_the_program = [pytest.mark.slow]


@pytest.mark.thorough
class TestBesideSpawn:
    pytestmark = with_the_program

    def test_the_frames_after_a_seed_are_the_same(self, compared: dict[str, Any]) -> None:
        assert compared["forkserver"]["played"] == compared["spawn"]["played"]
        assert len(compared["spawn"]["played"]) == 3

    def test_workers_find_the_same_threads_signals_folder_and_path(self, compared: dict[str, Any]) -> None:
        drawn = ("numpy", "random", "torch")
        spawned, forked = (
            [{key: value for key, value in facts.items() if key not in drawn} for facts in found["facts"]]
            for found in (compared[method] for method in METHODS)
        )
        assert forked == spawned
        assert len(forked) == 2
        assert forked[0]["python_threads"] == ["MainThread", "rlsync-start"], "and what notes a hang"
        assert not forked[0]["cuda"]

    @pytest.mark.parametrize("generator", ["numpy", "random", "torch"])
    @pytest.mark.parametrize("method", METHODS)
    def test_workers_without_a_seed_draw_different_numbers(
        self, compared: dict[str, Any], method: str, generator: str
    ) -> None:
        first, second = (facts[generator] for facts in compared[method]["facts"])
        assert first != second

    def test_an_error_of_a_worker_arrives(self, compared: dict[str, Any]) -> None:
        assert compared["error"].startswith("LookupError: this environment cannot be made")

    def test_a_killed_worker_is_found_as_before(self, compared: dict[str, Any]) -> None:
        for method in METHODS:
            status, error = compared[method]["killed"]
            assert status == -signal.SIGKILL
            assert error, "TorchRL raises a RuntimeError or a ValueError: it depends on the moment"

    def test_the_start_method_is_torchrls_own_outside_the_block(self, compared: dict[str, Any]) -> None:
        """Also where the object was made before torchrl was imported, which asks for the method then."""
        assert compared["method_before"] == compared["spawn"]["method"] == "spawn"
        assert compared["forkserver"]["method"] == "forkserver"
        assert compared["method_after"] == "spawn"

    def test_a_parallel_env_in_a_worker_starts(self, compared: dict[str, Any]) -> None:
        assert compared["nested"] == [1, 1, 32]


@pytest.fixture
def sleeping() -> Iterator[tuple[Program, list[int]]]:
    """A program with two workers, and the pids of the workers and of their server."""
    started = Program(MODULE, "sleep", cwd=ROOT, env=ENVIRONMENT, start_method="spawn")
    try:
        workers = json.loads(started.stdout.readline() or "[]")
        assert len(workers) == 2, "it has started its workers"
        yield started, [*workers, *{parent_of(worker) for worker in workers}]
    finally:
        end(started)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.slow
def test_a_killed_learner_leaves_neither_workers_nor_server_which_has_one_thread(
    sleeping: tuple[Program, list[int]],
) -> None:
    started, pids = sleeping
    assert len(pids) == 3
    assert len(list(Path(f"/proc/{pids[-1]}/task").iterdir())) == 1, "so that forking it is safe"
    assert started.pid not in pids, "workers are children of the server"
    started.kill()
    assert wait_until(lambda: not any(map(is_alive, pids)), 30)


@pytest.mark.thorough
@pytest.mark.slow
def test_ctrl_c_ends_learner_workers_and_server(sleeping: tuple[Program, list[int]]) -> None:
    started, pids = sleeping
    os.killpg(started.pid, signal.SIGINT)  # as a terminal does
    assert wait_until(lambda: started.poll() is not None and not any(map(is_alive, pids)), 60)


def test_a_program_that_chose_fork_keeps_it(fork_workers: None) -> None:
    server = Forkserver()
    assert not server.used
    with server:
        assert multiprocessing.get_start_method() == "fork"
    assert multiprocessing.get_start_method() == "fork"


def test_a_platform_without_a_fork_server_uses_torchrls_start_method_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(multiprocessing, "get_all_start_methods", lambda: ["spawn"])
    before = multiprocessing.get_start_method()
    with pytest.warns(RuntimeWarning, match="takes longer: this platform has no fork server"):
        server = Forkserver()
    with server:
        assert multiprocessing.get_start_method() == before
    assert not server.used


ANOTHER_SERVER = """
import multiprocessing, warnings
from multiprocessing import forkserver
multiprocessing.set_forkserver_preload([])
forkserver.ensure_running()
multiprocessing.set_start_method("spawn", force=True)
from rlsync import Forkserver
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    used = Forkserver().used
print(used, told[0].filename == "<string>", told[0].message)
"""


@pytest.mark.thorough
@pytest.mark.processes
def test_a_fork_server_that_runs_without_torchrl_is_not_used() -> None:
    done = fresh_python("-c", ANOTHER_SERVER)
    assert done.stdout.startswith("False True workers are started by TorchRL's own start method")
    assert "a fork server runs in this process already, without TorchRL" in done.stdout


@pytest.mark.parametrize("name", ["no_such_module", "no_such.module", "rlsync.no_such"])
def test_a_module_that_cannot_be_preloaded_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"there is no module {name!r}"):
        Forkserver(preload=[name])
    with pytest.raises(ConfigError, match=f"there is no module {name!r}"):
        Forkserver(preload=name)


@pytest.mark.processes
def test_importing_the_preload_outside_a_fork_server_does_nothing() -> None:
    code = (
        "import sys, gc, rlsync.torchrl_plugin.forkserver_preload\n"
        "print('torch' in sys.modules, gc.get_freeze_count())"
    )
    done = fresh_python("-c", code)
    assert done.stdout.split() == ["False", "0"]
