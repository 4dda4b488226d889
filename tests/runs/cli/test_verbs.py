"""What every verb has: frozen arguments, examples, exit codes; whatever stands in ``main.VERBS``."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlsync.runs.cli.main import VERBS, main, usage

#: verb -> its arguments and options, as --help lists them. Scripts lean on these: add, do not change.
ARGUMENTS = {
    "train": set(),  # Hydra's: overrides, and the flags of --hydra-help
    "explain": {"target", "--config-dir", "--json", "--timeout-s", "--trust"},
    "check": {"--json"},  # and what train takes
    "doctor": {"--trainer", "--env", "--timeout-s", "--markdown", "--json", "FILE.py:FUNCTION"},
    "status": {"run", "--watch", "--json", "--schema"},
    "eval": {
        *("run", "--best", "--checkpoint", "--episodes", "--seed", "--deterministic"),
        *("--device", "--video", "--no-video", "--max-episode-steps", "--json", "--trust"),
    },
    "rerun": {"run", "--until", "--from", "--into", "--json", "--trust"},
    "frame": {"run", "NUMBER", "--worker", "--rollout", "--step", "--env", "--from", "--json", "--trust"},
    "compare": {"one", "other", "--json"},
    "export": {"run", "file", "--which", "--json", "--trust"},
    "timeline": {"run", "--from", "--to", "--out", "--trace"},
    "plot": {"run", "--out"},
    "report": {"run", "--out", "--watch"},
    "ls": {"group", "--keys", "--config-dir", "--json", "--spaces"},
    "cp": {"GROUP/NAME", "FOLDER", "--as", "--force"},
}
#: What verbs that take overrides hand on to Hydra; and what rlsync adds there.
HYDRAS = {"--cfg", "--config-dir", "--hydra-help", "--trust", "--json"}
VERB = pytest.mark.parametrize("verb", VERBS)


def help_of(verb: str, capsys: pytest.CaptureFixture[str]) -> str:
    try:
        status = main([verb, "--help"])
    except SystemExit as ended:
        status = ended.code
    assert status == 0
    return capsys.readouterr().out


@VERB
def test_the_arguments_of_a_verb_are_frozen(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    sections = re.findall(r"^(?:positional arguments|options):\n((?:  .*\n)+)", help_of(verb, capsys), re.M)
    listed = re.findall(r"^  ((?:-\w, )?\S+)", "".join(sections), re.M)
    assert set(listed) - {"-h, --help"} == ARGUMENTS[verb]


@VERB
def test_the_help_of_a_verb_has_examples_and_exit_codes(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = help_of(verb, capsys)
    assert re.search(r"^examples:\n  rlsync " + verb, said, re.M)
    assert re.search(r"^exit status: 0 ", said, re.M)


def statuses_in_docs() -> dict[str, set[str]]:
    """verb -> the exit statuses that it has, by the table of docs/command_line.md."""
    text = (Path(__file__).parents[3] / "docs" / "command_line.md").read_text()
    heads = re.findall(r"^\| verb (.+)\|$", text, re.M)
    assert len(heads) == 1
    columns = [head.strip() for head in heads[0].split("|")[1:]]
    rows = {}
    for verb, cells in re.findall(r"^\| `(\w+)` \|(.+)\|$", text, re.M):
        filled = zip(columns, cells.split("|"), strict=True)
        rows[verb] = {column for column, cell in filled if cell.strip()}
    return rows


def test_the_table_of_exit_statuses_has_what_each_verb_says(capsys: pytest.CaptureFixture[str]) -> None:
    told = {}
    for verb in VERBS:
        paragraph = re.findall(r"^exit status: (.+(?:\n.+)*)", help_of(verb, capsys), re.M)[0]
        told[verb] = set(re.findall(r"\b([012]) \w", paragraph))
    assert statuses_in_docs() == told


@VERB
def test_examples_in_the_help_use_verbs_and_options_that_exist(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    examples = re.findall(r"^  rlsync (\w+)(.*)$", help_of(verb, capsys), re.M)
    assert {name for name, _ in examples} <= set(VERBS)
    for name, rest in examples:
        allowed = ARGUMENTS[name] | (HYDRAS if name in ("train", "check") else set())
        assert set(re.findall(r"--[\w-]+", rest)) <= allowed, rest


def test_every_verb_is_in_the_usage_with_one_line() -> None:
    assert set(ARGUMENTS) == set(VERBS)
    for verb, line in VERBS.items():
        assert re.search(rf"^  {verb} +{re.escape(line)}$", usage(), re.M)
        assert f"rlsync {verb}" in line, "it shows how it is called"
        assert len(line) < 100
