"""Runs what proves each promise of ``docs/claims.yaml``, and writes the table of ``docs/reliability.md``.

    python docs/claims.py [PART OF A PROMISE] [-- options of pytest]

``make claims`` runs it. A promise is printed if all its tests have passed, none was skipped, and its scripts
have ended with status 0. The exit status is 1 if one is left out, or if none was run. With a part of a
promise, only the promises that contain it are run, and the page stays as it is; so it does with an option of
pytest that leaves out tests.
"""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
CLAIMS, PAGE = ROOT / "docs" / "claims.yaml", ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- table of claims -->\n", "<!-- end of table of claims -->"
#: Options of pytest with which a file or a folder might be called proven by some of its tests.
LEAVES_OUT = ("-k", "-m", "--deselect", "--ignore", "--lf", "--last-failed", "--sw", "--stepwise")


@dataclass(frozen=True, slots=True)
class Claim:
    """A promise, and what proves it: node ids of tests, files or folders of them, scripts with arguments."""

    promise: str
    tests: tuple[str, ...] = ()
    scripts: tuple[str, ...] = ()


def claims() -> list[Claim]:
    """All of the file."""
    rows = yaml.safe_load(CLAIMS.read_text())
    return [
        Claim(r["promise"], tuple(r.get("tests", ())), tuple(r.get("scripts", ()))) for r in rows
    ]


class Outcomes:
    """Hears how each test of a session of pytest ends; of several cases of a test, the worst counts."""

    def __init__(self) -> None:
        self._ends: dict[str, set[str]] = defaultdict(set)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            self._ends[report.nodeid].add(report.outcome)

    def passed(self, test: str) -> int:
        """How many cases of a test have passed; 0 if one did not."""
        beginnings = (test, f"{test}[", f"{test}::", f"{test}/")
        mine = [
            ends
            for node, ends in self._ends.items()
            if node == test or node.startswith(beginnings[1:])
        ]
        return len(mine) if all(ends == {"passed"} for ends in mine) else 0


def proven(chosen: list[Claim], options: list[str]) -> dict[Claim, int]:
    """Of each promise that holds, how many cases and scripts were run for it."""
    outcomes = Outcomes()
    tests = list(dict.fromkeys(test for claim in chosen for test in claim.tests))
    if tests:
        pytest.main(["-q", "-m", "not gpu", *options, *tests], plugins=[outcomes])
    scripts = dict.fromkeys(script for claim in chosen for script in claim.scripts)
    ended = {
        s: subprocess.run([sys.executable, *s.split()], cwd=ROOT, check=False).returncode
        for s in scripts
    }
    found = {}
    for claim in chosen:
        counts = [outcomes.passed(test) for test in claim.tests] + [
            ended[s] == 0 for s in claim.scripts
        ]
        if all(counts):
            found[claim] = sum(counts)
    return found


def table(runs: dict[Claim, int]) -> str:
    """The rows of what was proven."""
    lines = ["| promise | proven by | runs |", "|---|---|---|"]
    for claim, count in runs.items():
        where = dict.fromkeys(name.partition("::")[0] for name in claim.tests)
        named = ", ".join(f"`{name}`" for name in [*where, *claim.scripts])
        lines.append(f"| {claim.promise} | {named} | {count} |")
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> int:
    given = arguments[: arguments.index("--")] if "--" in arguments else arguments
    options = arguments[len(given) + 1 :]
    chosen = [claim for claim in claims() if all(part in claim.promise for part in given)]
    runs = proven(chosen, options)
    left_out = [claim.promise for claim in chosen if claim not in runs]
    if not given and not any(option.startswith(LEAVES_OUT) for option in options):
        before, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(before + BEGIN + table(runs) + END + rest.partition(END)[2])
    print(f"{len(runs)} of {len(chosen)} promises were proven", *left_out, sep="\nnot proven: ")
    return int(bool(left_out) or not chosen)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
