"""Test rlsync with the next TorchRL, and say what differs from what is written down in compat/next_fails.txt.

    python .ci/compat_next.py PYTEST_ARGUMENTS...

Each line of that file is a test that may fail, ``#``, and the cause. Exit status 0: whatever failed may fail. What
passes although it is written down is named, too, so that its line can go.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
PINS = ROOT / "compat" / "next.txt"
WRITTEN = ROOT / "compat" / "next_fails.txt"


def main(arguments: list[str]) -> int:
    for name in ("torch", "torchrl-nightly", "tensordict-nightly"):
        print(f"{name}=={version(name)}")
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", f"--junitxml={report}", *arguments]
        subprocess.run(command, cwd=ROOT, check=False)
        if not report.is_file():
            print("pytest has left no report")
            return 2
        ran = dict(outcomes(ElementTree.parse(report)))
    causes = written(WRITTEN.read_text().splitlines())
    lines = changes(ran, causes)
    print("\n".join(lines) or f"as written down: {len(causes)} tests may fail")
    return int(not ran or any(line.startswith("fails") for line in lines))


def outcomes(report: ElementTree.ElementTree) -> Iterator[tuple[str, bool]]:
    """Each test that ran, and whether it failed. What was skipped says nothing."""
    for case in report.iter("testcase"):
        if case.find("skipped") is None:
            failed = case.find("failure") is not None or case.find("error") is not None
            yield f"{case.get('classname')}::{case.get('name')}", failed


def written(lines: Iterable[str]) -> dict[str, str]:
    """The tests that may fail, and why; ValueError: a line has no cause."""
    causes: dict[str, str] = {}
    for line in lines:
        if not line or line.startswith("#"):
            continue
        test, _, cause = line.partition(" # ")
        if not cause.strip():
            raise ValueError(f"no cause is written down: {line!r}, {WRITTEN}")
        causes[test.strip()] = cause.strip()
    return causes


def changes(ran: Mapping[str, bool], causes: Mapping[str, str]) -> list[str]:
    """What differs from what is written down, a line for each test."""
    lines: list[str] = []
    for test, failed in ran.items():
        if failed and test not in causes:
            lines.append(f"fails, and no cause is written down: {test}")
        elif not failed and test in causes:
            lines.append(f"passes now: {test} ({causes[test]})")
    return lines


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
