"""The examples run, in a short form, and show what they say they show."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from tests.tools.programs import run_program

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
