"""What the shell completes after ``rlsync``: what there is, at once, and nothing else."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from argcomplete import shellcode

from rlsync.runs.cli.completion import _keys, _options, overrides
from rlsync.runs.cli.main import VERBS
from rlsync.runs.config import shipped
from rlsync.runs.config.reference import reference
from tests.project.test_startup import loaded_by
from tests.runs.cli.test_verbs import ARGUMENTS

REPO = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb != "train"])
def test_the_options_of_a_verb_are_those_of_its_parser(verb: str) -> None:
    listed = {next(name for name in names if name.startswith("--")) for names, _ in _options(verb)}
    assert listed == {argument for argument in ARGUMENTS[verb] if argument.startswith("--")}


@pytest.mark.parametrize("recipe", ["ppo", "laser"])
def test_the_keys_are_those_that_ls_lists(recipe: str) -> None:
    listed = {key.name for key in reference([f"recipe={recipe}"]) if not key.is_section}
    of_recipe = {name for name, _ in _keys(recipe) if name.startswith("recipe.")}
    assert of_recipe == {name for name in listed if name.startswith("recipe.")}
    assert listed - of_recipe <= {name for name, _ in _keys(recipe)}


def test_a_group_a_choice_a_key_and_its_values_are_completed() -> None:
    assert overrides("recip")[0] == "recipe="
    assert overrides("recipe=") == [f"recipe={config.name}" for config in shipped.groups()["recipe"]]
    assert overrides("env=p") == ["env=pendulum", "env=pong"]
    assert overrides("recipe.alpha_l", ["recipe=sac", "seed=1"]) == ["recipe.alpha_lr="]
    assert overrides("recipe.alpha_l", ["recipe=ppo"]) == []
    assert overrides("env.life", []) == ["env.life_loss_ends_episode="]
    assert overrides("recipe.anneal_lr=") == ["recipe.anneal_lr=true", "recipe.anneal_lr=false"]
    assert overrides("recipe=mine") == []
    assert len(overrides("")) > len(shipped.groups()) + 50


@pytest.mark.processes
@pytest.mark.seconds
def test_it_loads_nothing_heavy() -> None:
    assert loaded_by("from rlsync.runs.cli.completion import overrides; overrides('recipe.l')") == set()


@pytest.mark.processes
@pytest.mark.seconds
@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes_the_command(tmp_path: Path) -> None:
    command = tmp_path / "rlsync"
    command.write_text(f'#!/bin/sh\nPYTHONPATH={REPO} exec {sys.executable} -m rlsync "$@"\n')
    command.chmod(0o755)
    asked = {
        "rlsync comp": ["compare"],
        "rlsync train recipe=dreamer_v": ["dreamer_v1", "dreamer_v3"],
        "rlsync export --wh": ["--which"],
        "rlsync cp recipe/p": ["recipe/ppo"],
    }
    script = f"""
PATH={tmp_path}:$PATH
{shellcode(["rlsync"])}
COMP_WORDBREAKS=$' \\t\\n"\\'><=;|&(:'
COMP_TYPE=9
ask() {{
    COMP_LINE=$1 COMP_POINT=${{#1}} COMPREPLY=()
    _python_argcomplete rlsync
    echo ${{COMPREPLY[*]}}
}}
"""
    script += "".join(f"ask '{words}'\n" for words in asked)
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert [line.split() for line in done.stdout.splitlines()] == [*asked.values()]
