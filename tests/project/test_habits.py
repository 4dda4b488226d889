"""What those who carry the project on lean on: hooks of a commit, ends of the range, the README."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path

import pytest
import tomllib
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

from rlsync.runs.cli.main import VERBS
from tests.tools.programs import ENDS_WITHIN_S

ROOT = Path(__file__).parents[2]
HOOKS = ROOT / ".pre-commit-config.yaml"


def pinned(file: str) -> dict[str, str]:
    """Package -> version, of a file of constraints."""
    lines = (ROOT / file).read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def recipe_of(target: str) -> str:
    """The commands that stand under a target of the Makefile."""
    (found,) = re.findall(rf"^{target}:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    return found


@pytest.mark.processes
def test_the_hooks_of_a_commit_are_valid_and_need_no_network() -> None:
    validate = [sys.executable, "-m", "pre_commit", "validate-config", str(HOOKS)]
    subprocess.run(validate, check=True, timeout=ENDS_WITHIN_S, capture_output=True)
    assert [repo["repo"] for repo in yaml.safe_load(HOOKS.read_text())["repos"]] == ["local"]


def test_what_a_commit_checks_is_what_make_check_checks() -> None:
    (repo,) = yaml.safe_load(HOOKS.read_text())["repos"]
    for hook in repo["hooks"]:
        *make, target = hook["entry"].split()
        assert make[0] == "make"
        assert re.search(rf"\b{target}\b", recipe_of("check"))
        assert recipe_of(target)


@pytest.mark.parametrize("file", ["compat/lowest.txt", "compat/highest.txt", "constraints.txt"])
def test_what_is_tested_is_within_the_range_that_is_promised(file: str) -> None:
    needs = {need.name: need.specifier for need in map(Requirement, requires("rlsync") or [])}
    for name, version in pinned(file).items():
        assert version in needs[name], name
    assert pinned(file)["torch"] == pinned("constraints.txt")["torch"]


def test_the_lowest_torchrl_of_the_range_is_tested() -> None:
    (need,) = (need for need in map(Requirement, requires("rlsync") or []) if need.name == "torchrl")
    (bound,) = (part.version for part in need.specifier if part.operator == ">=")
    lowest = pinned("compat/lowest.txt")["torchrl"]
    assert Version(lowest) == Version(bound)


def test_make_help_names_every_target_and_every_variable() -> None:
    makefile = (ROOT / "Makefile").read_text()
    helped = subprocess.run(
        ["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    named = set(re.findall(r"[a-z][a-z-]+", helped.stdout))
    (phony,) = re.findall(r"^\.PHONY: ((?:.*\\\n)*.*)$", makefile, re.MULTILINE)
    assert set(phony.replace("\\", " ").split()) <= named
    variables = set(re.findall(r"^([A-Z_]+) \?=", makefile, re.MULTILINE))
    assert variables == set(re.findall(r"^#   ([A-Z_]+)=", helped.stdout, re.MULTILINE))


def test_every_extra_stands_in_the_table_of_the_page_about_installing() -> None:
    about = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    page = (ROOT / "docs" / "install.md").read_text()
    listed = dict(re.findall(r"^\| `rlsync\[(\w+)\]` \| (.*?) \|", page, re.MULTILINE))
    for_users = set(about) - {"docs", "dev"}
    assert set(listed) == for_users
    for extra, packages in listed.items():
        wanted = {Requirement(need).name for need in about[extra]}
        assert set(re.findall(r"[\w-]+", packages)) == wanted, extra


def test_the_readme_lists_every_verb() -> None:
    assert re.findall(r"^\| `rlsync (\w+)` \|", (ROOT / "README.md").read_text(), re.MULTILINE) == list(VERBS)
