"""What `make test` leaves out, and what of it a change runs all the same."""

from __future__ import annotations

import runpy
from itertools import combinations, product
from pathlib import Path

import pytest

from tests.tools.programs import run_program
from tests.tools.tiers import covering

ROOT = Path(__file__).parents[2]
TOUCHED = runpy.run_path(str(ROOT / ".ci" / "touched.py"))
ALL = {
    str(folder.relative_to(ROOT / "tests"))
    for folder in (*(ROOT / "tests").iterdir(), *(ROOT / "tests" / "runs").iterdir())
    if any(folder.glob("test_*.py"))
}


@pytest.mark.parametrize("sizes", [(2,), (3, 2), (3, 2, 2, 2), (5, 4, 3)], ids=str)
@pytest.mark.parametrize(("together", "at_most"), [(0, 1.0), (1, 1.0), (2, 1.5)])
def test_the_cases_that_are_kept_show_all_that_should_meet(
    together: int, at_most: float, sizes: tuple[int, ...]
) -> None:
    cases = [dict(zip("abcd", case, strict=False)) for case in product(*map(range, sizes))]
    kept = covering(cases, together)
    meet = min(together, len(sizes))

    def shown(numbers: set[int]) -> set[object]:
        return {some for number in numbers for some in combinations(cases[number].items(), meet)}

    assert shown(kept) == shown(set(range(len(cases))))
    fewest = 1
    for size in sorted(sizes)[len(sizes) - meet :]:
        fewest *= size
    assert len(kept) <= at_most * fewest


@pytest.mark.parametrize(
    ("file", "folders"),
    [
        ("rlsync/transport/board/writer.py", {"transport", "laws"}),
        ("rlsync/runs/cli/main.py", {"runs/cli"}),
        ("rlsync/runs/life/training.py", {"runs/cli"}),
        ("rlsync/runs/actors/worker.py", {"runs/actors", "laws"}),
        ("rlsync/record/schedule.py", {"record", "laws"}),
        ("tests/runs/recipes/test_pure.py", {"runs/recipes"}),
        ("rlsync/__init__.py", {"project"}),
        ("tests/sync/test_adopter.py", {"sync"}),
        ("configs/env/pong.yaml", {"runs/cli", "runs/recipes"}),
        ("docs/results/publish.md", {"project"}),
        ("CHANGELOG.md", set()),
        ("tests/tools/board_workers.py", ALL),
        ("tests/conftest.py", ALL),
        ("pyproject.toml", ALL),
        ("rlsync/a_new_floor/it.py", ALL),
    ],
)
def test_a_changed_file_concerns_the_folders_that_test_it(file: str, folders: set[str]) -> None:
    assert TOUCHED["folders_of"](file) == folders


def test_what_most_of_the_changed_files_concern_comes_first() -> None:
    assert TOUCHED["in_order"](
        ["rlsync/core/trigger.py", "rlsync/runs/cli/main.py", "rlsync/runs/cli/eval.py"]
    ) == [
        "runs/cli",
        "core",
        "laws",
    ]
    assert set(TOUCHED["in_order"](None)) == ALL


def test_no_test_begins_when_the_time_is_over_and_those_that_are_left_are_counted() -> None:
    file = "tests/tensors/test_digest.py"
    done = run_program("pytest", "-p", "no:cacheprovider", "--budget-s", "0", file, cwd=ROOT)
    assert done.returncode == 0, done.stdout
    assert "tests left to make test-all: the budget is used up" in done.stdout
    assert f" of {file}\n" in done.stdout
    assert "passed" not in done.stdout
