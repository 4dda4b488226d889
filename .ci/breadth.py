"""Run some tests with each combination of versions in ROWS, and write the table of docs/compatibility.md.

    python .ci/breadth.py [PYTEST_ARGUMENTS...]

Each row has an environment of its own in .compat/breadth, which is kept. ROWS='3.13' runs the rows that have this
text, and leaves the others as they are. A combination that cannot be had here says why, unless the table has a
result of another machine. TORCH_INDEX is an index to take torch from; a torch that brings CUDA with it, some GB,
is not installed. Exit status 0: no test has failed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "compatibility.md"
BEGIN, END = "<!-- table of breadth -->\n", "<!-- end of table of breadth -->"
HEAD = ("Python", "pinned", "installed", "tests")
ENVIRONMENTS = ROOT / ".compat" / "breadth"
#: What the tests need that a run does not.
TEST_NEEDS = ("pytest", "pytest-xdist", "pytest-timeout", "hypothesis", "ale-py")
#: What the table shows of an environment.
SHOWN = ("torch", "torchrl", "tensordict", "gymnasium", "numpy")
TESTS_END_WITHIN_S = 900


class NotHere(Exception):
    """A combination that cannot be had on this machine."""


@dataclass(frozen=True, slots=True)
class Row:
    """An interpreter, and what is pinned beside it. All else is the newest that pip finds."""

    python: str
    pins: tuple[str, ...]

    @property
    def folder(self) -> Path:
        name = "-".join([self.python, *self.pins])
        return ENVIRONMENTS / name.replace("==", "").replace(".*", "")

    @property
    def name(self) -> tuple[str, str]:
        return self.python, ", ".join(self.pins).replace("==", " ")


ROWS = (
    Row("3.11", ("torch==2.6.*",)),
    Row("3.11", ("torch==2.7.*",)),
    Row("3.11", ("torch==2.8.*",)),
    Row("3.11", ("torch==2.13.*",)),
    Row("3.11", ("torch==2.13.*", "gymnasium==1.1.*", "numpy==1.26.*")),
    Row("3.11", ("torch==2.13.*", "gymnasium==1.1.*")),
    Row("3.11", ("torch==2.13.*", "numpy==1.26.*")),
    Row("3.11", ("torch==2.15.*",)),
    Row("3.10", ("torch==2.13.*",)),
    Row("3.12", ("torch==2.13.*",)),
    Row("3.13", ("torch==2.13.*",)),
    Row("3.13", ("torch==2.15.*",)),
    Row("3.14", ("torch==2.15.*",)),
)


def main(arguments: list[str]) -> int:
    before = tabled(PAGE.read_text())
    lines: dict[tuple[str, str], tuple[str, str]] = {}
    failed = 0
    for row in ROWS:
        if os.environ.get("ROWS", "") not in " ".join(row.name):
            lines[row.name] = before.get(row.name, ("", "not tried"))
            continue
        try:
            python = environment(row)
        except NotHere as error:
            lines[row.name] = before.get(row.name, ("", ""))
            if not lines[row.name][0]:
                lines[row.name] = ("", f"not here: {error}")
        else:
            counts = run(python, arguments)
            failed += counts["failed"]
            words = [f"{number} {outcome}" for outcome, number in counts.items() if number]
            lines[row.name] = (versions(python), ", ".join(words))
        print(" | ".join((*row.name, *lines[row.name])), flush=True)
    PAGE.write_text(with_table(PAGE.read_text(), lines))
    return int(failed > 0)


def environment(row: Row) -> Path:
    """The interpreter of the environment of a row, which is made where it is not there; may raise NotHere."""
    python = row.folder / "bin" / "python"
    done = row.folder / ".stamp-breadth"
    if done.is_file():
        return python
    interpreter = which(f"python{row.python}")
    row.folder.mkdir(parents=True, exist_ok=True)
    constraints = row.folder / "constraints.txt"
    constraints.write_text("\n".join(row.pins) + "\n")
    refuse_cuda(interpreter, constraints)
    # The stamps of the Makefile: torch by itself, then rlsync with what runs need.
    variables = [f"VENV={row.folder}", f"CONSTRAINTS={constraints}", f"PYTHON={interpreter}"]
    finish(["make", "--no-print-directory", f"{row.folder}/.stamp-run", *variables])
    install = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    finish([*install, "-c", str(constraints), *TEST_NEEDS])
    done.touch()
    return python


def which(command: str) -> str:
    """Where an interpreter is that starts. A launcher of pyenv may be there, and its version not be chosen."""
    path = shutil.which(command)
    if path is None or subprocess.run([path, "-V"], capture_output=True, check=False).returncode:
        raise NotHere(f"no {command}")
    return path


def refuse_cuda(interpreter: str, constraints: Path) -> None:
    """Ask pip which torch it would install, and what that needs. Nothing but its metadata is fetched."""
    index = [f"--index-url={url}" for url in (os.environ.get("TORCH_INDEX"),) if url]
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        ask = ["-m", "pip", "install", "--dry-run", "--quiet", "--ignore-installed", "--no-deps"]
        finish([interpreter, *ask, f"--report={report}", *index, "-c", str(constraints), "torch"])
        (torch,) = json.loads(report.read_text())["install"]
    needs = torch["metadata"].get("requires_dist", [])
    if any(need.startswith(("nvidia-", "cuda-")) for need in needs):
        raise NotHere(f"torch {torch['metadata']['version']} is there with CUDA only")


def finish(command: list[str]) -> None:
    """Run a command; NotHere with the last line that it says if it fails."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = (done.stderr + done.stdout).splitlines()
        errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
        raise NotHere([f"{command[0]} failed", *errors][-1])


def run(python: Path, arguments: list[str]) -> Counter[str]:
    """How many tests have passed, failed and were skipped; one that ends pytest itself has failed."""
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [str(python), "-m", "pytest", f"--junitxml={report}", *arguments]
        subprocess.run(command, cwd=ROOT, check=False, timeout=TESTS_END_WITHIN_S)
        if not report.is_file():
            return Counter(failed=1)
        return counted(ElementTree.parse(report))


def counted(report: ElementTree.ElementTree) -> Counter[str]:
    """The outcomes of a report of pytest."""
    counts = Counter(passed=0, failed=0, skipped=0)
    for case in report.iter("testcase"):
        if case.find("skipped") is not None:
            counts["skipped"] += 1
        elif case.find("failure") is not None or case.find("error") is not None:
            counts["failed"] += 1
        else:
            counts["passed"] += 1
    return counts


def versions(python: Path) -> str:
    program = "import sys; from importlib.metadata import version; print(sys.version.split()[0])"
    program += f"; [print(name, version(name)) for name in {SHOWN}]"
    printed = subprocess.run(
        [str(python), "-c", program], capture_output=True, text=True, check=True
    )
    return ", ".join(printed.stdout.splitlines())


def tabled(page: str) -> dict[tuple[str, str], tuple[str, str]]:
    """The rows of the table in the page."""
    table = page.partition(BEGIN)[2].partition(END)[0]
    rows: dict[tuple[str, str], tuple[str, str]] = {}
    for line in table.splitlines()[2:]:
        python, pins, installed, tests = (cell.strip() for cell in line.strip("|").split("|"))
        rows[python, pins] = (installed, tests)
    return rows


def with_table(page: str, rows: Mapping[tuple[str, str], tuple[str, str]]) -> str:
    """The page with these rows in its table."""
    before, _, rest = page.partition(BEGIN)
    lines = [
        as_line(HEAD),
        "|" + "---|" * len(HEAD),
        *(as_line([*name, *row]) for name, row in rows.items()),
    ]
    return before + BEGIN + "\n".join(lines) + "\n" + END + rest.partition(END)[2]


def as_line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
