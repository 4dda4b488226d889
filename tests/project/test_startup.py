"""What a start loads: names when they are first used, and of the heavy packages only what a verb needs.

Times are for benchmarks/startup.py; these tests look at ``sys.modules`` of a fresh interpreter.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from rlsync.runs.recipes.run_files import BOARD
from tests.tools.counted_board import CountedBoard
from tests.tools.programs import fresh_python

HEAVY = ("torch", "torchrl", "tensordict", "gymnasium", "hydra", "omegaconf", "rich", "matplotlib", "numpy")
TELL = f"import json, sys; print(json.dumps([name for name in {HEAVY} if name in sys.modules]))"


def loaded_by(code: str) -> set[str]:
    """Which heavy packages a fresh interpreter has loaded after ``code``."""
    done = fresh_python("-c", f"{code}\n{TELL}", check=False)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def loaded_by_verb(*words: str) -> set[str]:
    return loaded_by(f"from rlsync.runs.cli.main import main\nmain({list(words)!r})")


@pytest.mark.processes
@pytest.mark.parametrize("words", [["--help"], ["--version"], ["trian"], []], ids=str)
def test_the_command_itself_loads_nothing_heavy(words: list[str]) -> None:
    assert loaded_by_verb(*words) == set()


@pytest.mark.processes
@pytest.mark.parametrize("words", [["ls"], ["ls", "recipe"], ["ls", "--json"]], ids=str)
def test_listing_configs_loads_at_most_what_draws_the_table(words: list[str]) -> None:
    assert loaded_by_verb(*words) <= {"rich"}


@pytest.mark.thorough
@pytest.mark.processes
def test_status_loads_torch_for_the_board_and_nothing_of_torchrl(tmp_path: Path) -> None:
    board = CountedBoard()
    try:
        (tmp_path / BOARD).write_text(json.dumps(asdict(board.handle)))
        assert loaded_by_verb("status", str(tmp_path)) <= {"torch", "numpy"}
    finally:
        board.close()


@pytest.mark.processes
@pytest.mark.parametrize(
    "module", ["rlsync", "rlsync.core", "rlsync.core.errors", "rlsync.runs.recipes.run_files"]
)
def test_the_package_and_its_lowest_floor_load_nothing_heavy(module: str) -> None:
    assert loaded_by(f"import {module}") == set()


@pytest.mark.processes
@pytest.mark.thorough
def test_the_benchmark_of_starts_writes_what_it_measured(tmp_path: Path) -> None:
    script, out = Path(__file__).parents[2] / "benchmarks" / "startup.py", tmp_path / "startup.json"
    commands = ["rlsync --help", "rlsync status RUN"]
    asked = ["--runs", "1", "--only", "commands", "--commands", *commands, "--json", str(out)]
    done = fresh_python(str(script), *asked, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(out.read_text())["commands"].keys() == set(commands)
    assert "| `rlsync --help` |" in done.stdout


#: What the floors below the plug may load. One interpreter imports them in this order.
FLOORS = {
    "rlsync.core": set(),
    "rlsync.transport": {"torch", "numpy"},
    "rlsync.tensors": {"torch", "tensordict", "numpy"},
    "rlsync.sync": {"torch", "tensordict", "numpy"},
}
EVERY_MODULE_OF_THEM = f"""
import importlib, pkgutil
for name in {list(FLOORS)}:
    package = importlib.import_module(name)
    for found in pkgutil.walk_packages(package.__path__, name + "."):
        importlib.import_module(found.name)
    {TELL}
"""


@pytest.mark.thorough
@pytest.mark.processes
def test_the_floors_below_the_plug_load_no_torchrl() -> None:
    """A relay process is light: it takes the transports and ``sync`` without TorchRL."""
    done = fresh_python("-c", EVERY_MODULE_OF_THEM)
    for (floor, allowed), loaded in zip(FLOORS.items(), done.stdout.splitlines(), strict=True):
        assert set(json.loads(loaded)) <= allowed, floor
