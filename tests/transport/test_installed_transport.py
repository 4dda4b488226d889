"""The transport of the page as a package: it is installed, keeps the laws, and is chosen by its name."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import tomllib

from rlsync import BoardScheme, ConfigError
from tests.tools.programs import as_installed, fresh_python, installed_from, run_program

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "how_to" / "write_a_transport.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package of the page and the metadata that pip makes of its pyproject.toml."""
    folder = tmp_path_factory.mktemp("installed")
    package = written(folder)["project"]
    (groups,) = package["entry-points"].items()
    group, names = groups
    entries = "".join(f"{name} = {at}\n" for name, at in names.items())
    as_installed(folder, package["name"].replace("-", "_"), f"[{group}]\n{entries}")
    return folder


@pytest.fixture
def installed_by_pip(tmp_path: Path) -> Path:
    source = tmp_path / "rlsync-tcp"
    source.mkdir()
    written(source)
    return installed_from(source, tmp_path / "target")


def written(folder: Path) -> dict[str, Any]:
    """Write the package of the page; returns its pyproject.toml."""
    blocks = BLOCK.findall(PAGE.read_text())
    module = [body for kind, body in blocks if kind == "python" and ">>>" not in body]
    (folder / "rlsync_tcp.py").write_text("\n".join(module))
    project = next(body for kind, body in blocks if kind == "toml")
    (folder / "pyproject.toml").write_text(project)
    return tomllib.loads(project)


def run(installed: Path, folder: Path, module: str, *words: str) -> str:
    paths = os.pathsep.join((str(installed), str(ROOT)))
    env = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = run_program(module, *words, cwd=folder, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.thorough  # those of rlsync are held to the same laws in tests/laws
def test_a_transport_of_a_package_keeps_the_laws_that_rlsync_ships(
    installed_by_pip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(installed_by_pip), str(ROOT))))
    # Not forked: tests/laws imports the shipped tests, and they list the transports when they are imported.
    words = ("-q", "--pyargs", "rlsync.testing", "-k", "tcp", "-p", "no:cacheprovider")
    done = fresh_python("-m", "pytest", *words, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^2\d passed, \d+ deselected", done.stdout, re.M), done.stdout


TELLING = """
from rlsync.transport.board import BoardWriter

class Telling(BoardWriter):
    def close(self):
        print("closed", flush=True)
        super().close()
"""
ACTS = """
from torchrl.collectors import MultiSyncCollector
from rlsync import BoardScheme
from tests.tools.parts import make_small_canary, make_workers

if __name__ == "__main__":
    policy = make_small_canary().fill(1)
    scheme = BoardScheme(transport="tcp")
    collector = make_workers(MultiSyncCollector, policy, schemes={"policy": scheme})
    print(type(scheme.board.writer).__name__)
    for number, batch in zip(range(1, 5), collector):
        print(*(batch[key].unique().tolist() for key in ("policy_version", "canary_min", "canary_max")))
        policy.fill(number + 1)
        collector.update_policy_weights_()
    collector.shutdown()
"""
LOOP = """
from torchrl.collectors import MultiSyncCollector
from rlsync import BoardScheme
from tests.tools.parts import make_small_canary, make_workers

scheme = BoardScheme(transport="telling")
collector = make_workers(MultiSyncCollector, make_small_canary(), schemes={"policy": scheme})
print(len(next(iter(collector))))
"""


@pytest.mark.slow
@pytest.mark.processes
def test_workers_act_with_what_a_transport_of_a_package_brings(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "acts.py").write_text(ACTS)
    kind, *acted = run(installed, tmp_path, str(tmp_path / "acts.py")).splitlines()
    assert kind == "TcpTransport"
    assert acted == [f"[{version}] [{version}.0] [{version}.0]" for version in range(1, 5)]


@pytest.mark.processes
def test_a_transport_is_closed_at_the_end_of_a_program_that_shut_nothing_down(tmp_path: Path) -> None:
    (tmp_path / "telling.py").write_text(TELLING)
    (tmp_path / "loop.py").write_text(LOOP)
    as_installed(tmp_path, "telling", "[rlsync.transports]\ntelling = telling:Telling\n")
    assert run(tmp_path, tmp_path, str(tmp_path / "loop.py")).splitlines()[-1] == "closed"


def test_a_transport_without_a_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"no transport 'bord'\n  where  .*\n  cure   did you mean 'board'"):
        BoardScheme(transport="bord")


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("def make(address): ...", r"making a transport raised TypeError: make\(\) missing 1 required.*\n"),
        ("def make(): raise OSError('no route')", r"making a transport raised OSError: no route\n"),
        ("class make:\n    layout = None", r"a transport lacks handle, newest_stamp, .*, join, .*\n"),
    ],
)
def test_what_makes_no_transport_is_told_in_three_lines(
    code: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path.name.replace("-", "_")
    (tmp_path / f"{module}.py").write_text(code)
    as_installed(tmp_path, "mine", f"[rlsync.transports]\nmine = {module}:make\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=told + rf"  where  transport 'mine', at {module}:make\n  cure   "):
        BoardScheme(transport="mine")
