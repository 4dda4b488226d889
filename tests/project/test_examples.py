"""The examples run, in a short form, and show what they say they show."""

from __future__ import annotations

import csv
import os
import re
import runpy
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.tools.processes import child_pids, is_alive, wait_until
from tests.tools.programs import Program, run_program

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(example: str, batches: int) -> Any:
    """What the example's ``main`` returns. Fork its workers: spawned ones could not import it."""
    return runpy.run_path(str(EXAMPLES / example))["main"](batches)


@pytest.mark.thorough
@pytest.mark.processes
def test_the_trainer_of_ones_own_says_which_version_acted_in_every_batch(tmp_path: Path) -> None:
    done = run_program(str(EXAMPLES / "own_trainer.py"), "5", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    # Version 1 is what the workers start with; 2 comes before the first frame, then one every 2 batches.
    expected = "[(2, 2), (2, 2), (3, 3), (3, 3), (4, 4)]"
    assert done.stdout.splitlines()[-1] == f"versions that acted, batch by batch: {expected}"


@pytest.mark.thorough
@pytest.mark.usefixtures("fork_workers")
def test_a_stock_trainer_publishes_each_batch_and_no_batch_mixes_versions() -> None:
    assert run("stock_trainer.py", 3) == [[2], [3], [4]]


@pytest.mark.thorough
@pytest.mark.usefixtures("fork_workers")
def test_policy_and_statistics_are_of_one_version_in_every_batch() -> None:
    assert run("multi_destination.py", 4) == [(2, 0.0), (3, 0.0), (4, 0.0), (5, 0.0)]


@pytest.mark.usefixtures("fork_workers")
@pytest.mark.thorough
def test_what_is_learned_from_a_replay_buffer_is_no_older_than_the_bound(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ages = run("async_replay.py", 6)
    assert 0 <= min(ages) <= max(ages) <= 8
    assert max(ages) > 0, "the learner published while it learned from what was there"
    assert "versions published" in capsys.readouterr().out


# --------------------------------------------------------------------------------- what a Dreamer imagines

OPEN_LOOP = str(EXAMPLES / "dreamer_open_loop.py")
SMALL_DREAMER = [
    "recipe.cells=16",
    "recipe.belief=16",
    "recipe.batch_size=4",
    "recipe.sequence_length=15",
    "recipe.horizon=3",
    "recipe.pace.prefill=100",
    "recipe.total_frames=140",
    "recipe.evaluation.every_frames=0",
    "collector.num_workers=0",
]


def open_loop(folder: Path, *keys: str) -> tuple[list[str], list[str]]:
    """The errors that the example prints, of the model and of saying that nothing changes; of a small run."""
    done = run_program(OPEN_LOOP, str(folder), *SMALL_DREAMER, *keys, cwd=folder.parent)
    assert done.returncode == 0, done.stderr
    steps = re.findall(r"^step +\d+  error (.*)  no change (.*)$", done.stdout, re.MULTILINE)
    assert len(steps) == 10, done.stdout
    return [of_model for of_model, _ in steps], [of_standstill for _, of_standstill in steps]


@pytest.mark.seconds
@pytest.mark.processes
def test_the_open_loop_of_a_finished_run_is_compared_with_the_rows_that_it_stored(tmp_path: Path) -> None:
    run = tmp_path / "run"
    errors, standstill = open_loop(run, "recipe.categoricals=2", "recipe.classes=4", "recipe.bins=31")
    assert all(float(error) > 0 for error in errors + standstill)
    with (run / "open_loop.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 10 * 4, "ten steps of CartPole's four numbers"
    assert len({line["real"] for line in lines}) > 10
    assert open_loop(run) == (errors, standstill), "the run is there, so nothing is trained again"


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.processes
def test_the_open_loop_of_dreamer_v1_and_of_pictures_is_written_too(tmp_path: Path) -> None:
    open_loop(tmp_path / "v1", "recipe=dreamer_v1", "env=pendulum")
    assert (tmp_path / "v1/open_loop.csv").read_text().count("\n") == 1 + 10 * 3
    image = pytest.importorskip("PIL.Image")
    pytest.importorskip("pygame")
    few = ["recipe.categoricals=2", "recipe.classes=4", "recipe.bins=31", "recipe.channels=2"]
    open_loop(tmp_path / "v3", "env=rendered_cartpole", "env.img_height=16", "env.img_width=16", *few)
    with image.open(tmp_path / "v3/open_loop.png") as shown:  # the real steps are above
        assert shown.size == (10 * 16, 2 * 16)


# ------------------------------------------------------------------------------------ the whole program

WHOLE = str(EXAMPLES / "ppo_to_475.py")


@pytest.mark.seconds
def test_the_whole_program_learns_each_time_from_the_newest_version_and_says_what_it_reached(
    tmp_path: Path,
) -> None:
    done = run_program(WHOLE, "--frames", "6144", "--log-dir", "logs", cwd=tmp_path)
    # Version 1 is what the workers start with; 2 comes before the first frame, then one after every batch.
    acted = re.findall(r"(\d+) frames +version +(.*?) acted", done.stdout)
    assert acted == [("2048", "2"), ("4096", "3"), ("6144", "4")], done.stderr
    *_, publishes, checks, last = done.stdout.splitlines()
    assert publishes.startswith("4 publishes, of ")
    assert re.fullmatch(r"[1-9]\d* checks of what acts, 0 deviations", checks)
    greedy = re.fullmatch(r"version 5: greedy return (.*) over 20 episodes", last)
    assert greedy is not None, last
    assert float(greedy[1]) >= 8, "no episode of CartPole is shorter"
    assert done.returncode == (0 if float(greedy[1]) >= 475 else 1), done.stderr
    logged = (tmp_path / "logs/seed_0/scalars/sync/version.csv").read_text()
    assert logged.split() == ["2048,3.0", "4096,4.0", "6144,5.0"]


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(900)  # half a minute of processor time
def test_the_whole_program_reaches_a_return_of_475(tmp_path: Path) -> None:
    done = run_program(WHOLE, cwd=tmp_path, timeout_s=850)
    assert done.returncode == 0, done.stdout + done.stderr
    greedy = re.search(r"greedy return (.*) over 20 episodes$", done.stdout.strip())
    assert greedy is not None, done.stdout
    assert float(greedy[1]) >= 475
    versions = [int(version) for version in re.findall(r"version +(\d+) acted", done.stdout)]
    assert versions == list(range(2, 2 + len(versions))), "one version a batch, and none is left out"


@pytest.mark.thorough
@pytest.mark.slow
def test_ctrl_c_ends_the_whole_program_and_its_workers(tmp_path: Path) -> None:
    program = Program(WHOLE, cwd=tmp_path)
    try:
        for line in program.stdout:
            if "version   3 acted" in line:
                break
        pids = child_pids(program.pid)
        assert len(pids) >= 2, "the workers"
        os.killpg(program.pid, signal.SIGINT)  # as a terminal does
        assert program.wait(60) == 130
        assert wait_until(lambda: not any(map(is_alive, pids)), 30)
        assert "Traceback" not in program.stdout.read()
    finally:
        program.kill()
        program.stdout.close()
        program.stderr.close()
