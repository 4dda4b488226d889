"""What those who carry the project on lean on: commit hooks, ends of the range, the README, habits."""

from __future__ import annotations

import ast
import io
import re
import runpy
import subprocess
import sys
import tokenize
from collections import Counter
from importlib.metadata import requires
from pathlib import Path
from xml.etree import ElementTree

import pytest
import tomllib
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

from rlsync.runs.cli.main import VERBS
from tests.tools.programs import ENDS_WITHIN_S

ROOT = Path(__file__).parents[2]
NEXT = runpy.run_path(str(ROOT / ".ci" / "compat_next.py"))
BREADTH = runpy.run_path(str(ROOT / ".ci" / "breadth.py"))
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


def test_what_is_tested_of_the_next_torchrl_is_a_night_of_it_with_the_same_torch() -> None:
    pins = pinned("compat/next.txt")
    assert set(pins) == {"torch", "torchrl-nightly", "tensordict-nightly"}
    assert pins["torch"] == pinned("constraints.txt")["torch"]


def test_what_may_fail_with_the_next_torchrl_is_a_test_of_ours_and_has_a_cause() -> None:
    causes = NEXT["written"](NEXT["WRITTEN"].read_text().splitlines())
    for test in causes:
        module, _, name = test.partition("::")
        file = ROOT / (module.replace(".", "/") + ".py")
        assert f"def {name.partition('[')[0]}(" in file.read_text(), test
    with pytest.raises(ValueError, match="no cause is written down"):
        NEXT["written"](["tests.a::b #"])


def test_what_differs_from_what_is_written_down_is_said() -> None:
    ran = {"a": True, "b": True, "c": False, "d": False}
    assert NEXT["changes"](ran, {"b": "a cause", "c": "another", "e": "did not run"}) == [
        "fails, and no cause is written down: a",
        "passes now: c (another)",
    ]


def test_the_table_of_versions_has_the_lowest_that_are_promised() -> None:
    about = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert about["requires-python"].removeprefix(">=") in {row.python for row in BREADTH["ROWS"]}
    pinned = {pin.removesuffix(".*") for row in BREADTH["ROWS"] for pin in row.pins}
    lowest = {need.replace(">=", "==") for need in about["dependencies"] if "," not in need}
    assert {need for need in lowest if need.startswith(("torch=", "gymnasium="))} <= pinned


def test_the_table_of_versions_is_kept_but_for_the_rows_that_ran() -> None:
    page = (ROOT / "docs" / "compatibility.md").read_text()
    rows = BREADTH["tabled"](page)
    assert list(rows) == [row.name for row in BREADTH["ROWS"]]
    assert BREADTH["with_table"](page, rows) == page


def test_the_outcomes_of_tests_are_counted(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    cases = "<testcase/><testcase><failure/></testcase><testcase><error/></testcase>"
    report.write_text(f"<testsuite>{cases}<testcase><skipped/></testcase></testsuite>")
    counts = BREADTH["counted"](ElementTree.parse(report))
    assert counts == {"passed": 1, "failed": 2, "skipped": 1}


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


#: Names that say nothing of the thing that they hold.
VAGUE = {
    "found",
    "given",
    "held",
    "told",
    "made",
    "own",
    "taken",
    "said",
    "seen",
    "kept",
    "what",
    "offers",
    "laid",
}

#: What code may have at most; for 1,000 lines of code where it says so. Lower a number when it can be lower.
AT_MOST = {
    "tokens a line": 8.8,
    "tuple assignments, for 1,000 lines": 0.5,
    "conditional expressions, for 1,000 lines": 4.0,
    "comprehensions, for 1,000 lines": 24.0,
    "functions with **kwargs": 24,  # most override or wrap what TorchRL calls so; train takes keys
    "functions with more than 15 locals": 12,
    "functions with a vague local": 0,
}


def habits() -> dict[str, float]:
    """Measures of how dense the code is, which no line break changes but the first."""
    count: Counter[str] = Counter()
    for path in sorted((ROOT / "rlsync").rglob("*.py")):
        source = path.read_text()
        beside: set[int] = set()  # lines of docstrings and imports
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                beside.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node):
                beside.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
                count["tuple assignments"] += any(isinstance(to, ast.Tuple) for to in node.targets)
            count["conditional expressions"] += isinstance(node, ast.IfExp)
            count["comprehensions"] += isinstance(
                node, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
            )
            if isinstance(node, ast.FunctionDef):
                count["functions with **kwargs"] += node.args.kwarg is not None
                stored = (
                    name
                    for name in ast.walk(node)
                    if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
                )
                local = {name.id for name in stored}
                count["functions with more than 15 locals"] += len(local) > 15
                count["functions with a vague local"] += bool(local & VAGUE)
        lines = enumerate(source.splitlines(), 1)
        count["lines"] += sum(
            bool(line.strip()) and not line.lstrip().startswith("#") and number not in beside
            for number, line in lines
        )
        kinds = (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING)
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            count["tokens"] += token.type in kinds and token.start[0] not in beside
    per_thousand = 1000 / count["lines"]
    return {
        "tokens a line": count["tokens"] / count["lines"],
        **{name: count[name] for name in count if name.startswith("functions")},
        **{
            f"{name}, for 1,000 lines": count[name] * per_thousand
            for name in ("tuple assignments", "conditional expressions", "comprehensions")
        },
    }


def test_the_code_is_no_denser_than_it_was() -> None:
    assert {name: at_most for name, at_most in habits().items() if at_most > AT_MOST[name]} == {}
