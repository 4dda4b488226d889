"""The public API as a strict type checker of its user sees it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.tools.parts.programs import fresh_python

ROOT = Path(__file__).parents[2]
CASES = Path(__file__).parent / "typing_cases"
MARKED = re.compile(r"# refused: ([\w-]+)$")


@pytest.fixture(scope="module")
def found() -> set[tuple[str, int, str]]:
    """What mypy finds in the cases: file, line and code of each error."""
    # From the folder of the cases, and without our config: to a user rlsync is an installed package.
    cache = ROOT / ".mypy_cache" / "typing_cases"
    options = ["--strict", "--config-file=", "--output=json", f"--cache-dir={cache}"]
    done = fresh_python("-m", "mypy", *options, ".", cwd=CASES, check=False)
    assert done.returncode in (0, 1), done.stderr
    errors = map(json.loads, done.stdout.splitlines())
    return {(error["file"], error["line"], error["code"]) for error in errors if error["severity"] == "error"}


@pytest.mark.slow
def test_what_a_user_writes_is_accepted_in_strict_mode_with_the_types_it_says(
    found: set[tuple[str, int, str]],
) -> None:
    assert not [error for error in found if error[0] == "accepted.py"]


@pytest.mark.slow
def test_each_mistake_is_found_on_its_line_and_nothing_else(found: set[tuple[str, int, str]]) -> None:
    lines = (CASES / "refused.py").read_text().splitlines()
    marks = {(n, mark[1]) for n, line in enumerate(lines, 1) if (mark := MARKED.search(line))}
    assert {(line, code) for file, line, code in found if file == "refused.py"} == marks
