"""Print the folders of tests that concern what differs from the merge base with main; all of them if unknown.

Those that most changed files concern come first: ``make test-touched`` runs as many as it has time for.
A fresh clone whose HEAD is main has nothing to compare with, so all of them are printed there, too.
"""

from __future__ import annotations

import subprocess
from collections import Counter
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests"
RUNS = "runs"  #: the house whose floors have folders of their own below it
#: The floors that the canary, the contract and the zoo of tests/laws are about.
UNDER_LAWS = {"core", "tensors", "transport", "sync", "torchrl_plugin", "record", f"{RUNS}/actors"}
#: Floors whose tests are in the folders of others.
WITHOUT_FOLDER = {
    f"{RUNS}/config": {f"{RUNS}/cli"},
    f"{RUNS}/life": {f"{RUNS}/cli"},
    f"{RUNS}/compat": {f"{RUNS}/recipes", "torchrl_plugin"},
}
#: Where the tests of what stands outside rlsync/ and tests/ are.
ELSEWHERE = {
    "configs": (f"{RUNS}/cli", f"{RUNS}/recipes"),
    "benchmarks": ("project",),
    "examples": ("project",),
    "docs": ("project",),
    "compat": ("stock", "torchrl_plugin"),
    "README.md": ("project",),
    "CONTRIBUTING.md": ("project",),
    "CHANGELOG.md": (),
    "LICENSE": (),
}


def everything() -> set[str]:
    tested = {folder.name: folder for folder in TESTS.iterdir() if any(folder.rglob("test_*.py"))}
    floors = {
        f"{RUNS}/{floor.name}"
        for floor in tested.pop(RUNS).iterdir()
        if any(floor.glob("test_*.py"))
    }
    return floors | tested.keys()


def folders_of(file: str) -> set[str]:
    """The folders of tests that one changed file concerns."""
    parts = file.split("/")
    if len(parts) > 3 and parts[1] == RUNS:  # a floor of that house counts as one of its own
        parts[1:3] = ["/".join(parts[1:3])]
    match parts:
        case ["rlsync", floor, _, *_] if floor in everything() or floor in WITHOUT_FOLDER:
            concerned = WITHOUT_FOLDER.get(floor, {floor})
            return concerned | {"laws"} if floor in UNDER_LAWS else concerned
        case ["rlsync", _]:
            return {"project"}
        case ["tests", folder, _, *_] if folder in everything():
            return {folder}
        case [first, *_] if first in ELSEWHERE:
            return set(ELSEWHERE[first])
    # tests/tools, tests/conftest.py, pyproject.toml, a floor without tests of its own
    return everything()


def in_order(files: list[str] | None) -> list[str]:
    """The folders that changed files concern, those that most of them concern first."""
    concerned = everything() if files is None else chain.from_iterable(map(folders_of, files))
    return [folder for folder, _ in Counter(sorted(concerned)).most_common()]


def changed() -> list[str] | None:
    """The files that differ from the merge base with main, new ones among them; None if that is unknown."""
    head = git("rev-parse", "HEAD")
    for main in ("origin/main", "main"):
        base = git("merge-base", "HEAD", main)
        if base is not None and base != head:
            new = git("ls-files", "--others", "--exclude-standard")
            return [*lines(git("diff", "--name-only", base)), *lines(new)]
    return None


def git(*words: str) -> str | None:
    """What git says, or None if it fails or is not there."""
    try:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def lines(said: str | None) -> list[str]:
    return (said or "").splitlines()


if __name__ == "__main__":
    print(*(f"tests/{folder}" for folder in in_order(changed())))
