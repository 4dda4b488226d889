"""What ``--json`` prints is one document, whatever an environment prints, from Python or from C."""

from __future__ import annotations

import importlib
import inspect
import json
import os
from pathlib import Path
from typing import Any

import pytest

from rlsync.runs.cli.main import VERBS, asks_json, main
from rlsync.runs.plain import json_of
from tests.runs.cli.test_verbs import ARGUMENTS
from tests.tools.programs import run_program

#: It prints at its import, and when the process ends: no process of the tests itself imports it.
LOUD = ("env=gymnasium", "env.id=tests.tools.parts.loud:Loud-v0")


@pytest.mark.parametrize("verb", [verb for verb in VERBS if "--json" in ARGUMENTS[verb]])
def test_a_verb_with_json_prints_its_document_where_nothing_else_is_printed(verb: str) -> None:
    source = inspect.getsource(importlib.import_module(f"rlsync.runs.cli.{verb}"))
    assert "print_document(" in source
    assert "print(json" not in source


@pytest.mark.seconds
@pytest.mark.processes
def test_a_document_is_alone_on_the_standard_output_of_this_process(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert main(["check", "--json", *LOUD]) == 0
    os.write(1, b"after it")
    out, err = capfd.readouterr()
    document, end, after = out.rpartition("}\n")
    assert json.loads(document + end)["plans"]
    assert after == "after it", "the output is again what it was before"
    for how in ("simulator", "simulator, past Python", "simulator, from C"):
        assert f"{how}: close\n" in err


@pytest.mark.seconds
@pytest.mark.processes
def test_a_document_goes_to_whatever_stands_for_the_standard_output(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["check", "--json", *LOUD]) == 0
    assert json.loads(capsys.readouterr().out)["plans"]


@pytest.mark.seconds
@pytest.mark.processes
def test_neither_workers_nor_the_exit_of_the_process_print_beside_a_document(tmp_path: Path) -> None:
    few = ("collector.num_workers=1", "collector.frames_per_batch=32")
    ended = run_program("rlsync", "check", "--json", *LOUD, *few, cwd=tmp_path)
    assert ended.returncode == 0
    assert json.loads(ended.stdout)["ok"]
    assert "simulator: step\n" in ended.stderr
    assert "simulator: exit\n" in ended.stderr


def test_an_error_leaves_the_standard_output_empty(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--json", "recipe.lr=-1"]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert "\n  cure   " in err


def test_the_short_forms_that_argparse_takes_ask_for_a_document() -> None:
    assert all(asks_json(["eval", word]) for word in ("--json", "--js", "--j"))
    assert not asks_json(["eval", "run", "--", "--seed", "-j"])


@pytest.mark.parametrize("odd", [float("inf"), float("-inf"), float("nan")])
def test_what_json_has_no_number_for_is_null(odd: float) -> None:
    held: dict[str, Any] = {"one": odd, "many": [1.5, (odd, {"deep": odd})]}
    assert json.loads(json_of(held)) == {"one": None, "many": [1.5, [None, {"deep": None}]]}
    assert json_of({"a": [1, None, True, "x"]}, None) == '{"a": [1, null, true, "x"]}'
