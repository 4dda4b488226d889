"""What the shell completes after ``rlsync``: what there is, at once, and nothing else."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import sys
import time
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


#: What is typed, and the words that the shell then offers.
ASKED = {
    "rlsync comp": ["compare"],
    "rlsync train recipe=dreamer_v": ["recipe=dreamer_v1", "recipe=dreamer_v3"],
    "rlsync export --wh": ["--which"],
    "rlsync cp recipe/p": ["recipe/ppo"],
}


def in_shell(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(name) is None, reason=f"there is no {name}")


@pytest.fixture
def with_command(tmp_path: Path) -> dict[str, str]:
    """An environment in which ``rlsync`` is that of this checkout."""
    command = tmp_path / "rlsync"
    command.write_text(f'#!/bin/sh\nPYTHONPATH={REPO} exec {sys.executable} -m rlsync "$@"\n')
    command.chmod(0o755)
    path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    return os.environ | {"PATH": path, "HOME": str(tmp_path), "TERM": "dumb"}


@pytest.mark.processes
@pytest.mark.seconds
@in_shell("bash")
def test_bash_completes_the_command(with_command: dict[str, str]) -> None:
    script = f"""
{shellcode(["rlsync"])}
COMP_WORDBREAKS=$' \\t\\n"\\'><=;|&(:'
COMP_TYPE=9
ask() {{
    COMP_LINE=$1 COMP_POINT=${{#1}} COMPREPLY=()
    _python_argcomplete rlsync
    echo ${{COMPREPLY[*]}}
}}
"""
    script += "".join(f"ask '{words}'\n" for words in ASKED)
    done = subprocess.run(
        ["bash", "-c", script], env=with_command, capture_output=True, text=True, timeout=60, check=True
    )
    # It breaks words at "=", and is offered what comes after it.
    after = [[word.rpartition("=")[2] for word in words] for words in ASKED.values()]
    assert [line.split() for line in done.stdout.splitlines()] == after


@pytest.mark.processes
@pytest.mark.seconds
@in_shell("fish")
def test_fish_completes_the_command(with_command: dict[str, str]) -> None:
    script = "register-python-argcomplete --shell fish rlsync | source\n"
    script += "".join(f"complete -C '{words}' | cut -f1 | tr '\\n' ' '; echo\n" for words in ASKED)
    done = subprocess.run(
        ["fish", "--private", "-c", script],
        env=with_command,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert [line.split() for line in done.stdout.splitlines()] == [*ASKED.values()]


@pytest.mark.processes
@pytest.mark.seconds
@in_shell("zsh")
def test_zsh_completes_the_command_at_a_press_of_the_tab_key(with_command: dict[str, str]) -> None:
    ours, its = pty.openpty()
    shell = subprocess.Popen(
        ["zsh", "-f", "-i"], stdin=its, stdout=its, stderr=its, env=with_command, start_new_session=True
    )
    os.close(its)

    def typed(keys: str, *wanted: str) -> None:
        """Type, and wait until the shell has written all that is wanted."""
        os.write(ours, keys.encode())
        written = ""
        end = time.monotonic() + 60
        while not all(word in written for word in wanted):
            ready, _, _ = select.select([ours], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"{keys!r} became {written!r}"
            written += os.read(ours, 65536).decode(errors="replace")

    try:
        typed("autoload -U compinit && compinit -u && ", "compinit -u &&")
        typed('eval "$(register-python-argcomplete rlsync)" && echo rea""dy\n', "ready")
        for words, offered in ASKED.items():
            typed(f"{words}\t", *offered)
            typed("\x15")  # Ctrl-U clears the line
    finally:
        shell.kill()
        shell.wait()
        os.close(ours)
