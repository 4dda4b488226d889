"""A program whose collector was not shut down ends all the same, and so do its workers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from torchrl.collectors import MultiSyncCollector

from rlsync import SourceNotFound, SyncWeights
from tests.tools.parts import make_a2c_trainer, make_policy, wait_until
from tests.tools.processes import session_pids
from tests.tools.programs import ENDS_WITHIN_S, Program
from tests.tools.running import ACTOR, on_a_board

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]

#: On an idle machine a program has ended after 5 s. Without what is tested here it never ends.
SOON_S = 100.0


def nobody_is_left(session: int) -> bool:
    return wait_until(lambda: not session_pids(session), SOON_S, poll_s=0.05)


@pytest.fixture
def sessions() -> Iterator[list[int]]:
    """The sessions of the started programs; whoever is left of them is killed after the test."""
    started: list[int] = []
    yield started
    for session in started:
        with suppress(ProcessLookupError):
            os.killpg(session, signal.SIGKILL)


def ended(sessions: list[int], *arguments: str) -> tuple[int, str]:
    """The status and the output of a program; nobody is left of it."""
    program = Program("tests.tools.ending_program", *arguments, cwd=ROOT, merged=True)
    sessions.append(program.pid)
    status = program.wait(SOON_S)
    assert nobody_is_left(program.pid)
    said = program.stdout.read()
    program.stdout.close()
    assert said.count("workers ") == 1, said
    return status, said


@pytest.mark.one_case
@pytest.mark.seconds
@pytest.mark.parametrize(
    ("scheme", "kind", "end", "last"),
    [
        ("board", "sync", "raises", "ValueError: a mistake in the script"),
        ("board", "async", "raises_in_training", "ValueError: a mistake in the script"),
        ("board", "async", "is_refused", "  cure   did you mean 'actor_network'?"),
        ("stock", "sync", "is_refused", "  cure   did you mean 'actor_network'?"),
        ("stock", "async", "raises_in_training", "ValueError: a mistake in the script"),
        ("board", "sync", "is_interrupted", "KeyboardInterrupt"),
        ("board", "async", "raises_beside_a_stopped_worker", "ValueError: a mistake in the script"),
        ("none", "unrolls", "raises_beside_a_stopped_worker", "ValueError: a mistake in the script"),
    ],
)
def test_an_exception_ends_the_program_with_its_traceback_and_its_workers(
    scheme: str, kind: str, end: str, last: str, sessions: list[int]
) -> None:
    status, said = ended(sessions, scheme, kind, end)
    assert status == 1
    assert "Traceback (most recent call last)" in said
    assert said.splitlines()[-1].startswith(last)


@pytest.mark.one_case
@pytest.mark.seconds
@pytest.mark.parametrize(
    ("end", "status"),
    [("is_terminated", -signal.SIGTERM), ("is_killed", -signal.SIGKILL), ("leaves_at_once", 7)],
)
def test_workers_on_a_board_leave_when_their_learner_is_gone_without_a_word(
    end: str, status: int, sessions: list[int]
) -> None:
    assert ended(sessions, "board", "async", end)[0] == status


@pytest.mark.seconds
def test_a_program_that_forgets_to_shut_down_ends_well_and_says_nothing(sessions: list[int]) -> None:
    status, said = ended(sessions, "board", "sync", "forgets_to_shut_down")
    assert status == 0
    assert len(said.splitlines()) == 1, said


#: In an interpreter of its own: what is tested happens while Python takes its modules apart.
DROPS = """
import multiprocessing
multiprocessing.set_start_method("fork", force=True)
from tests.tools.ending_program import main
main("shared", "sync", "drops_a_hooked_trainer")
"""


@pytest.mark.thorough
@pytest.mark.slow
def test_a_program_ends_whose_trainer_was_held_by_nobody(sessions: list[int]) -> None:
    status, said = run_by_python(sessions, "-c", DROPS)
    assert status == 0, said


LEFT_OPEN = """
import multiprocessing
from torchrl.collectors import MultiSyncCollector
from rlsync import BoardScheme
from tests.tools.parts import make_policy, make_workers

def test_left_open():
    global collector
    collector = make_workers(MultiSyncCollector, make_policy(), workers=1, schemes={"policy": BoardScheme()})
    raise ValueError("a mistake in the script")
"""
OF_A_SCRIPT = """
if __name__ == "__main__":
    test_left_open()
"""
ALIVE = "print('alive', [process.is_alive() for process in collector.procs])\n"


def script(folder: Path, start_method: str, *lines: str) -> Path:
    file = folder / "test_script.py"
    file.write_text(
        "".join([LEFT_OPEN, f"multiprocessing.set_start_method({start_method!r}, force=True)\n", *lines])
    )
    return file


def run_by_python(sessions: list[int], *arguments: str, typed: str = "") -> tuple[int, str]:
    """The status and the output of a fresh interpreter; nobody is left of it."""
    process = subprocess.Popen(
        [sys.executable, *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    sessions.append(process.pid)
    said, _ = process.communicate(typed, timeout=ENDS_WITHIN_S)
    assert nobody_is_left(process.pid)
    return process.returncode, said


@pytest.mark.slow
@pytest.mark.thorough
def test_a_script_with_spawned_workers_ends_at_a_mistake(tmp_path: Path, sessions: list[int]) -> None:
    status, said = run_by_python(sessions, str(script(tmp_path, "spawn", OF_A_SCRIPT)))
    assert (status, said.splitlines()[-1]) == (1, "ValueError: a mistake in the script")


@pytest.mark.seconds
@pytest.mark.thorough
def test_an_interactive_interpreter_keeps_its_workers_until_it_is_left(
    tmp_path: Path, sessions: list[int]
) -> None:
    file = script(tmp_path, "fork", OF_A_SCRIPT)
    status, said = run_by_python(sessions, "-i", str(file), typed=ALIVE)
    assert status == 0
    assert "ValueError: a mistake in the script" in said
    assert "alive [True]" in said


@pytest.mark.thorough
def test_pytest_ends_after_a_failing_test_that_left_its_collector_open(
    tmp_path: Path, sessions: list[int]
) -> None:
    program = Program(
        "pytest", "-p", "no:cacheprovider", str(script(tmp_path, "fork")), cwd=ROOT, merged=True
    )
    sessions.append(program.pid)
    status = program.wait(SOON_S)
    assert nobody_is_left(program.pid)
    said = program.stdout.read()
    program.stdout.close()
    assert status == 1
    assert "1 failed" in said


@pytest.mark.usefixtures("fork_workers")
def test_a_refused_map_can_be_corrected_on_the_same_collector() -> None:
    with on_a_board(make_policy(), MultiSyncCollector) as collector:
        trainer = make_a2c_trainer(collector, weight_update_map=ACTOR)
        with pytest.raises(SourceNotFound):
            SyncWeights({"policy": "loss_module.actor_netwrk"}).register(trainer)
        assert all(process.is_alive() for process in collector.procs)
        hook = SyncWeights(ACTOR)
        hook.register(trainer)
        trainer.train()
        assert hook.version > 1
