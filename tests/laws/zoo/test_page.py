"""The page of silent syncs and the tests of the zoo tell of the same faults."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.laws.zoo.parts import PAGE, ROOT, rows

ZOO = Path(__file__).parent


def rebuilt() -> set[str]:
    """The tests of the zoo that stand on a row of the page, as the page writes them."""
    return {
        f"{file.relative_to(ROOT)}::{node.name}"
        for file in ZOO.glob("test_*.py")
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef) and "row" in {argument.arg for argument in node.args.args}
    }


def test_every_fault_of_the_page_has_a_test_and_every_test_a_row() -> None:
    named = [row.path for row in rows()]
    assert len(named) == len(set(named))
    assert set(named) == rebuilt()


def test_everyone_who_names_a_fault_is_explained_on_the_page() -> None:
    above = PAGE.read_text().partition("<!-- faults -->")[0]
    explained = {who.lower() for who in re.findall(r"\*([^*]+)\*", above)}
    assert explained == {row.by.lower() for row in rows()}


def test_fifteen_faults_and_more_were_met_by_users() -> None:
    assert sum("https://github.com/" in row.saw for row in rows()) >= 15
