"""What a user installs: the wheel, in an empty environment, away from the checkout."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from rlsync.runs.config.shipped import SCHEMAS
from tests.tools.programs import ENDS_WITHIN_S

REPO = Path(__file__).resolve().parents[2]

LIST_INSTALLED_FILES = """
import importlib.metadata, json
files = importlib.metadata.files("rlsync")
print(json.dumps({str(file): str(file.locate()) for file in files}))
"""


def run(*command: str | Path, cwd: Path, env: dict[str, str] | None = None) -> str:
    """Run a command that must succeed; if it does not, both its streams are the message."""
    # Neither the checkout nor anything the caller's shell points Python at may leak in.
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=clean | (env or {}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=ENDS_WITHIN_S,
        check=False,
    )
    assert done.returncode == 0, f"{command} exited {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


class Installed:
    """A virtual environment that holds the rlsync wheel and nothing else."""

    def __init__(self, folder: Path) -> None:
        self.away = folder / "somewhere" / "else"
        self.away.mkdir(parents=True)
        pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input")
        offline = ("--no-deps", "--no-index", "--quiet")
        run(
            *(*pip, "wheel", REPO, *offline, "--no-build-isolation"),
            *("--wheel-dir", folder / "wheels"),
            cwd=folder,
        )
        (wheel,) = (folder / "wheels").glob("rlsync-*.whl")
        venv.create(folder / "venv", symlinks=True, with_pip=False)
        self.python = folder / "venv" / "bin" / "python"
        run(*pip, "--python", self.python, "install", *offline, wheel, cwd=folder)

    def files(self) -> dict[str, Path]:
        """Path inside site-packages -> path on disk, for every file of the installed package."""
        listing = json.loads(run(self.python, "-I", "-c", LIST_INSTALLED_FILES, cwd=self.away))
        return {name: Path(where) for name, where in listing.items()}

    def run_with_borrowed_packages(self, *arguments: str) -> str:
        """Run this environment's Python, lent the third-party packages of the one under test."""
        third_party = sysconfig.get_paths()["purelib"]
        return run(self.python, *arguments, cwd=self.away, env={"PYTHONPATH": third_party})


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return Installed(tmp_path_factory.mktemp("package"))


@pytest.mark.processes
def test_the_wheel_carries_every_config_byte_for_byte(installed: Installed) -> None:
    files = installed.files()
    of_repo = {
        f"rlsync/configs/{path.relative_to(REPO / 'configs').as_posix()}": path.read_bytes()
        for path in (REPO / "configs").rglob("*.yaml")
    }
    of_wheel = {name: path.read_bytes() for name, path in files.items() if name.endswith(".yaml")}
    assert "rlsync/configs/train.yaml" in of_wheel
    assert of_wheel == of_repo


@pytest.mark.processes
def test_the_wheel_carries_the_schemas_of_config_files(installed: Installed) -> None:
    of_repo = {file.relative_to(REPO).as_posix() for file in SCHEMAS.iterdir()}
    assert of_repo
    assert of_repo <= set(installed.files())


@pytest.mark.processes
def test_the_wheel_says_that_it_is_typed(installed: Installed) -> None:
    assert "rlsync/py.typed" in installed.files()


@pytest.mark.processes
def test_the_wheel_carries_every_module_and_no_test(installed: Installed) -> None:
    of_repo = {path.relative_to(REPO).as_posix() for path in (REPO / "rlsync").rglob("*.py")}
    of_wheel = {name for name in installed.files() if name.endswith(".py")}
    assert of_wheel == of_repo


@pytest.mark.thorough
@pytest.mark.processes
def test_the_installed_launcher_finds_its_configs_from_any_folder(installed: Installed) -> None:
    where = installed.run_with_borrowed_packages("-c", "import rlsync; print(rlsync.__file__)")
    assert Path(where.strip()).is_relative_to(installed.python.parents[1])
    config = installed.run_with_borrowed_packages("-m", "rlsync", "train", "--cfg", "job")
    assert "sync:" in config


def test_the_core_imports_the_standard_library_only() -> None:
    foreign = {
        f"{path.name}: {name}"
        for path in (REPO / "rlsync" / "core").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        for name in imported_names(node)
        if name.split(".")[0] not in sys.stdlib_module_names and not name.startswith("rlsync.core")
    }
    assert not foreign


def imported_names(node: ast.AST) -> list[str]:
    """The modules that one statement imports, absolutely named."""
    match node:
        case ast.Import():
            return [alias.name for alias in node.names]
        case ast.ImportFrom(level=0, module=str(module)):
            return [module]
        case _:
            return []
